"""What programs for the published FlashQLA (flash-qla on PyPI) call: arguments by position, results, contexts."""

import dataclasses
import importlib

import pytest
import torch
from cases import Case, make_gradients, make_inputs
from dispatched import Ran
from published_ranks import (
    assert_near,
    fla_context_on_ranks,
    low_level_on_ranks,
    published_context_on_ranks,
    without_the_cache,
)
from ranks import GroupOfOne, on_gpus, run_on_ranks

import flash_qla
from flash_qla.cp.published import CPCache
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context

TENSORS = ("q", "k", "v", "g", "beta")
PATHS = ("flash_qla", "flash_qla.ops.gated_delta_rule", "flash_qla.ops.gated_delta_rule.chunk")


def inputs_of(case: Case, device: str = "cpu") -> tuple[list[torch.Tensor], dict]:
    inputs = make_inputs(case, device)
    del inputs["auto_cp"]
    return [inputs.pop(name) for name in TENSORS], inputs


@pytest.mark.parametrize("path", PATHS)
def test_import_paths(path):
    module = importlib.import_module(path)
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"):
        assert getattr(module, name) is getattr(flash_qla, name)


@pytest.mark.parametrize("case", (Case(B=2, T=70), Case(lengths=(70, 0, 3), state_v_first=True)), ids=str)
def test_high_level_by_position(case, device):
    tensors, options = inputs_of(case, device)
    scale, h0, offsets = 0.3, options["initial_state"], options["cu_seqlens"]
    expected = flash_qla.chunk_gated_delta_rule(
        *tensors, scale=scale, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=offsets, state_v_first=case.state_v_first,
    )  # fmt: skip
    actual = flash_qla.chunk_gated_delta_rule(
        *tensors, scale, h0, True, True, offsets, False, case.state_v_first, True, False, None, False
    )
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("case", (Case(B=2, T=70), Case(lengths=(70, 0, 3), state_v_first=True)), ids=str)
def test_low_level_by_position(case, device):
    """Six results, and a backward that takes the sixth."""
    tensors, options = inputs_of(case, device)
    gradients = make_gradients(case, device)
    h0, offsets, v_first = options["initial_state"], options["cu_seqlens"], case.state_v_first
    native = flash_qla.chunk_gated_delta_rule_intermediates(*tensors, **options, output_h=True)
    outputs = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, None, h0, offsets, True, True, True, v_first, True, None, True
    )
    *results, cp_cache = outputs
    assert len(outputs) == 6 and cp_cache is None
    assert all(torch.equal(x, y) for x, y in zip(results, native, strict=True))

    q, k, v, _, beta = tensors
    g, A, *_ = results
    do, dht = gradients["do"], gradients["dht"]
    expected = flash_qla.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, A, do, dht, initial_state=h0, cu_seqlens=offsets, state_v_first=v_first
    )
    actual = flash_qla.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, A, do, dht, None, h0, offsets, v_first, True, cp_cache, None
    )
    assert len(actual) == 6
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_low_level_defaults(device):
    """h is None unless it is asked for; the final state is not."""
    tensors, _ = inputs_of(Case(T=5), device)
    g, A, o, h, final_state, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(*tensors)
    assert h is None and cp_cache is None and final_state is not None
    assert flash_qla.chunk_gated_delta_rule_fwd(*tensors, output_final_state=False)[4] is None
    assert len(flash_qla.chunk_gated_delta_rule_bwd(*tensors[:3], g, tensors[4], A, o)) == 6


def test_low_level_has_gradients(device):
    tensors, _ = inputs_of(Case(T=5), device)
    leaves = [x.requires_grad_() for x in tensors]
    _, _, o, _, final_state, _ = flash_qla.chunk_gated_delta_rule_fwd(*leaves)
    assert o.requires_grad and final_state.requires_grad


