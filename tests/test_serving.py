"""The calls of serving engines: states of any floating dtype in, final states in the dtype asked for, and no memory."""

import contextlib
import re

import pytest
import torch
from cases import (
    GRADIENT_OF,
    Case,
    equal,
    forward_mode,
    make_arguments,
    make_gradients,
    make_inputs,
    run_backward,
    run_forward,
)
from poison import free_cuda_blocks, poisoned, take_cuda_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla

ops = torch.ops.flash_qla
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
INPUTS = ("q", "k", "v", "g", "beta")
OPS = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd")

CASES = (
    Case(B=2, T=70),
    Case(lengths=(65, 0, 3), padding=2, state_v_first=True, initial_state=BF16, dtype=FP16),
    Case(lengths=(0, 0), initial_state=FP16),
    Case(lengths=(), padding=3),
)


def final_states(inputs: dict, **options) -> dict:
    """The final states of both functions, with o, which the dtype of the state must not change."""
    o, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True, **options)
    low_level = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, **options)
    return {"o": o, "state": state, "low-level o": low_level[2], "low-level state": low_level[4]}


# The dtype of the final state


@pytest.mark.parametrize("case", CASES, ids=str)
def test_final_state_is_the_usual_one_rounded(device, case):
    inputs = make_inputs(case, device)
    expected = final_states(inputs)
    for dtype in DTYPES:
        with poisoned(device):
            actual = final_states(inputs, state_dtype=dtype)
        for name, x in actual.items():
            rounded = expected[name].to(dtype) if name.endswith("state") else expected[name]
            assert x.dtype == rounded.dtype and x.is_contiguous() and torch.equal(x, rounded), (name, dtype)


def test_passing_the_state_through_keeps_its_bits(device):
    """A sequence without tokens: from bfloat16 over float32 to bfloat16 nothing is lost."""
    inputs = make_inputs(Case(lengths=(0, 70, 0), initial_state=BF16, state_v_first=True), device)
    _, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True, state_dtype=BF16)
    assert torch.equal(state[0::2], inputs["initial_state"][0::2])
    assert not torch.equal(state[1], inputs["initial_state"][1])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("requested", (False, True))
def test_real_fake_and_meta_states_are_alike(device, op, requested):
    inputs = make_inputs(Case(lengths=(65, 0, 3)), device)
    for dtype in (None, BF16, FP64):
        options = {**inputs, "output_final_state": requested, "state_dtype": dtype}
        real = getattr(ops, op)(**options)[-1]
        assert real.shape == (inputs["initial_state"].shape if requested else (0,))
        assert real.dtype == dtype or (dtype is None and real.dtype == FP32)
        with FakeTensorMode() as mode:
            fake = getattr(ops, op)(
                **{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            )[-1]
        meta = getattr(ops, op)(
            **{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        )[-1]
        for x in (fake, meta):
            assert (x.shape, x.stride(), x.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn), ids=str)
def test_other_dtypes_are_refused(device, op, dtype):
    inputs = make_inputs(Case(T=5), device)
    message = rf"flash_qla::{op}: state_dtype is .*, expected bfloat16, float16, float32 or float64"
    with pytest.raises(RuntimeError, match=message):
        getattr(flash_qla, op)(**inputs, state_dtype=dtype)
    with pytest.raises(RuntimeError, match=message), FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        getattr(flash_qla, op)(**fake, state_dtype=dtype)


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_gradient_of_the_final_state_arrives_in_its_dtype(device, dtype):
    case = Case(lengths=(70, 0, 3), dht=dtype, state_v_first=True)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    assert gradients["dht"].dtype == dtype
    expected = run_backward(inputs, **gradients)
    leaves = {name: inputs[name].detach().requires_grad_() for name in GRADIENT_OF}
    arguments = {**inputs, **leaves, "state_dtype": dtype}
    high_level = flash_qla.chunk_gated_delta_rule(**arguments, output_final_state=True)
    low_level = flash_qla.chunk_gated_delta_rule_intermediates(**arguments)[2::2]
    for outputs in (high_level, low_level):
        assert outputs[1].dtype == dtype and outputs[1].requires_grad
        actual = torch.autograd.grad(outputs, list(leaves.values()), tuple(gradients.values()))
        assert all(torch.equal(x, expected[name]) for x, name in zip(actual, GRADIENT_OF.values(), strict=True))
    # The state alone: o's gradient is zero, and dht is not.
    outputs = flash_qla.chunk_gated_delta_rule(**arguments, output_final_state=True)
    actual = torch.autograd.grad(outputs[1], list(leaves.values()), gradients["dht"])
    expected = run_backward(inputs, torch.zeros_like(gradients["do"]).nan_to_num(0), gradients["dht"])
    assert all(torch.equal(x, expected[name]) for x, name in zip(actual, GRADIENT_OF.values(), strict=True))
    assert expected["dh0"].any()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_state_dtype_in_graphs(device, tmp_path):
    """torch.compile, torch.export and TorchScript keep the argument."""

    class Prefill(torch.nn.Module):
        def forward(self, q, k, v, g, beta, initial_state, cu_seqlens):
            o, state = torch.ops.flash_qla.chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
                state_v_first=True,
                state_dtype=torch.bfloat16,
            )
            return o, state

    inputs = make_inputs(Case(lengths=(65, 0, 3), state_v_first=True, initial_state=BF16), device)
    tensors = tuple(inputs[name] for name in (*INPUTS, "initial_state", "cu_seqlens"))
    prefill = Prefill()
    expected = prefill(*tensors)
    assert expected[1].dtype == BF16
    torch._dynamo.reset()
    torch.jit.script(prefill).save(str(tmp_path / "prefill.pt"))
    torch.export.save(torch.export.export(prefill, tensors), tmp_path / "prefill.pt2")
    for graph in (
        torch.compile(prefill, fullgraph=True, backend="aot_eager"),
        torch.export.load(tmp_path / "prefill.pt2").module(),
        torch.jit.load(str(tmp_path / "prefill.pt")),
    ):
        actual = graph(*tensors)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_autocast_leaves_the_state_dtype_alone(device):
    inputs = make_inputs(Case(T=70), device)
    with torch.autocast(device, dtype=FP16):
        o, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True, state_dtype=BF16)
    assert o.dtype == FP16 and state.dtype == BF16


