"""torch.utils.flop_counter counts every op, by the formulas of flash_qla/ops/flops.py."""

import sys
from pathlib import Path

import pytest
import torch
from cases import Case, make_gradients, make_inputs
from every_op import CONVOLUTIONS, NAMES, REGIONS, later_ops, make_call, op_of
from subprocesses import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import flash_qla
from flash_qla.ops.flops import backward_flop, decode_flop, forward_flop

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import backward as benchmark_of_backward
import forward as benchmark_of_forward

CHUNK = 64


def flop_of_products(*products: tuple[int, int, int, int]) -> int:
    """Of a chunk: (how many, rows, inner dimension, columns)."""
    return sum(2 * count * m * k * n for count, m, k, n in products)


@pytest.mark.parametrize(("K", "V"), ((128, 128), (96, 192), (64, 512), (8, 24)))
def test_formulas(K, V):
    """The lists of products in docs/design.md."""
    C = CHUNK
    forward = flop_of_products((3, C, K, V), (2, C, K, C), (2, C, C, V))
    backward = flop_of_products((8, C, K, V), (5, C, K, C), (5, C, C, V), (2, C, C, C))
    assert forward == C * forward_flop(K, V) and backward == C * backward_flop(K, V)
    assert decode_flop(K, V) == 6 * K * V
    assert float(f"{forward_flop(K, V):.3g}") == benchmark_of_forward.flop(K, V)
    assert float(f"{backward_flop(K, V):.3g}") == benchmark_of_backward.flop(K, V)


def test_the_documented_numbers():
    assert round(forward_flop(128, 128) / 1e3) == 164 and round(backward_flop(128, 128) / 1e3) == 442


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_every_op(name):
    """begin and finish count as the pass."""
    call = make_call(name, "cpu")
    tokens = sum(call.lengths)
    if name in CONVOLUTIONS:
        D, W = call.arguments["weight"].shape
        assert counted(call) == tokens * D * W * (4 if name.endswith("_bwd") else 2)
        return
    if name in REGIONS:
        D, W = call.arguments["conv_weight"].shape
        flop = backward_flop if name.endswith("_bwd") else decode_flop if name.startswith("decode") else forward_flop
        of_convolution = tokens * D * W * (4 if name.endswith("_bwd") else 2)
        assert counted(call) == tokens * 2 * flop(64, 96) + of_convolution
        return
    if name.startswith("gated_rms_norm"):
        flop = lambda K, V: 0  # noqa: E731  no product of matrices
    elif name.startswith("decode"):
        flop = decode_flop
    else:
        flop = backward_flop if "backward" in name or name.endswith("_bwd") else forward_flop
    assert counted(call) == tokens * 2 * flop(64, 96)  # make_call has H_v = 2, K = 64, V = 96
    assert all(op_of(x).overloadpacket in flop_registry for x in (name, *later_ops(name)))


@pytest.mark.parametrize("case", (Case(B=2, T=70, K=16, V=8), Case(lengths=(65, 0, 3), padding=2, K=16, V=8)), ids=str)
def test_training_step(case):
    """Through autograd: as many as of a forward and a backward, in whichever ops they are. Padding counts."""
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    tokens, H_v = inputs["v"].shape[0] * inputs["v"].shape[1], case.H_v
    inputs["v"].requires_grad_()

    def step():
        o, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        torch.autograd.backward((o, state), (gradients["do"].nan_to_num(), gradients["dht"]))

    assert counted(step) == tokens * H_v * (forward_flop(16, 8) + backward_flop(16, 8))
    with torch.no_grad():
        forward = counted(lambda: flash_qla.chunk_gated_delta_rule(**inputs))
    assert forward == tokens * H_v * forward_flop(16, 8)


def test_fake_tensors():
    """The count of a model that is too large for this machine."""
    with FakeTensorMode():
        q = torch.empty(1, 2**20, 16, 128, dtype=torch.bfloat16)
        v = torch.empty(1, 2**20, 64, 128, dtype=torch.bfloat16)
        g = torch.empty(1, 2**20, 64)
        assert counted(lambda: flash_qla.chunk_gated_delta_rule(q, q, v, g, g)) == 2**26 * forward_flop(128, 128)


ORDERS = ("import flash_qla, torch.utils.flop_counter", "import torch.utils.flop_counter, flash_qla")


@pytest.mark.parametrize("imports", ORDERS)
def test_in_either_order_of_imports(imports):
    """flash_qla imports neither module by itself, because that takes a second."""
    code = f"""
import sys, torch
{imports}
assert "torch.distributed.tensor" not in sys.modules
x, g = torch.randn(1, 5, 2, 8), torch.zeros(1, 5, 2)
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    flash_qla.chunk_gated_delta_rule(x, x, x, g, g)
print(counter.get_total_flops())
import inspect  # the module has its loader, which finds its source
assert "register_flop_formula" in inspect.getsource(torch.utils.flop_counter)
assert type(torch.utils.flop_counter.__loader__).__name__ == "SourceFileLoader"
"""
    assert run_python(code, FLASH_QLA_QUIET="1").strip() == str(10 * forward_flop(8, 8))


def test_import_is_not_slower():
    code = "import flash_qla, sys; print({'torch.utils.flop_counter', 'torch.distributed.tensor'} & sys.modules.keys())"
    assert run_python(code).strip() == "set()"