@pytest.mark.parametrize("enable_intra", (False, True))
def test_context_of_one_card(enable_intra, device):
    """It has the offsets, and decides in place of auto_cp."""
    case = Case(lengths=(70, 0, 3))
    tensors, options = inputs_of(case, device)
    offsets = options.pop("cu_seqlens")
    context = build_cp_context(
        offsets, enable_intra=enable_intra, num_v_heads=case.H_v, chunk_size=64, g=tensors[3], is_train=True
    )
    assert context.is_intra == enable_intra and not context.is_inter and context.num_seqs == 3
    expected = flash_qla.chunk_gated_delta_rule(*tensors, **options, cu_seqlens=offsets, auto_cp=enable_intra)
    actual = flash_qla.chunk_gated_delta_rule(*tensors, **options, cp_context=context, force_intra_cp=True)
    assert torch.equal(actual[0], expected[0])
    *results, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(*tensors, **options, cp_context=context)
    assert cp_cache is None
    assert_near("o", results[2], expected[0], rtol=0, atol=0)
    q, k, v, _, beta = tensors
    calls = [{"cp_context": context.copy_for_backward()}, {"cu_seqlens": offsets}]
    actual, expected = (
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, results[0], beta, results[1], results[2], **options, **call)
        for call in calls
    )
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("enable_intra", (False, True))
@pytest.mark.parametrize("auto_cp", (False, True))
def test_auto_cp_of_a_context(enable_intra, auto_cp, monkeypatch):
    """What reaches the op, and the context's offsets in place of the call's."""
    tensors, _ = inputs_of(Case(lengths=(3,)))
    calls = []
    ops = dataclasses.make_dataclass("Ops", ["chunk_gated_delta_rule"])
    monkeypatch.setattr(torch.ops, "flash_qla", ops(lambda *args: calls.append(args) or (None, None)))
    context = build_cp_context(torch.tensor([0, 3]), enable_intra=enable_intra)
    others = {"cu_seqlens": torch.tensor([0, 1, 3]), "auto_cp": auto_cp}
    flash_qla.chunk_gated_delta_rule(*tensors, **others, cp_context=context)
    (call,) = calls
    assert call[9] is context.cu_seqlens and call[11] is enable_intra


@pytest.mark.parametrize("enable_intra", (False, True))
@pytest.mark.parametrize("auto_cp", (False, True))
def test_what_reaches_the_ops_with_ranks(enable_intra, auto_cp):
    """The context's offsets and its decision about splits, and no max_seqlen, because that is of all ranks' tokens."""
    tensors, _ = inputs_of(Case(lengths=(70, 3)))
    context = build_cp_context(
        torch.tensor([0, 70, 73]), enable_inter=True, enable_intra=enable_intra, group=GroupOfOne()
    )
    others = {"auto_cp": auto_cp, "cp_context": context, "max_seqlen": 3, "cu_seqlens": torch.tensor([0, 73])}
    q, k, v, g, beta = tensors
    with Ran() as ran:
        o, _ = flash_qla.chunk_gated_delta_rule(*tensors, **others)
        *_, cache = flash_qla.chunk_gated_delta_rule_fwd(*tensors, **others)
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, None, beta, None, o, cp_cache=cache, g_raw=g, **others)
    assert ran.ops == [f"chunk_gated_delta_rule{suffix}" for suffix in ("", "_fwd", "_bwd")]
    for call in ran.arguments:
        assert call.get("auto_cp", True) is enable_intra and call.get("max_seqlen") is None
        assert call["cu_seqlens"] is context.cu_seqlens


def test_copy_for_backward():
    """It has the same tensors; what is set in the copy is not set in the context."""
    context = build_cp_context(torch.tensor([0, 70, 73]), enable_intra=True)
    copy = context.copy_for_backward()
    assert copy.is_intra and copy.cu_seqlens is context.cu_seqlens
    copy.is_intra, copy.cu_seqlens = False, None
    assert context.is_intra and context.num_seqs == 2


def test_context_of_no_offsets(device):
    """A batch of sequences of one length, or the offsets of the call."""
    tensors, options = inputs_of(Case(B=2, T=5), device)
    context = build_cp_context(enable_intra=True)
    assert context.num_seqs == 0
    expected = flash_qla.chunk_gated_delta_rule(*tensors, **options)
    assert torch.equal(flash_qla.chunk_gated_delta_rule(*tensors, **options, cp_context=context)[0], expected[0])
    tensors, options = inputs_of(Case(lengths=(70, 0, 3)), device)
    expected = flash_qla.chunk_gated_delta_rule(*tensors, **options, output_final_state=True)
    actual = flash_qla.chunk_gated_delta_rule(*tensors, **options, output_final_state=True, cp_context=context)
    assert all(map(torch.equal, actual, expected))


CALLS = {
    # LightLLM, --gdn_prefill_backend flashqla: (q, k, v, **kwargs) with these keywords
    "LightLLM": {"output_final_state": True, "head_first": False, "use_qk_l2norm_in_kernel": True},
    "FLA": {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "state_v_first": False, "auto_cp": True},
    "VeOmni": {"output_final_state": False, "use_qk_l2norm_in_kernel": True},
}