# Running out of memory: callers that look for a batch that fits, and engines, go on


@contextlib.contextmanager
def gpu_memory_left(size: int):
    """No more than so many bytes beside what is taken, and what PyTorch's cache cannot give back is taken as well."""
    torch.cuda.empty_cache()
    blocks = take_cuda_blocks(free_cuda_blocks())
    total, share = torch.cuda.mem_get_info()[1], torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(share)
        del blocks


def refused_allocation(run, size: int) -> str | None:
    """The dtype of what a call could not allocate; None if it could."""
    with gpu_memory_left(size):
        try:
            run()
        except RuntimeError as error:
            message = str(error)
            assert message.startswith("CUDA out of memory. "), message
            return re.search(r"\(flash_qla::\w+, (\w+) \[[\d, ]+\]\)$", message)[1]
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("op", (*OPS, "chunk_gated_delta_rule_bwd"))
@pytest.mark.parametrize("normalize", (False, True))
def test_out_of_gpu_memory(op, normalize):
    """An output is refused with little memory, the workspace with more memory; the next call has the same bits."""
    case = Case(T=16384, H_k=8, H_v=16, use_qk_l2norm_in_kernel=normalize, g_dtype=BF16, beta_dtype=BF16)
    arguments = make_arguments(case, "cuda")
    inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
    g_cumsum, A, *_ = run_forward(inputs, output_h=False)
    runs = {
        OPS[0]: lambda: dict(enumerate(flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True))),
        OPS[1]: lambda: dict(enumerate(run_forward(inputs))),
        "chunk_gated_delta_rule_bwd": lambda: run_backward(
            inputs, arguments["do"], arguments["dht"], intermediates=(g_cumsum, A)
        ),
    }
    run = runs[op]
    with forward_mode(fused=0):
        expected = run()
        refused = []
        while (dtype := refused_allocation(run, len(refused) * 16 << 20)) is not None:
            refused.append(dtype)
            assert equal(run(), expected)
        assert {"bfloat16", "uint8"} <= set(refused)


@pytest.mark.parametrize("op", OPS)
def test_out_of_cpu_memory(op):
    inputs = make_inputs(Case(T=70), "cpu")
    expected = getattr(flash_qla, op)(**inputs)
    q = torch.zeros((), dtype=BF16).expand(1, 2**20, 1, 2**28)  # more than can be addressed
    v, g = torch.zeros(1, 2**20, 1, 1, dtype=BF16), torch.zeros(1, 2**20, 1)
    with pytest.raises(RuntimeError, match=rf"memory.*\(flash_qla::{op}, bfloat16 \[1, 1048576, 1, 268435456\]\)$"):
        getattr(flash_qla, op)(q, q, v, g, g)
    actual = getattr(flash_qla, op)(**inputs)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
