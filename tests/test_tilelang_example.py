"""examples/chunk_gated_delta_rule_tilelang.py: compiled for the CPU it agrees with the recurrence, and TileLang lowers
it for Hopper."""

import pytest
import torch
from accuracy import BARS
from cases import Case, make_inputs, parametrize, reference_of
from cpp_example import ROOT, load_example

tilelang = pytest.importorskip("tilelang", reason="needs TileLang (in the `test` extra)")
T = pytest.importorskip("tilelang.language")

pytestmark = pytest.mark.long

example = load_example(ROOT / "examples/chunk_gated_delta_rule_tilelang.py")


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(tilelang.env, "TILELANG_DISABLE_CACHE", "1")


@parametrize(
    Case(T=130, H_k=1, H_v=2, dtype=torch.float32),
    Case(B=2, T=64, H_k=2, H_v=2, dtype=torch.float32, gate="logsigmoid"),
    Case(T=1, H_k=1, H_v=1, dtype=torch.float32),
)
def test_on_the_cpu(case, monkeypatch, no_cache):
    for scope in ("alloc_shared", "alloc_fragment"):  # a CPU has neither: all tiles are arrays
        monkeypatch.setattr(T, scope, T.alloc_global)
    kernel = tilelang.compile(example.chunk_gated_delta_rule(case.B, case.T, case.H_k, case.H_v, "float32"), target="c")
    inputs = make_inputs(case, "cpu")
    o, final_state = torch.full_like(inputs["v"], torch.nan), torch.full_like(inputs["initial_state"], torch.nan)
    kernel(*(inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state")), o, final_state)
    reference = reference_of(inputs)
    for name, x in (("o", o), ("final_state", final_state)):
        expected = getattr(reference, name)
        assert (x - expected).norm() <= BARS[torch.float32] * expected.norm(), name


def test_for_hopper():
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        source = tilelang.lower(example.chunk_gated_delta_rule(1, 130, 1, 2), target=target).kernel_source
    assert "wgmma_ss" in source and "tma_load" in source
