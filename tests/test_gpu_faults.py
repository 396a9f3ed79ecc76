"""Faults around a call: no memory, earlier CUDA errors, forks, abandoned captures. An op says what happened, loses
nothing, and the next call is right. Faults that stay with a process run in a separate one."""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from cases import equal
from every_op import NAMES, make_call
from subprocesses import run_python

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent
ON_THE_GPU = """
import os, sys
sys.path.insert(0, {tests!r})
import pytest, torch
from cases import equal
from every_op import NAMES, make_call

def say(*what):
    print(">", *what, flush=True)

def calls(device="cuda", **options):
    for name in NAMES:
        try:
            yield make_call(name, device, **options)
        except pytest.skip.Exception:
            pass
"""


def run_on_the_gpu(code: str, **environment: str) -> list[str]:
    """The lines that the code says, in a process that has `calls`, every op's. It ends without taking down CUDA, which
    may be out of order."""
    code = ON_THE_GPU.format(tests=str(TESTS)) + code + "\nos._exit(0)"
    lines = run_python(code, **environment).splitlines()
    return [line.removeprefix("> ") for line in lines if line.startswith("> ")]


# Memory


NO_MEMORY = """
import ctypes, gc
library = ctypes.CDLL(os.environ["ALLOCATOR"])
torch.cuda.memory.change_current_allocator(
    torch.cuda.memory.CUDAPluggableAllocator(os.environ["ALLOCATOR"], "allocate", "release")
)

def refusals(run):
    # Until a call gets all that it asks for
    expected, refused = run(), 0
    gc.collect()
    clean = library.allocated_blocks()
    while True:
        library.refuse(refused)
        try:
            actual = run()
        except RuntimeError as error:
            assert "CUDA out of memory. " in str(error), error
        else:
            break
        finally:
            library.refuse(-1)
        gc.collect()
        assert library.allocated_blocks() <= clean, (refused, clean, library.allocated_blocks())
        assert equal(run(), expected), refused
        refused += 1
    assert equal(actual, expected)
    return refused

def training(call):
    tensors = {name: x for name, x in call.arguments.items() if torch.is_tensor(x) and x.is_floating_point()}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, state = torch.ops.flash_qla.chunk_gated_delta_rule(**call.arguments | leaves)
    loss = (o.float() ** 2).sum() + state.sum()
    # Autograd's own thread holds the gradients for a moment longer than the call, and blocks are counted
    with torch.autograd.set_multithreading_enabled(False):
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

for dtype in (torch.bfloat16, torch.float16):
    for options in ({}, {"strides": "heads_first", "use_qk_l2norm_in_kernel": True, "g_dtype": torch.bfloat16}):
        for call in calls(dtype=dtype, **options):
            say(call.name, refusals(call))
            if call.name == "chunk_gated_delta_rule":
                say("training", refusals(lambda: training(call)))
"""


def test_memory_runs_out_at_every_allocation(tmp_path):
    """The first allocation of a call is refused, then the second, and so on until it gets them all: each time callers
    can tell, nothing stays allocated, and the next call has its bits. No caches: every tensor is an allocation."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for an allocator")
    library = tmp_path / "failing_allocator.so"
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", TESTS / "failing_allocator.cpp", "-o", library, "-ldl"], check=True
    )
    lines = [line.split() for line in run_on_the_gpu(NO_MEMORY, ALLOCATOR=str(library))]
    refused = {}
    for name, count in lines:
        refused.setdefault(name, []).append(int(count))
    assert {"chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "training"} <= refused.keys()
    # o and a final state, which one kernel writes without a workspace, or with one; gradients; o alone
    whole = refused["chunk_gated_delta_rule"]
    assert min(whole) == 2 and max(whole) >= 3 and min(refused["chunk_gated_delta_rule_bwd"]) >= 6
    assert all(min(counts) >= 1 for counts in refused.values()), refused


# Errors of others


BROKEN = """
def break_cuda():
    try:
        torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]
        torch.cuda.synchronize()
    except RuntimeError:
        say("broken")

def report(call):
    try:
        call()
        torch.cuda.synchronize()
        say("passed")
    except RuntimeError as error:
        say(str(error).splitlines()[0])
"""
AFTER_CALLS = """
all_calls = list(calls())
for call in all_calls:
    call()
torch.cuda.synchronize()
break_cuda()
for call in all_calls:
    report(call)
    report(call)
"""
BEFORE_ANY_CALL = """
x = torch.zeros(1, 100, 1, 128, device="cuda", dtype=torch.bfloat16)
g = torch.zeros(1, 100, 1, device="cuda")
torch.cuda.synchronize()
break_cuda()
for _ in range(2):
    report(lambda: torch.ops.flash_qla.chunk_gated_delta_rule(x, x, x, g, g))
