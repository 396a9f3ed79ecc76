"""The ops as PyTorch's machinery sees them: schemas, fake implementations, compile, export. What builds on autograd
is in test_autograd.py, saved models are in test_torchscript.py and test_export.py."""

import contextlib
import statistics
import time

import pytest
import torch
from accuracy import FLOAT8
from cases import ALL_INSIDE, Case, make_gradients, make_inputs, run_forward
from every_op import CONVOLUTIONS, make_call, op_of
from subprocesses import run_forks, run_python
from test_mutation import WRITES, arguments_of
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla

ops = torch.ops.flash_qla
INPUTS = ("q", "k", "v", "g", "beta")
FROM_BEGIN = ("_finish", "_replay")  # ops that take what begin has allocated, which their fakes do not check

CASES = (
    Case(B=2, T=70, K=16, V=8, dtype=torch.float32),
    Case(T=130, K=16, V=8, dtype=torch.float64, state_v_first=True, g_dtype=torch.float64),
    Case(lengths=(65, 0, 3), padding=2, K=16, V=8, dtype=torch.float32, initial_state=None),
    Case(lengths=(65, 0, 3), K=16, V=8, dtype=torch.float32, cu_dtype=torch.int64, state_v_first=True, scale=0.5),
    Case(B=2, T=70),
    Case(lengths=(65, 0, 3), initial_state=torch.bfloat16, dtype=torch.float16, beta_dtype=torch.float16),
    Case(T=70, strides="heads_first", do_strides="heads_first"),
    Case(lengths=(65, 0, 3), padding=2, K=16, V=8, dtype=torch.float32, **ALL_INSIDE, g_dtype=torch.bfloat16),
    Case(T=70, K=16, V=8, dtype=torch.float64, use_gate_in_kernel=True, dt_bias=None, A_log=torch.float64),
    Case(T=70, K=16, V=8, dtype=torch.float32, use_beta_sigmoid_in_kernel=True, beta_dtype=torch.float16),
)

EACH_CASE = [case if i in (0, 3, 7) else pytest.param(case, marks=pytest.mark.long) for i, case in enumerate(CASES)]

OPS = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")


def op_arguments(op: str, case: Case, device: str) -> tuple[tuple, dict]:
    """Tensors that the op requires, and the other arguments by name."""
    inputs = make_inputs(case, device)
    args = [inputs.pop(name) for name in INPUTS]
    if op == "chunk_gated_delta_rule_bwd":
        gradients = make_gradients(case, device)
        g_cumsum, A = run_forward({**dict(zip(INPUTS, args, strict=True)), **inputs})[:2]
        if case.use_gate_in_kernel or case.lengths:  # cases of packed sequences have no sums
            inputs["g_raw"] = args[3]
        if case.lengths:
            g_cumsum = A = None
        args = [*args[:3], g_cumsum, args[4], A, gradients["do"]]
        inputs["dht"] = gradients["dht"]
    return tuple(args), inputs


def flags_of(op: str):
    """The combinations of optional outputs."""
    return {
        "chunk_gated_delta_rule": [{"output_final_state": x} for x in (False, True)],
        "chunk_gated_delta_rule_fwd": [
            {"output_final_state": x, "output_h": y} for x in (False, True) for y in (False, True)
        ],
        "chunk_gated_delta_rule_bwd": [{}],
    }[op]


def for_device(case: Case, device: str):
    if device == "cuda" and (case.K % 8 or case.V % 8 or case.dtype in (torch.float32, torch.float64)):
        pytest.skip("the GPU has multiples of 8 as K and V, in bf16 and fp16")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", EACH_CASE, ids=str)
def test_opcheck(device, op, case):
    for_device(case, device)
    args, kwargs = op_arguments(op, case, device)
    for flags in flags_of(op):
        torch.library.opcheck(getattr(ops, op).default, args, {**kwargs, **flags})


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith("_bwd")])
@pytest.mark.parametrize("case", EACH_CASE[1::2], ids=str)
def test_opcheck_with_inputs_that_require_gradients(device, op, case):
    for_device(case, device)
    args, kwargs = op_arguments(op, case, device)
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    for flags in flags_of(op):
        torch.library.opcheck(getattr(ops, op).default, args, {**kwargs, **flags})


