"""How forward and backward behave on the GPU beyond their numbers: same bits whatever runs beside them, no host
synchronisation, CUDA graphs, bad offsets, threads, streams and several devices."""

import dataclasses

import every_op
import pytest
import torch
from cases import (
    ALL_INSIDE,
    Case,
    as_slices,
    backward_mode,
    equal,
    make_arguments,
    run_all,
)
from subprocesses import run_python

pytestmark = pytest.mark.gpu

VARLEN = Case(lengths=(300, 65, 0, 7, 1500), padding=9, H_k=4, H_v=8, gate="logsigmoid")
# One for each way through the host code
CASES = (
    VARLEN,
    Case(
        lengths=(300, 65, 0, 7),
        H_k=2,
        H_v=4,
        keys="raw",
        use_qk_l2norm_in_kernel=True,
        cu_dtype=torch.int64,
        dtype=torch.float16,
        do_strides="gaps",
    ),
    Case(B=2, T=300, state_v_first=True),
    Case(T=4096, H_k=1, H_v=2, gate="logsigmoid"),
    Case(T=4096, H_k=1, H_v=2, gate="logsigmoid", auto_cp=False, initial_state=None, dht=None),
    Case(B=8, T=64, H_k=16, H_v=64, strides="heads_first", do_strides="heads_first", initial_state=torch.bfloat16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_every_time(case):
    """Also on other streams, and while other work keeps the SMs busy and the blocks in another order."""
    arguments = make_arguments(case, "cuda")
    expected = run_all(arguments)
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    noise_stream, stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        assert equal(run_all(arguments), expected)
    for _ in range(5):
        with torch.cuda.stream(noise_stream):
            for _ in range(4):
                noise @ noise
        with torch.cuda.stream(stream):
            actual = run_all(arguments)
        torch.cuda.synchronize()
        assert equal(actual, expected)


def test_runs_on_the_current_stream():
    """The ops wait for what is queued before them on their stream, tensors that are still being written there; what is
    queued after them finds their results."""
    arguments = make_arguments(Case(lengths=(300, 65), gate="logsigmoid"), "cuda")
    expected = run_all(arguments)
    late = {
        name: torch.full_like(x, float("nan"))
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for name, x in late.items():
            x.copy_(arguments[name])
        actual = {name: x.clone() for name, x in run_all({**arguments, **late}).items()}
    torch.cuda.synchronize()
    assert equal(actual, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_host_synchronisation(case):
    """PyTorch refuses its own synchronising calls here; a raw one inside the library would break the captures below."""
    arguments = make_arguments(case, "cuda")
    run_all(arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all(arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(arguments: dict, run=run_all) -> tuple[torch.cuda.CUDAGraph, dict]:
    """A graph of run(arguments), by default forward and backward, and its outputs."""
    graph = torch.cuda.CUDAGraph()
    run(arguments)
    with torch.cuda.graph(graph):
        outputs = run(arguments)
    return graph, outputs


def replay(graph: torch.cuda.CUDAGraph, outputs: dict) -> dict:
    """Replays over NaN, so that a number that the replay does not write shows."""
    for x in outputs.values():
        x.fill_(float("nan"))
    graph.replay()
    return {name: x.clone() for name, x in outputs.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_replay_equals_eager(case):
    """Captured once, replayed on other numbers in the same buffers."""
    arguments = make_arguments(case, "cuda")
    graph, outputs = capture(arguments)
    for seed in (1, 2):
        other = make_arguments(dataclasses.replace(case, seed=seed), "cuda")
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                x.copy_(other[name])
        assert equal(replay(graph, outputs), run_all(other))


BAD_OFFSETS = (
    [0, 100, 50, 300],
    [0, 100, 500, 300],
    [0, 100, 2**31 - 1, 2**31 - 1],
    [-7, 100, 200, 300],
    [5, 100, 200, 300],
    [0, -1, -(2**31), 300],
    [300, 200, 100, 0],
    [7, 7, 7, 7],
    [0, 64, 2**40, -(2**62)],
)


@pytest.mark.parametrize("segment_chunks", (0, 1))
@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_bad_offsets_are_confined(offsets, segment_chunks):
    """Decreasing, negative or beyond T: taken as 0, then the running maximum clipped to T. Nothing out of bounds is
    touched (compute-sanitizer looks at that, test_gpu_sanitizer.py) and the next call is unharmed. Whether the device
    cuts such sequences is not defined (chunk_plan.py), so it is not left to it."""
    arguments = make_arguments(Case(lengths=(100, 100, 100), H_k=2, H_v=4), "cuda")
    confined = torch.tensor([0, *offsets[1:]]).cummax(0).values.clamp(0, 300)
    with backward_mode(segment_chunks):
        before = run_all(arguments)
        for dtype in (torch.int32, torch.int64):
            if dtype == torch.int32 and max(map(abs, offsets)) > 2**31:
                continue
            actual = run_all({**arguments, "cu_seqlens": torch.tensor(offsets, dtype=dtype, device="cuda")})
            torch.cuda.synchronize()
            assert equal(actual, run_all({**arguments, "cu_seqlens": confined.to("cuda", dtype)}))
        assert equal(run_all(arguments), before)


def test_check_switch_reports_bad_offsets():
    """FLASH_QLA_CHECK=1: on the GPU as on the CPU. In a process of its own, which reads the switch at its start."""
    code = """
import flash_qla
import torch
x = torch.zeros(1, 100, 1, 128, device="cuda", dtype=torch.bfloat16)
g = torch.zeros(1, 100, 1, device="cuda")
calls = (
    lambda **kwargs: flash_qla.chunk_gated_delta_rule(x, x, x, g, g, **kwargs),
    lambda **kwargs: flash_qla.chunk_gated_delta_rule_fwd(x, x, x, g, g, **kwargs),
    lambda **kwargs: flash_qla.chunk_gated_delta_rule_bwd(x, x, x, g, g, x[..., :64], x, **kwargs),
)
for offsets in ([0, 60, 40, 100], [0, 101], [3, 100], [0, -1, 100], [0, 40, 100]):
    for call in calls:
        try:
            call(cu_seqlens=torch.tensor(offsets, device="cuda"))
            print("passed")
        except RuntimeError as error:
            print(error)
"""
    output = run_python(code, FLASH_QLA_CHECK="1")
    lines = output.splitlines()
    assert len(lines) == 15, output
    for i, op in enumerate(("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")):
        for line, value in zip(lines[i:12:3], ("40", "101", "3", "-1"), strict=True):
            assert f"flash_qla::{op}: cu_seqlens" in line and "expected" in line and value in line
    assert lines[12:] == ["passed"] * 3


def test_the_first_call_may_be_captured():
    """It loads the kernels' code."""
    code = """
import flash_qla
import torch

def run():
    return flash_qla.chunk_gated_delta_rule(x, x, x, g, g + 0.5)[0]

x = torch.nn.functional.normalize(torch.randn(1, 100, 1, 128, device="cuda"), dim=-1).bfloat16()
g = torch.zeros(1, 100, 1, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = run()
graph.replay()
print("as eager:", bool(captured.any()) and torch.equal(captured, run()))
"""
    assert run_python(code).splitlines()[-1] == "as eager: True"


def test_first_calls_from_many_threads():
    """Loading a kernel and setting its attributes happens once per device, also when eight threads ask at once."""
    code = """
import threading
import flash_qla
import torch
x = torch.randn(1, 100, 1, 128, device="cuda", dtype=torch.bfloat16)
g = -torch.ones(1, 100, 1, device="cuda")
results = [None] * 8
start = threading.Barrier(8)
def work(i):
    start.wait()
    q = x.detach().requires_grad_()
    o = flash_qla.chunk_gated_delta_rule(q, x, x, g, -g, use_qk_l2norm_in_kernel=True)[0]
    results[i] = torch.stack([o.detach(), *torch.autograd.grad(o, q, x)])
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
print(all(torch.equal(y, results[0]) for y in results), bool(results[0].isfinite().all()))
"""
    output = run_python(code)
    assert output.split() == ["True", "True"], output


RAW_GATES = ALL_INSIDE | {"g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}


WHOLE_SEQUENCES = (
    *("chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "prefill_gated_delta_rule"),
    *("chunk_gated_delta_rule_packed", "chunk_gated_delta_rule_packed_bwd"),
    *("causal_conv1d", "causal_conv1d_bwd", "gated_rms_norm", "gated_rms_norm_bwd"),
    *("gated_delta_net", "gated_delta_net_bwd"),
    *("prefill_causal_conv1d", "prefill_gated_delta_net"),
)


@pytest.mark.parametrize("name", WHOLE_SEQUENCES)
@pytest.mark.parametrize("layout", ("contiguous", "slices"))
@pytest.mark.parametrize("options", ({}, RAW_GATES), ids=("ready", "raw"))
def test_no_kernel_beside_ours(name, layout, options):
    """Nothing is copied, cast or filled: tokens and raw gates are read where they are."""
    _C = pytest.importorskip("flash_qla._C")
    call = every_op.make_call(name, "cuda", K=128, V=128, **options)
    names = [x for x in ("q", "k", "v", "mixed_qkv", "do", "x", "mixed", "o", "z", "dy") if x in call.arguments]
    if layout == "slices":
        call.arguments |= dict(zip(names, as_slices([call.arguments[x] for x in names]), strict=True))
        assert not any(call.arguments[x].is_contiguous() for x in names)
    op = every_op.op_of(name)
    arguments = {x.name: call.arguments[x.name] for x in op._schema.arguments if x.name in call.arguments}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op(**arguments)
        torch.cuda.synchronize()
    launched = {x.name for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA}
    ours = {kernel.name for kernel in _C.kernels()}
    assert launched and launched <= ours, launched - ours