"""


@pytest.mark.parametrize("code", (AFTER_CALLS, BEFORE_ANY_CALL), ids=("after calls", "before any call"))
def test_errors_of_other_kernels_are_passed_on(code):
    """A failed assertion on the device ends CUDA for the process. Ours is not the error, and hides nothing."""
    lines = run_on_the_gpu(BROKEN + code)
    assert lines[0] == "broken" and len(lines) > 2, lines
    for line in lines[1:]:
        assert "device-side assert" in line and "out of memory" not in line, line


FORKED = """
import signal, traceback
all_calls = list(calls())
expected = [call() for call in all_calls]
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    signal.alarm(60)  # rather than wait for ever
    status = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads stay with the parent, as for every op of PyTorch
        from cases import Case, make_inputs
        import flash_qla
        inputs = make_inputs(Case(T=5, K=8, V=8), "cpu")
        assert flash_qla.chunk_gated_delta_rule(**inputs)[0].isfinite().all()
        for call in all_calls:
            try:
                call()
                raise AssertionError("ran")
            except RuntimeError as error:
                assert "CUDA error: " in str(error), error
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
for call, results in zip(all_calls, expected):
    assert equal(call(), results)
say("done")
"""


def test_fork_after_the_start_of_cuda():
    """A child has no CUDA: calls on the GPU raise there, those on the CPU are right, and the parent goes on."""
    assert run_on_the_gpu(FORKED)[-1] == "done"


ABANDONED_CAPTURES = """
def capture(call, fault=lambda: None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):  # which a capture that fails leaves at its own
        with torch.cuda.graph(graph):
            results = call()
            fault()
    return graph, results

def leave():
    raise KeyError("given up")

def invalidate():
    torch.cuda.synchronize()  # which a capture does not allow

def after_invalidation(call):
    try:
        invalidate()
    except RuntimeError:
        return call()  # an error, here or at the end of the capture

for call in calls():
    expected = call()
    for fault in (leave, invalidate):
        try:
            capture(call, fault)
            raise AssertionError("captured")
        except (KeyError, RuntimeError):
            pass
        torch.cuda.synchronize()
        assert equal(call(), expected), (call.name, fault)
    try:
        capture(lambda: after_invalidation(call))
        raise AssertionError("captured")
    except RuntimeError:
        pass
    assert equal(call(), expected), call.name
    graph, results = capture(call)
    for x in results.values():
        x.zero_()
    graph.replay()
    assert equal(results, expected), call.name
say("done")
"""


def test_captures_that_are_given_up():
    """A capture ends by an exception, or because something else invalidated it. The next call and capture are right."""
    assert run_on_the_gpu(ABANDONED_CAPTURES)[-1] == "done"


# Threads, streams, devices


def run_in_threads(functions: list):
    """All at once; raises what one of them raised."""
    start, failures = threading.Barrier(len(functions)), []

    def begin(function):
        try:
            start.wait()
            function()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failures:
        raise error


def calls_of_all_ops(device: str, seed: int = 0) -> list:
    calls = []
    for name in NAMES:
        try:
            calls.append(make_call(name, device, seed=seed))
        except pytest.skip.Exception:
            continue
    return calls


def test_every_op_in_threads_and_streams():
    """Eight threads, each with a stream and numbers of its own, every op in turn."""
    calls_of_threads = [calls_of_all_ops("cuda", seed) for seed in range(8)]
    expected = [[call() for call in calls] for calls in calls_of_threads]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                for call, results in zip(calls_of_threads[i], expected[i], strict=True):
                    actual = call()
                    torch.cuda.current_stream().synchronize()
                    assert equal(actual, results), (i, call.name)

    run_in_threads([lambda i=i: work(i) for i in range(8)])


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_on_the_second_gpu(name):
    """While the first one is current: the same bits, as they are of the same kind, and nothing changes what is
    current."""
    call = make_call(name, "cuda:0")
    expected = call()
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0
    actual = call.on("cuda:1")()
    assert torch.cuda.current_device() == 0
    assert all(x.get_device() == 1 for x in actual.values())
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert equal({of: x.to("cuda:0") for of, x in actual.items()}, expected)


@needs_two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_two_gpus(name):
    """Each argument in turn on the other one: an error that names it, before anything is launched."""
    call = make_call(name, "cuda:0")
    names = [x for x, value in call.arguments.items() if torch.is_tensor(value)]
    for argument in names[1:]:
        with pytest.raises(RuntimeError, match=rf"\b{argument} is on cuda:1, expected cuda:0"):
            other = call.on("cuda:0")
            other.arguments[argument] = call.arguments[argument].to("cuda:1")
            other()


@needs_two_gpus
def test_two_gpus_at_once():
    """A thread for each; those of the second are the first ones there."""
    code = """
import threading
failures, expected = [], [(call.name, {name: x.cpu() for name, x in call().items()}) for call in calls("cuda:0")]
def work(device):
    try:
        for _ in range(10):
            for call, (name, results) in zip(calls(device), expected):
                assert equal({of: x.cpu() for of, x in call().items()}, results), (device, name)
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(f"cuda:{i}",)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say(failures or "done")
"""
    assert run_on_the_gpu(code)[-1] == "done"