@pytest.mark.parametrize("name", sorted({*WRITES} - {*OPS}))
def test_opcheck_of_other_ops(device, name):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.endswith("_begin"):  # which leaves parts of what it allocates to finish: they are nothing yet
        checks += ["test_aot_dispatch_static", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op_of(name), (), arguments_of(name, device), test_utils=checks)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize(
    "name",
    [x for x in WRITES if ("intermediate_states" in WRITES[x] or "checkpoints" in WRITES[x]) and x not in CONVOLUTIONS],
)
def test_opcheck_with_states_of_8_bits(name, dtype, device):
    """All checks but test_schema, which multiplies numbers of 8 bits: PyTorch's CPU cannot do that."""
    arguments = make_call(name, device).arguments
    states = ("state_pool", "intermediate_states", "checkpoints")
    arguments |= {x: arguments[x].to(dtype) for x in states if x in arguments}
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op_of(name), (), arguments, test_utils=checks)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("name", [x for x in WRITES if x.startswith("decode")])
def test_compiled_decoding(device, name, backend):
    """The call is one graph, and writes states and o in place."""

    def twice(arguments):
        return op_of(name)(**arguments) * 2

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, backend=backend)
    arguments, others = (arguments_of(name, device) for _ in range(2))
    pointers = {x: arguments[x].data_ptr() for x in WRITES[name] if x in arguments}
    assert torch.equal(compiled(arguments), twice(others))
    for x, pointer in pointers.items():
        assert arguments[x].data_ptr() == pointer and torch.equal(arguments[x], others[x])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_outputs_are_like_the_real_ones(device, op, case):
    """Shape, strides and dtype; a graph compiled for wrong strides reads the wrong elements."""
    for_device(case, device)
    args, kwargs = op_arguments(op, case, device)
    for flags in flags_of(op):
        real = getattr(ops, op)(*args, **kwargs, **flags)
        with FakeTensorMode() as mode:
            to_fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
            fake_args = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
            fake = getattr(ops, op)(*fake_args, **to_fake, **flags)
        assert len(real) == len(fake)
        for x, y in zip(real, fake, strict=True):
            assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


@pytest.mark.parametrize("name", [x for x in sorted(WRITES) if not x.endswith(FROM_BEGIN)])
def test_fakes_with_one_tensor_in_another_dtype(device, name):
    """Where the op takes it, so does its fake implementation, with results of the same dtypes; where the CPU refuses
    it, so does the fake."""
    arguments = arguments_of(name, device)
    floating = [x for x, y in arguments.items() if torch.is_tensor(y) and y.is_floating_point()]
    taken = 0
    for x in floating:
        other = torch.float32 if arguments[x].dtype != torch.float32 else torch.bfloat16
        changed = {n: y.clone() if torch.is_tensor(y) else y for n, y in arguments.items()}
        changed[x] = changed[x].to(other)
        outcomes = []
        for mode in (contextlib.nullcontext(), FakeTensorMode()):
            is_fake = isinstance(mode, FakeTensorMode)
            tensors = {n: mode.from_tensor(y) if is_fake and torch.is_tensor(y) else y for n, y in changed.items()}
            with mode:
                try:
                    results = op_of(name)(**tensors)
                except (RuntimeError, ValueError) as error:
                    outcomes.append(type(error))
                else:
                    results = results if isinstance(results, tuple | list) else (results,)
                    outcomes.append([(y.shape, y.stride(), y.dtype) for y in results])
        is_taken, is_taken_by_fake = (isinstance(outcome, list) for outcome in outcomes)
        if device == "cpu" or is_taken:  # the kernels have fewer dtypes
            assert is_taken == is_taken_by_fake, (x, other, outcomes)
        if is_taken and not name.endswith("_begin"):  # whose workspace only the device sizes
            assert outcomes[0] == outcomes[1], (x, other)
        taken += is_taken
    assert taken > 0


def test_outputs_not_asked_for_are_empty(device):
    args, kwargs = op_arguments("chunk_gated_delta_rule_fwd", Case(B=2, T=70), device)
    h, final_state = ops.chunk_gated_delta_rule_fwd(*args, **kwargs, output_final_state=False, output_h=False)[3:]
    assert h.shape == final_state.shape == (0,)
    assert h.dtype == torch.bfloat16 and final_state.dtype == torch.float32
    assert h.device == final_state.device == args[0].device
    args, kwargs = op_arguments("chunk_gated_delta_rule_bwd", Case(B=2, T=70, initial_state=None), device)
    dh0 = ops.chunk_gated_delta_rule_bwd(*args, **kwargs)[5]
    assert dh0.shape == (0,) and dh0.dtype == torch.float32 and dh0.device == args[0].device
    for x in ops.chunk_gated_delta_rule_bwd(*args, **kwargs)[6:]:
        assert x.shape == (0,) and x.dtype == torch.float32 and x.device == args[0].device


