"""How the forward behaves on the GPU beyond its numbers: same bits whatever runs beside it, no host synchronisation,
CUDA graphs, bad offsets, tensors beyond 2^31 elements, threads, streams and several devices."""

import dataclasses
import threading

import accuracy
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Case, make_inputs, reference_of, run_forward
from subprocesses import run_python

import flash_qla

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
    ),
    Case(B=2, T=300, state_v_first=True),
    Case(T=4096, H_k=1, H_v=2, gate="logsigmoid"),
    Case(T=4096, H_k=1, H_v=2, gate="logsigmoid", auto_cp=False, initial_state=None),
    Case(B=8, T=64, H_k=16, H_v=64, strides="heads_first", initial_state=torch.bfloat16),
)


def run_all(inputs: dict) -> list[torch.Tensor]:
    outputs = [*flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)]
    if not inputs["use_qk_l2norm_in_kernel"]:  # which the low-level function does not have
        outputs += run_forward(inputs)
    return outputs


def equal(actual, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_every_time(case):
    """Also on other streams, and while other work keeps the SMs busy and the blocks in another order."""
    inputs = make_inputs(case, "cuda")
    expected = run_all(inputs)
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    noise_stream, stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        assert equal(run_all(inputs), expected)
    for _ in range(5):
        with torch.cuda.stream(noise_stream):
            for _ in range(4):
                noise @ noise
        with torch.cuda.stream(stream):
            actual = run_all(inputs)
        torch.cuda.synchronize()
        assert equal(actual, expected)


def test_runs_on_the_current_stream():
    """The op waits for what is queued before it on its stream: inputs that are still being written there."""
    case = Case(lengths=(300, 65), gate="logsigmoid")
    inputs = make_inputs(case, "cuda")
    expected = flash_qla.chunk_gated_delta_rule(**inputs)[0]
    late = {
        name: torch.full_like(x, float("nan")) for name, x in inputs.items() if name in ("q", "k", "v", "g", "beta")
    }
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for name, x in late.items():
            x.copy_(inputs[name])
        o = flash_qla.chunk_gated_delta_rule(**{**inputs, **late})[0]
        total = o.float().sum()
    torch.cuda.synchronize()
    assert torch.equal(o, expected) and total == expected.float().sum()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_host_synchronisation(case):
    """PyTorch refuses its own synchronising calls here; a raw one inside the library would break the captures below."""
    inputs = make_inputs(case, "cuda")
    run_all(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_replay_equals_eager(case):
    """Captured once, replayed on other numbers in the same buffers."""
    inputs = make_inputs(case, "cuda")
    graph = torch.cuda.CUDAGraph()
    run_all(inputs)
    with torch.cuda.graph(graph):
        captured = run_all(inputs)
    for seed in (1, 2):
        other = make_inputs(dataclasses.replace(case, seed=seed), "cuda")
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                x.copy_(other[name])
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        assert equal(captured, run_all(other))


@pytest.mark.parametrize("cu_dtype", (torch.int32, torch.int64), ids=str)
def test_graph_replay_with_other_cu_seqlens(cu_dtype):
    """The host has never seen the offsets, so one graph serves any batch of up to N sequences and T tokens: fewer
    tokens leave padding, fewer sequences are zero-length ones at the end."""
    batches = (
        (300, 65, 0, 7, 500),
        (872, 0, 0, 0, 0),
        (0, 0, 0, 0, 872),
        (1, 1, 1, 1, 1),
        (64, 64, 64, 64, 64),
        (63, 65, 127, 129, 400),
        (0, 0, 0, 0, 0),
        (300, 65, 0, 7, 500),
    )
    inputs = make_inputs(Case(lengths=batches[0], H_k=2, H_v=4, gate="logsigmoid", cu_dtype=cu_dtype), "cuda")
    graph = torch.cuda.CUDAGraph()
    run_all(inputs)
    with torch.cuda.graph(graph):
        captured = run_all(inputs)
    for lengths in batches:
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(cu_dtype)
        inputs["cu_seqlens"].copy_(offsets)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        actual = [x.clone() for x in captured]
        assert equal(actual, run_all(inputs)), lengths
        expected = reference_of(inputs)
        accuracy.check("o", actual[0], expected.o, torch.bfloat16, f"graph, lengths={lengths}")
        accuracy.check("final_state", actual[1], expected.final_state, torch.bfloat16, f"graph, lengths={lengths}")
        accuracy.check("h", actual[5], expected.h, torch.bfloat16, f"graph, lengths={lengths}")


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


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_bad_offsets_are_confined(offsets):
    """Decreasing, negative or beyond T: taken as 0, then the running maximum clipped to T. Nothing out of bounds is
    touched (compute-sanitizer looks at that, test_gpu_sanitizer.py) and the next call is unharmed."""
    inputs = make_inputs(Case(lengths=(100, 100, 100), padding=0, H_k=2, H_v=4), "cuda")
    before = run_all(inputs)
    confined = torch.tensor([0, *offsets[1:]]).cummax(0).values.clamp(0, 300)
    for dtype in (torch.int32, torch.int64):
        if dtype == torch.int32 and max(map(abs, offsets)) > 2**31:
            continue
        actual = run_all({**inputs, "cu_seqlens": torch.tensor(offsets, dtype=dtype, device="cuda")})
        torch.cuda.synchronize()
        assert equal(actual, run_all({**inputs, "cu_seqlens": confined.to("cuda", dtype)}))
    assert equal(run_all(inputs), before)


def test_check_switch_reports_bad_offsets():
    """FLASH_QLA_CHECK=1: on the GPU as on the CPU. In a process of its own, which reads the switch at its start."""
    code = """
import flash_qla
import torch
x = torch.zeros(1, 100, 1, 128, device="cuda", dtype=torch.bfloat16)
g = torch.zeros(1, 100, 1, device="cuda")
for offsets in ([0, 60, 40, 100], [0, 101], [3, 100], [0, -1, 100], [0, 40, 100]):
    for function in (flash_qla.chunk_gated_delta_rule, flash_qla.chunk_gated_delta_rule_fwd):
        try:
            function(x, x, x, g, g, cu_seqlens=torch.tensor(offsets, device="cuda"))
            print("passed")
        except RuntimeError as error:
            print(error)
"""
    output = run_python(code, FLASH_QLA_CHECK="1")
    lines = output.splitlines()
    assert len(lines) == 10, output
    for line, found in zip(lines[:8:2], ("40", "101", "3", "-1"), strict=True):
        assert "flash_qla::chunk_gated_delta_rule: cu_seqlens" in line and "expected" in line and found in line
    for line in lines[1:8:2]:
        assert "flash_qla::chunk_gated_delta_rule_fwd: cu_seqlens" in line
    assert lines[8:] == ["passed", "passed"]


def test_more_than_2_31_elements():
    """v and o have 2.2e9 elements and h 4.4e9: offsets need 64 bits. The recurrence need not be run over all tokens to
    check the far end: the second sequence starts afresh there, and in the first h says from where to go on."""
    H_k, H_v, D = 4, 64, 128
    lengths = (270_016, 300)
    T = sum(lengths)
    assert T * H_v * D > 2**31
    if torch.cuda.mem_get_info()[0] < 70 << 30:
        pytest.skip("needs 70 GiB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    inputs = {
        "q": F.normalize(randn(1, T, H_k, D), dim=-1),
        "k": F.normalize(randn(1, T, H_k, D), dim=-1),
        "v": randn(1, T, H_v, D),
        "g": F.logsigmoid(randn(1, T, H_v, dtype=torch.float32)) / 16,
        "beta": randn(1, T, H_v, dtype=torch.float32).sigmoid(),
        "initial_state": randn(2, H_v, D, D, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, *lengths], device="cuda").cumsum(0),
    }
    _, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=True)
    assert h.numel() > 2**32
    assert o[0, -64:].isfinite().all() and A[0, -64:].isfinite().all()
    assert (o.abs().amax(-1) > 0).all()  # every row was written, and none with garbage
    assert o.abs().amax() < 100

    def part(tokens, initial_state):
        arguments = {name: inputs[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
        return reference.gated_delta_rule(**arguments, initial_state=initial_state)

    first, last = lengths[0] // 64, lengths[0]
    expected = part(slice(last, T), inputs["initial_state"][1:])
    accuracy.check("o", o[:, last:], expected.o, torch.bfloat16, "second sequence, beyond 2^31 elements")
    accuracy.check(
        "final_state", final_state[1:], expected.final_state, torch.bfloat16, "second sequence, beyond 2^31 elements"
    )
    accuracy.check("h", h[:, first : first + 5], expected.h, torch.bfloat16, "second sequence, beyond 2^31 elements")
    for chunk in (first - 8, 2**31 // (64 * H_v * D) - 2):
        tokens = slice(chunk * 64, chunk * 64 + 256)
        expected = part(tokens, h[0, chunk][None])
        accuracy.check("o", o[:, tokens], expected.o, torch.bfloat16, f"from chunk {chunk} of the first sequence")
    del o, A, h
    torch.cuda.empty_cache()
    o, final_state_again = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    expected = part(slice(last, T), inputs["initial_state"][1:])
    accuracy.check("o", o[:, last:], expected.o, torch.bfloat16, "second sequence, beyond 2^31 elements")
    accuracy.check("final_state", final_state_again, final_state.double(), torch.bfloat16, "both functions")


def test_many_sequences():
    """More sequences than the 65535 blocks of a grid's second dimension. Only the last 600 are compared."""
    lengths = (1, 0, 2) * 22_000
    inputs = make_inputs(Case(lengths=lengths, H_k=1, H_v=1, initial_state=None, gate="logsigmoid"), "cuda")
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    tail = {name: inputs[name][:, -600:] for name in ("q", "k", "v", "g", "beta")}
    expected = reference.gated_delta_rule(**tail, cu_seqlens=torch.tensor([0, *lengths[-600:]]).cumsum(0))
    accuracy.check("o", o[:, -600:], expected.o, torch.bfloat16, "66000 sequences")
    accuracy.check("final_state", final_state[-600:], expected.final_state, torch.bfloat16, "66000 sequences")


def test_threads_and_streams():
    """Eight threads at once, each on its own stream and its own shapes; the first launch of each kernel is part of it
    in a fresh process."""
    inputs = [make_inputs(dataclasses.replace(CASES[i % len(CASES)], seed=i), "cuda") for i in range(8)]
    expected = [run_all(x) for x in inputs]
    torch.cuda.synchronize()
    start, failures = threading.Barrier(8), []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(20):
                    actual = run_all(inputs[i])
                    torch.cuda.current_stream().synchronize()
                    if not equal(actual, expected[i]):
                        failures.append(f"thread {i}: other bits")
        except Exception as error:
            failures.append(f"thread {i}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


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
    results[i] = flash_qla.chunk_gated_delta_rule(x, x, x, g, -g, use_qk_l2norm_in_kernel=True)[0]
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
print(all(torch.equal(o, results[0]) for o in results), bool(results[0].isfinite().all()))
"""
    output = run_python(code)
    assert output.split() == ["True", "True"], output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus():
    """The tensors' device counts, not the current one."""
    inputs = make_inputs(VARLEN, "cuda:0")
    expected = run_all(inputs)
    for index in range(1, torch.cuda.device_count()):
        assert torch.cuda.current_device() == 0
        moved = {name: x.to(f"cuda:{index}") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        actual = run_all(moved)
        assert all(x.get_device() == index for x in actual)
        assert equal([x.to("cuda:0") for x in actual], expected)
        with pytest.raises(RuntimeError, match=rf"\bk is on cuda:0, expected cuda:{index}"):
            flash_qla.chunk_gated_delta_rule(**{**moved, "k": inputs["k"]})
    assert torch.cuda.current_device() == 0