@pytest.mark.parametrize("program", CALLS)
def test_calls_of_programs(program, device):
    """Their keywords, on packed sequences."""
    tensors, options = inputs_of(Case(lengths=(70, 0, 3)), device)
    arguments = {"g": tensors[3], "beta": tensors[4], "initial_state": options["initial_state"]}
    arguments |= {"cu_seqlens": options["cu_seqlens"], "scale": None} | CALLS[program]
    o, final_state = flash_qla.chunk_gated_delta_rule(q=tensors[0], k=tensors[1], v=tensors[2], **arguments)
    expected = torch.ops.flash_qla.chunk_gated_delta_rule(
        *tensors, None, options["initial_state"], CALLS[program]["output_final_state"], True, options["cu_seqlens"]
    )
    assert torch.equal(o, expected[0])
    assert final_state is None if program == "VeOmni" else torch.equal(final_state, expected[1])


def test_what_is_refused():
    tensors, _ = inputs_of(Case(T=5))
    with pytest.raises(NotImplementedError, match="force_intra_cp is True, expected False"):
        flash_qla.chunk_gated_delta_rule(*tensors, force_intra_cp=True)
    flash_qla.chunk_gated_delta_rule(*tensors, force_intra_cp=True, auto_cp=False)  # it has no effect there
    offsets = torch.tensor([0, 5])
    with pytest.raises(NotImplementedError, match="force_intra_cp is True, expected False"):
        build_cp_context(offsets, enable_intra=True, force_intra_cp=True)
    with pytest.raises(ValueError, match="chunk_size is 32, expected 64"):
        build_cp_context(offsets, enable_intra=True, chunk_size=32)
    with pytest.raises(TypeError, match="cu_seqlens is of type list; pass a tensor"):
        build_cp_context([0, 5], enable_intra=True)
    with pytest.raises(ValueError, match="group is None"):
        build_cp_context(offsets, enable_inter=True)
    q, k, v, g, beta = tensors
    A = q.new_zeros(*beta.shape, 64)
    with pytest.raises(TypeError, match="cp_cache is of type CPCache, expected the last result"):
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, v, cp_cache=CPCache(g, None))
    ranks = FlashQLACPContext(is_inter=True, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    with pytest.raises(TypeError, match="cp_cache is of type NoneType, expected the last result"):
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, v, cp_context=ranks)


GATES_INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
CASES = (
    Case(lengths=(100, 92), gate="logsigmoid", dtype=torch.float64, K=16, V=8, H_k=1, H_v=2),
    Case(lengths=(30, 162), gate="logsigmoid", dtype=torch.float64, K=16, V=8, H_k=1, H_v=2, state_v_first=True),
    Case(lengths=(96, 96), gate="logsigmoid", dtype=torch.float64, K=16, V=8, H_k=1, H_v=2, initial_state=None),
    Case(lengths=(192,), gate="logsigmoid", dtype=torch.float64, K=16, V=8, H_k=1, H_v=2, scale=0.5, **GATES_INSIDE),
)


GPU_CASES = (
    Case(lengths=(1500, 548), gate="logsigmoid"),
    Case(lengths=(2048,), gate="logsigmoid", dtype=torch.float16, state_v_first=True, **GATES_INSIDE),
)
on_both = pytest.mark.parametrize(
    ("device", "world_size", "cases"),
    [("cpu", 2, CASES), on_gpus(2, GPU_CASES), on_gpus(4, GPU_CASES)],
    ids=("cpu", "cuda2", "cuda4"),
)


@on_both
def test_low_level_over_ranks(device, world_size, cases):
    """g, A, o, h, the states and all gradients are those of the whole sequences."""
    assert run_on_ranks(world_size, low_level_on_ranks, cases, device, device=device) == [len(cases)] * world_size


@on_both
def test_published_context_over_ranks(device, world_size, cases):
    """High level, with autograd, as with flash_qla's own context."""
    outcomes = run_on_ranks(world_size, published_context_on_ranks, cases[0], device, device=device)
    assert outcomes == [None] * world_size


@pytest.mark.parametrize(("device", "world_size"), [on_gpus(2), on_gpus(4)])
def test_context_of_fla_over_ranks(device, world_size):
    pytest.importorskip("fla.ops.cp", reason="FLA is not installed")
    assert run_on_ranks(world_size, fla_context_on_ranks, GPU_CASES[0], device, device=device) == [None] * world_size


def test_missing_cache_on_ranks():
    for error in run_on_ranks(2, without_the_cache, CASES[0]):
        assert "cp_cache is of type NoneType, expected the last result of chunk_gated_delta_rule_fwd" in error