@pytest.mark.parametrize(
    ("op", "flags"), [(op, flags) for op in OPS[1:] for flags in flags_of(op)], ids=lambda x: str(x)
)
def test_compile_the_low_level_functions(device, op, flags):
    torch._dynamo.reset()
    args, kwargs = op_arguments(op, Case(B=2, T=70), device)
    function = getattr(flash_qla, op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual, expected = compiled(*args, **kwargs, **flags), function(*args, **kwargs, **flags)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.long
def test_import_time():
    """The import takes at most 0.3 s more than importing torch."""
    code = "import time, torch; start = time.perf_counter(); import flash_qla; print(time.perf_counter() - start)"
    seconds = [float(run_python(code)) for _ in range(3)]
    assert statistics.median(seconds) <= 0.3, seconds


def test_import_does_not_touch_the_gpu():
    """A process that only imports the package may fork, and a broken driver does not break the import."""
    code = "import torch, flash_qla; print(torch.cuda.is_initialized(), torch.backends.cuda.is_built())"
    assert run_python(code).split()[0] == "False"


def test_slow_path_notice_comes_once():
    """Also if the package compares layers on the CPU in between."""
    code = """
import torch, flash_qla
x = torch.zeros(1, 3, 1, 4)
for _ in range(3):
    flash_qla.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])
    with flash_qla._binary.slow_path_is_meant():
        pass
    flash_qla.chunk_gated_delta_rule_fwd(x, x, x, x[..., 0], x[..., 0])
"""
    assert run_python(code, FLASH_QLA_QUIET="").count("slow path") == 1


def test_slow_path_notice_of_every_function():
    """Whichever is called first says it, but not gated_rms_norm, which has no recurrence."""
    calls = {
        "chunk_gated_delta_rule(x, x, x, g, g)": 1,
        "chunk_gated_delta_rule_bwd(x, x, x, None, g, None, x, g_raw=g)": 1,
        "prefill_gated_delta_rule(x, x, x, g, g, pool, slots)": 1,
        "decode_gated_delta_rule(x, x, x, g, g, None, None, pool, slots)": 1,
        "causal_conv1d(x[:, :, 0], torch.zeros(4, 4))": 1,
        "prefill_causal_conv1d(x[:, :, 0], torch.zeros(4, 4), None, pool[:, 0, :, :3], slots)": 1,
        "gated_rms_norm(x, x, x[0, 0, 0])": 0,
    }
    code = """
import torch, flash_qla
x, g, pool, slots = torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1), torch.zeros(2, 1, 4, 4), torch.tensor([1])
for _ in range(2):
    flash_qla.{call}
"""
    outputs = run_forks([code.format(call=call) for call in calls], FLASH_QLA_QUIET="")
    for (call, times), output in zip(calls.items(), outputs, strict=True):
        assert output.count("slow path") == times, f"{call}\n{output}"


def test_slow_path_notice_is_a_python_warning():
    """Python's filters hold for it: also from a thread, and as an error, which is the call's and no other's."""
    code = """
import threading, warnings
import torch, flash_qla
x = torch.zeros(1, 3, 1, 4)
def call():
    flash_qla.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])
def call_in_a_thread():
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter({action!r})
    try:
        {call}()
    except RuntimeError as error:
        print("error:", error)
    call()
for warning in found:
    print(warning.category.__name__, warning.message)
"""
    cases = (
        ("always", "call", "UserWarning flash_qla: the tensors are on the CPU"),
        ("always", "call_in_a_thread", "UserWarning flash_qla: the tensors are on the CPU"),
        ("error", "call", "error: UserWarning: flash_qla: the tensors are on the CPU"),
        ("ignore", "call", ""),
    )
    outputs = run_forks([code.format(action=action, call=call) for action, call, _ in cases], FLASH_QLA_QUIET="")
    for (_, _, beginning), output in zip(cases, outputs, strict=True):
        assert output.startswith(beginning) and len(output.splitlines()) == bool(beginning), output


def test_slow_path_notice_points_at_the_callers_line(tmp_path):
    """Whichever function or op is called, compiled or not."""
    calls = (
        "flash_qla.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])",
        "torch.ops.flash_qla.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])",
        "flash_qla.chunk_gated_delta_rule(y, x, x, x[..., 0], x[..., 0])[0].sum().backward()",
        "torch.compile(flash_qla.chunk_gated_delta_rule, backend='eager')(x, x, x, x[..., 0], x[..., 0])",
        "torch.compile(flash_qla.chunk_gated_delta_rule, backend='aot_eager')(x, x, x, x[..., 0], x[..., 0])",
        "torch.compile(flash_qla.chunk_gated_delta_rule)(x, x, x, x[..., 0], x[..., 0])",
    )
    programs = [tmp_path / f"program{i}.py" for i in range(len(calls))]
    for program, call in zip(programs, calls, strict=True):
        program.write_text(
            "import torch, flash_qla\nx = torch.zeros(1, 3, 1, 4)\ny = x.clone().requires_grad_()\n" + call
        )
    outputs = run_forks([f"import runpy; runpy.run_path({str(x)!r})" for x in programs], FLASH_QLA_QUIET="")
    for program, output in zip(programs, outputs, strict=True):
        assert f"{program}:4: UserWarning: flash_qla" in output, output


def test_cpu_speed():
    """T=1024, 4 heads, K=V=128, fp32 in under a second on 2 cores. The best of three, as other processes may run."""
    inputs = make_inputs(Case(T=1024, H_k=4, H_v=4, dtype=torch.float32), "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    assert min(seconds) < 1.0, seconds
