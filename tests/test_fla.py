"""flash-linear-attention (FLA) beside flash_qla: its own dispatch takes flash_qla and gets right answers, and what is
outside of flash_qla's range goes to FLA's kernels.

The ops that PyTorch dispatched, forward and backward, show which package ran; FLA's own messages do not count.

Neither FLA's kernels nor its dispatch to flash_qla run without a GPU. There FLA is told that the GPU is a Hopper one,
so that dispatch reaches the CPU implementation, and a stand-in that only counts its calls is where FLA's kernels would
be. The file is long because all tests share this stand-in.
"""

import copy
import dataclasses
import importlib.util
import inspect
import itertools
import re
import warnings
from types import SimpleNamespace

import accuracy
import pytest
import reference
import test_region
import torch
from accuracy import relative_error
from cases import GRADIENT_OF, Case, make_gradients, make_inputs, reference_gradients, reference_of
from dispatched import Ran
from torch.utils._python_dispatch import TorchDispatchMode

NO_FLA = "no FLA with a backend for flash_qla (fla-core 0.6.0, and Triton) is installed"
fla_backend = pytest.importorskip("fla.ops.gated_delta_rule.backends.flash_qla", reason=NO_FLA)

import fla.ops.cp.context as fla_cp  # noqa: E402
import fla.ops.gated_delta_rule as fla_gdr  # noqa: E402
import fla.ops.gated_delta_rule.chunk as fla_chunk  # noqa: E402
import fla.ops.gated_delta_rule.fused_recurrent as fla_recurrent  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402

import flash_qla  # noqa: E402
from flash_qla.cp import build_cp_context  # noqa: E402
from flash_qla.integrations import _fla_layer as fla_layer  # noqa: E402
from flash_qla.integrations._fla_backend import Backend  # noqa: E402
from flash_qla.integrations.fla import (  # noqa: E402
    fused_recurrent_gated_delta_rule,
    restore,
    use_flash_qla,
)

PARTS = ("forward_begin", "forward_finish", "backward_begin", "backward_replay", "backward_finish")
FORWARD = INFERENCE = "chunk_gated_delta_rule"  # autograd saves the inputs alone, so training has no op of its own
BACKWARD = "chunk_gated_delta_rule_bwd"
DECODING = "decode_gated_delta_rule"
CONVOLUTION, NORM = "causal_conv1d", "gated_rms_norm"
REGION = [CONVOLUTION] * 3 + [FORWARD, NORM]
REGION_BACKWARD = [f"{NORM}_bwd", BACKWARD, *[f"{CONVOLUTION}_bwd"] * 3]
NAIVE_TOLERANCE = 1e-5  # FLA's naive recurrence is in fp32
BARS = {"o": 5e-3, "final_state": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dh0": 8e-3}
DOT_PRODUCT_BAR = 2e-2  # db, dg and what is a sum of them
FLA_BAR = 5e-2  # how accurate FLA's kernels are is not the question here
# The largest ratio of a bf16 layer's errors to those of the same layer with FLA's naive recurrence, which rounds its
# results to bf16 and nothing else, as the CPU implementation does. The kernels round within; the norm after o enlarges
# that.
LAYER_RATIO = {"cpu": 1.25, "cuda": 3.0}


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch):
    """FLA's dispatch as it is on a Hopper GPU, and flash_qla's integration off."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(fla_backend, "IS_NVIDIA_HOPPER", True)
    monkeypatch.delenv("FLA_FLASH_QLA", raising=False)
    yield
    restore()


@pytest.fixture
def integration():
    use_flash_qla()


@reference.one_thread()
def naive(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's naive recurrence, which knows neither packed sequences nor grouped heads nor the other options."""
    q, k, v, g, beta, S = (arguments[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    cu_seqlens = arguments.get("cu_seqlens")
    offsets = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    os, final_states = [], []
    for n, (first, last) in enumerate(itertools.pairwise(offsets)):
        q_n, k_n, v_n, g_n, beta_n = (x[:, first:last].float() for x in (q, k, v, g, beta))
        if arguments.get("use_qk_l2norm_in_kernel"):
            q_n, k_n = reference.l2norm(q_n), reference.l2norm(k_n)
        q_n, k_n = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q_n, k_n))
        S_n = S if S is None or cu_seqlens is None else S[n : n + 1]
        if arguments.get("state_v_first") and S_n is not None:
            S_n = S_n.mT
        o, final_state = fla_gdr.naive_recurrent_gated_delta_rule(
            q_n, k_n, v_n, beta_n, g_n, arguments.get("scale"), S_n, output_final_state=True
        )
        os.append(o)
        final_states.append(final_state.mT if arguments.get("state_v_first") else final_state)
    padding = v.new_zeros(v.shape[0], v.shape[1] - offsets[-1], *v.shape[2:])
    return torch.cat([*os, padding], 1), torch.cat(final_states)


def run(operator, inputs: dict, gradients: dict) -> dict:
    """o, the final state and all gradients through autograd, by name."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in GRADIENT_OF if inputs[name] is not None}
    leaves |= {name: inputs[name].detach().requires_grad_() for name in ("A_log", "dt_bias") if name in inputs}
    outputs = operator({**inputs, **leaves})
    leaf_gradients = torch.autograd.grad(outputs, list(leaves.values()), list(gradients.values()))
    names = ("o", "final_state", *(GRADIENT_OF.get(name, f"d{name}") for name in leaves))
    return dict(zip(names, (*outputs, *leaf_gradients), strict=True))


def in_fp32(inputs: dict) -> dict:
    def is_floating_point(x) -> bool:
        return isinstance(x, torch.Tensor) and x.is_floating_point()

    return {name: x.float() if is_floating_point(x) else x for name, x in inputs.items()}


def through_fla(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return fla_gdr.chunk_gated_delta_rule(**inputs, output_final_state=True)


def arguments_of(case: Case, device: str) -> tuple[dict, dict]:
    """FLA's arguments, and the gradients of both results."""
    inputs = make_inputs(case, device)
    del inputs["auto_cp"]
    gradients = make_gradients(case, device)
    gradients["do"] = gradients["do"].nan_to_num()  # that of padding
    return inputs, gradients


def expected_of(inputs: dict, gradients: dict) -> tuple[dict, reference.Gradients]:
    """The results of the fp64 recurrence, by name, and its gradients."""
    outputs, expected = reference_of(inputs), reference_gradients(inputs, **gradients)
    named = {"o": outputs.o, "final_state": outputs.final_state}
    return named | {name: getattr(expected, name) for name in GRADIENT_OF.values()}, expected


def check(case: Case, device: str) -> None:
    """Every result and gradient of FLA's function, run by flash_qla."""
    inputs, gradients = arguments_of(case, device)
    with Ran() as ran:
        actual = run(through_fla, inputs, gradients)
    assert ran.ops == [FORWARD, BACKWARD]
    expected, expected_gradients = expected_of(inputs, gradients)
    for name in ("o", "final_state"):
        accuracy.check(name, actual[name], expected[name], dtype=case.dtype, case=case)
    actual_gradients = {name: x for name, x in actual.items() if name not in ("o", "final_state")}
    g_cumsum = reference.chunk_cumsum(inputs["g"], inputs["cu_seqlens"])
    accuracy.check_gradients(actual_gradients, expected_gradients, dtype=case.dtype, case=case, g_cumsum=g_cumsum)
    for name, x in actual.items():
        source = {gradient: name for name, gradient in GRADIENT_OF.items()}.get(name)
        expected_dtype = inputs[source].dtype if source else torch.float32 if name == "final_state" else case.dtype
        assert x.dtype == expected_dtype, name
    for name, x in run(naive, in_fp32(inputs), gradients).items():
        size = expected_gradients.sizes.get(name)
        assert relative_error(x, expected[name], size) < NAIVE_TOLERANCE, f"FLA's naive recurrence has another {name}"


FEW = {"H_k": 1, "H_v": 2}
INSIDE = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
CASES = (
    Case(T=1, H_k=2, H_v=8),  # dq of one token and head is a single dot product, which may cancel
    Case(T=64, H_k=2, H_v=2, **INSIDE),
    Case(B=2, T=70, **FEW, initial_state=None),
    Case(T=130, **FEW, dtype=torch.float16, gate="logsigmoid", scale=0.3, state_v_first=True),
    Case(T=65, H_k=1, H_v=4, g_dtype=torch.bfloat16, beta_dtype=torch.bfloat16, initial_state=torch.bfloat16),
    Case(T=66, **FEW, gate="zero", beta="two"),
    Case(T=66, **FEW, gate="resets", strides="gaps"),
    Case(lengths=(1, 0, 65, 20), **FEW, cu_dtype=torch.int64, state_v_first=True),
    Case(lengths=(5, 70), **FEW, padding=30, **INSIDE, initial_state=None),
)


# Head dimensions that flash_qla has, and FLA without the integration does not let it have: those of released models,
# OLMo-Hybrid's among them, the default of FLA's layer and the same with keys of 128, and at the borders
HEAD_DIMS = ((64, 64), (64, 128), (96, 192), (128, 256), (128, 64), (120, 512), (256, 512), (136, 64))
FEW_CHANNELS = Case(lengths=(5, 70), **FEW, K=8, V=8, **INSIDE, state_v_first=True)
OF_HEAD_DIMS = [dataclasses.replace(FEW_CHANNELS, K=K, V=V, padding=30) for K, V in HEAD_DIMS]


@pytest.mark.parametrize("case", (*CASES, *OF_HEAD_DIMS), ids=str)
def test_function(case, device):
    if case in OF_HEAD_DIMS:
        use_flash_qla()
    check(case, device)


def test_function_of_few_channels(integration):
    check(FEW_CHANNELS, "cpu")


def test_function_without_gradients(device):
    """The same bits as without FLA."""
    inputs, _ = arguments_of(Case(lengths=(100, 0, 30)), device)
    with Ran() as ran:
        outputs = through_fla(inputs)
    assert ran.ops == [INFERENCE]
    expected = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    with Ran() as ran:
        o, final_state = fla_gdr.chunk_gated_delta_rule(**inputs)
    assert ran.ops == [INFERENCE]
    assert torch.equal(o, expected[0]) and final_state is None


def activations(H_v: int, device: str) -> dict:
    """The arguments of FLA's function for raw gates and betas; g and beta are then the inputs of the activations."""
    generator = torch.Generator().manual_seed(7)
    A_log, dt_bias = (torch.randn(H_v, generator=generator).to(device) for _ in range(2))
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    return {"A_log": A_log, "dt_bias": dt_bias, **options}


def naive_activated(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's naive recurrence, with gates and betas as FLA documents the activations."""
    g = -inputs["A_log"].exp() * F.softplus(inputs["g"].float() + inputs["dt_bias"])
    return naive({**inputs, "g": g, "beta": 2 * inputs["beta"].float().sigmoid()})


INTEGRATED = {
    "activations": Case(T=70),
    "cp_context of FLA": Case(lengths=(30, 40), K=96, V=480, initial_state=None, cu_dtype=torch.int64),
    **{f"K={K}, V={V}": Case(T=70, K=K, V=V) for K, V in HEAD_DIMS},
}
OUTSIDE = {
    **{f"K={K}, V={V}": Case(T=70, K=K, V=V) for K, V in ((264, 512), (60, 64), (64, 100), (128, 520))},
    "fp32": Case(T=70, dtype=torch.float32),
    "cp_context without cu_seqlens_cpu": Case(lengths=(70,), initial_state=None, cu_dtype=torch.int64),
    "a keyword that FLA ignores": Case(T=70, K=64, V=96),
    "switched off": Case(T=70),
}


@pytest.mark.parametrize("name", (*INTEGRATED, *OUTSIDE))
@pytest.mark.parametrize("integrated", [False, True], ids=["", "integration"])
def test_outside_goes_to_fla(name, integrated, monkeypatch):
    """The call on the CPU reaches FLA's own function without an error, unless flash_qla supports it and the integration
    is used."""
    reached = []

    class StandIn:
        @staticmethod
        def apply(q, k, v, *_):
            reached.append(True)
            return torch.zeros_like(v), None

    monkeypatch.setattr(fla_chunk, "ChunkGatedDeltaRuleFunction", StandIn)
    if integrated:
        use_flash_qla()
    case = (INTEGRATED | OUTSIDE)[name]
    inputs, _ = arguments_of(case, "cpu")
    if name == "activations":
        inputs |= activations(case.H_v, "cpu")
    if "cp_context" in name:
        inputs["cp_context"] = fla_cp.get_cp_cu_seqlens(inputs["cu_seqlens"], world_size=1, rank=0)
    if "without cu_seqlens_cpu" in name:
        inputs["cp_context"] = dataclasses.replace(inputs["cp_context"], cu_seqlens_cpu=None)
    if "keyword" in name:
        inputs["no_such_keyword"] = None
    if name == "switched off":
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
    with Ran() as ran:
        fla_gdr.chunk_gated_delta_rule(**inputs)
    inside = integrated and name in INTEGRATED
    assert (ran.ops, reached) == (([INFERENCE], []) if inside else ([], [True]))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_contexts_are_those_of_fla(world_size, layout):
    """Field by field."""
    for lengths in ((240,), (7, 0, 200, 33), (0, 60, 60, 0, 120), (1,) * 20 + (219, 1)):
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        for rank in range(world_size):
            theirs = fla_cp.get_cp_cu_seqlens(
                cu_seqlens, world_size=world_size, rank=rank, conv1d_kernel_size=4, layout=layout
            )
            group = SimpleNamespace(rank=lambda r=rank: r, size=lambda: world_size, group_name="ranks")
            ours = build_cp_context(cu_seqlens, group, 4, layout=layout)
            for field in dataclasses.fields(ours):
                if field.name not in ("group", "sequences", "num_tokens"):
                    x, y = getattr(ours, field.name), getattr(theirs, field.name)
                    same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
                    assert same, f"{field.name} is {x}, FLA's {y}: {lengths}, rank {rank}"


def test_context_parallelism(device, integration):
    """FLA's context of one rank with two parts works, and with states too, which FLA's function does not support."""
    inputs, gradients = arguments_of(Case(lengths=(100, 28), state_v_first=True, gate="logsigmoid"), device)
    context = fla_cp.get_cp_cu_seqlens(inputs["cu_seqlens"], world_size=1, rank=0, layout="zigzag")
    assert context.cu_seqlens.tolist() == [0, 64, 100, 128]
    rows = torch.tensor([0, 0, 1], device=device)  # the first two of the three are of one sequence
    ends = torch.tensor([0, 1, 1], device=device)[:, None, None, None]
    arguments = inputs | {"initial_state": inputs["initial_state"][rows], "cp_context": context}
    with Ran() as ran:
        actual = run(through_fla, arguments, gradients | {"dht": gradients["dht"][rows] * ends})
    assert ran.ops == [f"gated_delta_rule_{part}" for part in PARTS]
    assert not actual["dh0"][1].any()
    actual["dh0"], actual["final_state"] = actual["dh0"][[0, 2]], actual["final_state"][1:]
    expected, expected_gradients = expected_of(inputs, gradients)
    for name, x in actual.items():
        error = relative_error(x, expected[name], expected_gradients.sizes.get(name))
        assert error < BARS.get(name, DOT_PRODUCT_BAR), f"{name}: {error:.2e}"


def trains_without_integration() -> bool:
    """Whether FLA's own backward runs on Hopper: it refuses some releases of Triton, unless TileLang is there."""
    release = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:3])
    return not (3, 4, 0) <= release < (3, 7, 1) or importlib.util.find_spec("tilelang") is not None


with_and_without_integration = pytest.mark.parametrize(
    ("device", "integrated"),
    [
        ("cpu", True),  # without it FLA's kernels run, which need a GPU
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param(
            "cuda",
            False,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not trains_without_integration(), reason="FLA's backward refuses this Triton"),
            ],
        ),
    ],
)


@pytest.mark.parametrize("head_dims", [{}, {"K": 96, "V": 192}], ids=str)
@with_and_without_integration
def test_activations(device, integrated, head_dims):
    """Gates and betas that are left to the function, and the gradients of all that they are made of."""
    if integrated:
        use_flash_qla()
    inputs, gradients = arguments_of(Case(B=2, T=70, **head_dims), device)
    inputs |= activations(inputs["v"].shape[2], device)
    with Ran() as ran:
        actual = run(through_fla, inputs, gradients)
    assert ran.ops == ([FORWARD, BACKWARD] if integrated else [])
    for name, expected in run(naive_activated, inputs, gradients).items():
        error = relative_error(actual[name], expected.double())
        assert error < (BARS.get(name, DOT_PRODUCT_BAR) if integrated else FLA_BAR), f"{name}: {error:.2e}"
        assert actual[name].dtype == expected.dtype or name == "o"


def test_activations_by_position(integration):
    """Any of FLA's arguments may come so."""
    inputs, _ = arguments_of(Case(B=2, T=3), "cpu")
    inputs |= {"output_final_state": True, **activations(inputs["v"].shape[2], "cpu")}
    expected = fla_gdr.chunk_gated_delta_rule(**inputs)
    names = [name for name in inspect.signature(fla_gdr.chunk_gated_delta_rule).parameters if name != "kwargs"]
    positional = [inputs.pop(name, None) for name in names]
    positional[names.index("state_v_first")] = False
    with Ran() as ran:
        actual = fla_gdr.chunk_gated_delta_rule(*positional, **inputs)
    assert ran.ops == [INFERENCE]
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_arguments_that_change_nothing(integration):
    """torchtitan passes on the offsets on the CPU, others precomputed indices and the chunk size."""
    inputs, _ = arguments_of(Case(lengths=(100, 0, 30)), "cpu")
    expected = fla_gdr.chunk_gated_delta_rule(**inputs, output_final_state=True)
    options = {"cu_seqlens_cpu": inputs["cu_seqlens"], "chunk_indices": torch.tensor([[0, 0]]), "chunk_size": 64}
    with Ran() as ran:
        actual = fla_gdr.chunk_gated_delta_rule(**inputs, **options, output_final_state=True)
    assert ran.ops == [INFERENCE]
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("v_first", (False, True))
def test_older_name_of_the_layout(v_first, integration):
    inputs, _ = arguments_of(Case(T=70, K=96, V=64, state_v_first=v_first), "cpu")
    expected = fla_gdr.chunk_gated_delta_rule(**inputs, output_final_state=True)
    del inputs["state_v_first"]
    with Ran() as ran, pytest.warns(DeprecationWarning, match="state_v_first"):
        actual = fla_gdr.chunk_gated_delta_rule(**inputs, transpose_state_layout=v_first, output_final_state=True)
    assert ran.ops == [INFERENCE]
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_integration_declines_other_chunks():
    inputs, _ = arguments_of(Case(T=1), "cpu")
    verify = Backend().chunk_gated_delta_rule_verifier
    assert verify(**inputs, chunk_size=64) == (True, None)
    assert verify(**inputs, chunk_size=32) == (False, "flash_qla requires chunk_size=64")
    accepted, _ = verify(**inputs | {"state_v_first": True}, transpose_state_layout=True)
    assert not accepted


@pytest.mark.parametrize("capability", ((8, 0), (8, 9), (10, 0), (12, 0)))
def test_integration_declines_other_gpus(monkeypatch, capability):
    """There FLA's kernels run, because nobody has measured whether flash_qla's are faster."""
    inputs, _ = arguments_of(Case(T=1), "cpu")
    verify = Backend().chunk_gated_delta_rule_verifier
    assert verify(**inputs) == (True, None)

    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = {**inputs, "q": inputs["q"].as_subclass(OnGPU)}
    accepted, reason = verify(**on_gpu)
    assert not accepted and "Hopper" in reason
    monkeypatch.setenv("FLASH_QLA_ANY_GPU", "1")
    assert verify(**on_gpu) == (True, None)


@pytest.mark.parametrize("blackwell", ("IS_NVIDIA_SM100", "IS_NVIDIA_SM120"))
def test_fla_asks_for_the_forward_on_blackwell(monkeypatch, blackwell):
    """Without the integration. test_emulator_portable.py runs this function on such GPUs. FLA trains SM120 itself."""
    monkeypatch.setattr(fla_backend, "IS_NVIDIA_HOPPER", False)
    monkeypatch.setattr(fla_backend, blackwell, True)
    inputs, _ = arguments_of(Case(T=70, **FEW), "cpu")
    with torch.no_grad(), Ran() as ran:
        o, _ = through_fla(inputs)
    assert ran.ops == [FORWARD]
    accuracy.check("o", o, reference_of(inputs).o, dtype=torch.bfloat16, case=Case(T=70, **FEW))
    training = inputs | {"q": inputs["q"].detach().requires_grad_()}
    accepted, _ = fla_backend.FlashQLABackend().chunk_gated_delta_rule_verifier(**training)
    assert accepted == (blackwell == "IS_NVIDIA_SM100")


@pytest.mark.parametrize("head_dims", [{}, {"K": 96, "V": 192}], ids=str)
def test_integration_keeps_the_other_conditions(head_dims, monkeypatch):
    """Whatever the head dimensions, the answer is that of FLA's backend to the same call with K = V = 128."""
    ours, theirs = (backend().chunk_gated_delta_rule_verifier for backend in (Backend, fla_backend.FlashQLABackend))
    inputs, square = (arguments_of(Case(T=1, **dims), "cpu")[0] for dims in (head_dims, {}))

    def check_declined(names=(), change=None, **options):
        verdicts = []
        for verify, call in ((ours, inputs), (theirs, square)):
            verdicts.append(verify(**call | {name: change(call[name]) for name in names} | options))
        assert verdicts[0] == verdicts[1] and not verdicts[0][0]

    assert ours(**inputs) == theirs(**square) == (True, None)
    check_declined(("q", "k", "v"), torch.Tensor.float)
    check_declined(("k",), torch.Tensor.half)
    check_declined(allow_neg_eigval=True)
    assert not ours(**inputs, use_gate_in_kernel=True)[0]  # without A_log
    monkeypatch.setattr(fla_backend, "IS_NVIDIA_HOPPER", False)
    check_declined()
    monkeypatch.setattr(fla_backend, "IS_NVIDIA_SM120", True)
    check_declined(("q",), torch.Tensor.requires_grad_)


# Decoding

DECODED = {
    "K-first": Case(T=1),
    "V-first": Case(T=3, state_v_first=True),
    "packed": Case(lengths=(3, 0, 1), K=96, V=192),
    "activations": Case(T=2),
}
NOT_DECODED = {
    "K=264": Case(T=1, K=264),
    "fp32": Case(T=1, dtype=torch.float32),
    "gk": Case(T=1),
    "a step size of each channel": Case(T=1, K=64, V=96),
    "a keyword that FLA ignores": Case(T=1),
    "switched off": Case(T=1),
}


@pytest.mark.parametrize("name", (*DECODED, *NOT_DECODED))
@pytest.mark.parametrize("integrated", [False, True], ids=["", "integration"])
def test_decoding_that_goes_to_fla(name, integrated, monkeypatch):
    """The call reaches FLA's own function unless flash_qla supports it and the integration is used, whatever module of
    FLA it comes from."""
    layers = pytest.importorskip("fla.layers.gated_deltanet", reason="FLA's layers are not installed")
    reached = []

    class StandIn:
        @staticmethod
        def apply(q, k, v, *_):
            reached.append(True)
            return torch.zeros_like(v), None

    monkeypatch.setattr(fla_recurrent, "FusedRecurrentFunction", StandIn)
    if integrated:
        use_flash_qla()
    if name == "switched off":
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
    case = (DECODED | NOT_DECODED)[name]
    inputs, _ = arguments_of(case, "cpu")
    inputs |= activations(case.H_v, "cpu") if name == "activations" else {}
    inputs |= {"gk": torch.zeros(1)} if name == "gk" else {}
    inputs |= {"beta": torch.rand_like(inputs["v"])} if "channel" in name else {}
    inputs |= {"chunk_size": 64} if "keyword" in name else {}
    inside = integrated and name in DECODED
    for function in (
        fla_gdr.fused_recurrent_gated_delta_rule,
        fla_gdr.fused_recurrent_gdn,
        layers.fused_recurrent_gated_delta_rule,
    ):
        reached.clear()
        with Ran() as ran:
            o, final_state = function(**inputs, output_final_state=True)
        assert (ran.ops, reached) == (([DECODING], []) if inside else ([], [True]))
        if inside:
            ours = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
            assert torch.equal(o, ours[0]) and torch.equal(final_state, ours[1])


def test_decoding_is_restored():
    theirs = fla_gdr.fused_recurrent_gated_delta_rule
    for _ in range(2):
        use_flash_qla()
        assert fla_gdr.fused_recurrent_gated_delta_rule is not theirs
    restore()
    assert fla_gdr.fused_recurrent_gated_delta_rule is theirs is fla_gdr.fused_recurrent_gdn


@pytest.mark.gpu
@pytest.mark.parametrize("name", [x for x in DECODED if x != "packed"])
@torch.no_grad()
def test_decoding_beside_fla(name):
    """FLA's own kernel, and flash_qla."""
    case = DECODED[name]
    inputs, _ = arguments_of(case, "cuda")
    inputs |= activations(case.H_v, "cuda") if name == "activations" else {}
    expected = reference.gated_delta_rule(**inputs)
    theirs = fla_gdr.fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    use_flash_qla()
    with Ran() as ran:
        ours = fla_gdr.fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert ran.ops == [DECODING]
    for x, y, exact in zip(ours, theirs, (expected.o, expected.final_state), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert relative_error(x, exact) <= 5e-3 and relative_error(y, exact) < FLA_BAR


# FLA's layer by its K/V; its default for V is twice K.
LAYERS = {
    "128/128": {"num_v_heads": 4, "head_dim": 128, "expand_v": 1},
    "128/256": {"head_dim": 128},
    "256/512": {},  # FLA's default
    "96/192": {"head_dim": 96},
    "96/192, allow_neg_eigval": {"head_dim": 96, "allow_neg_eigval": True},  # as OLMo-Hybrid
    "64/128": {"num_v_heads": 4, "head_dim": 64},
}


def build_layer(name: str, device: str, **sizes):
    """A small bf16 layer; on the CPU without the parts that are Triton kernels."""
    layers = pytest.importorskip("fla.layers", reason="FLA's layers (flash-linear-attention) are not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_heads": 2, "layer_idx": 0, **LAYERS[name], **sizes}
    if device == "cuda":
        return layers.GatedDeltaNet(**sizes).to(device, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ShortConvolution is crucial")
        layer = layers.GatedDeltaNet(**sizes, use_short_conv=False, use_gate=False)
    layer.o_norm = torch.nn.RMSNorm(layer.head_v_dim)
    return layer.bfloat16()


class TorchActivations(TorchDispatchMode):
    """A list of what PyTorch ran meanwhile of which the activations of gate and beta are made, in either pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in ("exp", "softplus", "softplus_backward", "sigmoid", "sigmoid_backward"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def run_layer(layer, x: torch.Tensor, **arguments) -> dict:
    """The output and the gradient of every parameter, by name."""
    y, _, _ = layer(x, **arguments)
    weights = torch.linspace(-1, 1, y.shape[-1], device=x.device)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad((y.float() * weights).sum(), list(parameters.values()))
    return {"y": y, **dict(zip(parameters, gradients, strict=True))}


def run_layer_naively(layer, x: torch.Tensor, **arguments) -> dict:
    """The same with FLA's naive recurrence."""
    module = importlib.import_module(type(layer).__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "chunk_gated_delta_rule", naive_in_layer)
        patch.setattr(type(layer), "forward", fla_layer._their_forward)
        return run_layer(layer, x, **arguments)


def naive_in_layer(output_final_state=False, **inputs):
    """The function as the layer calls it: in fp32 inside, o in the layer's dtype."""
    assert inputs["use_gate_in_kernel"] and inputs["use_beta_sigmoid_in_kernel"]
    g = -inputs["A_log"].float().exp() * F.softplus(inputs["g"].float() + inputs["dt_bias"].float())
    beta = inputs["beta"].float().sigmoid() * (2 if inputs["allow_neg_eigval"] else 1)
    o, final_state = naive({**inputs, "g": g, "beta": beta})
    return o.to(inputs["v"].dtype), final_state if output_final_state else None


def layer_inputs(kind: str, device: str) -> tuple[torch.Tensor, dict]:
    generator = torch.Generator().manual_seed(1)
    rows, T = (2, 80) if kind != "packed" else (1, 100)
    x = torch.randn(rows, T, 64, generator=generator).to(device, torch.bfloat16)
    if kind == "packed":
        return x, {"cu_seqlens": torch.tensor([0, 30, 31, 100], device=device)}
    if kind == "padded":
        return x, {"attention_mask": (torch.arange(T) >= torch.tensor([[0], [30]])).to(device)}
    return x, {}


def layer_errors(actual: dict, exact: dict) -> dict:
    """The relative error of y, and the root mean square of those of the gradients."""
    errors = {name: relative_error(actual[name], x.double()) for name, x in exact.items()}
    y = errors.pop("y")
    return {"y": y, "gradients": torch.tensor(list(errors.values())).square().mean().sqrt().item()}


@pytest.mark.parametrize(
    ("name", "kind"), [("128/128", "batch"), ("128/128", "padded"), *((name, "packed") for name in LAYERS)]
)
@with_and_without_integration
def test_layer(name, kind, device, integrated):
    """FLA's layer leaves the activations to the function, so that FLA runs its own kernels, unless the integration is
    used. Results and gradients are as near to the layer in fp32 as those of the naive recurrence."""
    if integrated:
        use_flash_qla()
    layer = build_layer(name, device)
    x, arguments = layer_inputs(kind, device)
    with Ran() as ran, TorchActivations() as in_torch:
        actual = run_layer(layer, x, **arguments)
    of_parts = [FORWARD, BACKWARD] if device == "cpu" else [*REGION, *REGION_BACKWARD]  # without parts on the CPU
    assert sorted(ran.ops) == (sorted(of_parts) if integrated else [])
    assert not (integrated and in_torch.names)
    naively = run_layer_naively(layer, x, **arguments)
    exact = run_layer_naively(copy.deepcopy(layer).float(), x.float(), **arguments)
    bars = layer_errors(naively, exact)
    for part, error in layer_errors(actual, exact).items():
        assert error < LAYER_RATIO[device] * bars[part], part
    for part, expected in exact.items():
        assert relative_error(actual[part], expected.double()) < 5e-2, part


# The layer's region


def whole_layer(device: str, dtype=torch.bfloat16, **sizes):
    """A small layer with all its parts, whose Triton kernels a CPU does not have."""
    layers = pytest.importorskip("fla.layers", reason="FLA's layers (flash-linear-attention) are not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_heads": 2, "num_v_heads": 4, "head_dim": 64, "layer_idx": 0, **sizes}
    return layers.GatedDeltaNet(**sizes).to(device, dtype)


def run_in_fp64(layer, x: torch.Tensor, cu_seqlens=None, attention_mask=None) -> dict:
    """run_layer by the plain formula of the region."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    parameters = dict(layer.named_parameters())
    convolutions = [getattr(layer, f"{part}_conv1d") for part in "qkv"]
    bias = torch.cat([y.bias for y in convolutions]) if layer.conv_bias else None
    weights = torch.cat([y.weight[:, 0] for y in convolutions]), bias, layer.o_norm.weight
    options = {"norm_eps": layer.o_norm.eps, "allow_neg_eigval": layer.allow_neg_eigval, "cu_seqlens": cu_seqlens}
    options["norm_activation"] = "sigmoid" if layer.o_norm.activation == "sigmoid" else "silu"

    def run(x):
        mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
        z = layer.g_proj(x).unflatten(-1, (layer.num_v_heads, -1))
        gates = layer.a_proj(x), layer.b_proj(x)
        rates, sizes = (layer.A_log, layer.dt_bias), (layer.num_heads, layer.head_k_dim)
        return layer.o_proj(test_region.formula(mixed, z, *gates, *weights, *rates, *sizes, **options)[0].flatten(-2))

    if attention_mask is None:
        y = run(x)
    else:
        rows = [run(row[mask][None]) for row, mask in zip(x, attention_mask, strict=True)]
        y = torch.cat([F.pad(row, (0, 0, x.shape[1] - row.shape[1], 0)) for row in rows])
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, 64, device=x.device)).sum(), list(parameters.values()))
    return {"y": y, **dict(zip(parameters, gradients, strict=True))}


WHOLE = {
    "plain": {},
    "sigmoid, bias, W = 3": {"output_gate_activation": "sigmoid", "conv_bias": True, "conv_size": 3},
    "as many heads": {"num_v_heads": 2, "allow_neg_eigval": True},
}


@pytest.mark.parametrize("kind", ("batch", "padded", "packed"))
@pytest.mark.parametrize("name", WHOLE)
def test_region_of_a_layer(name, kind, device, integration, caplog):
    """Convolutions, delta rule and norm of flash_qla, forward and backward; results and all gradients beside the plain
    formula."""
    fla_layer._say.cache_clear()
    layer = whole_layer(device, **WHOLE[name])
    x, arguments = layer_inputs(kind, device)
    with Ran() as ran, TorchActivations() as in_torch, caplog.at_level("INFO", "fla.flash_qla"):
        actual = run_layer(layer, x, **arguments)
    assert ran.ops[:5] == REGION and sorted(ran.ops[5:]) == sorted(REGION_BACKWARD) and not in_torch.names
    assert caplog.messages == ["flash_qla runs convolutions, delta rule and norm of GatedDeltaNet"]
    for part, expected in run_in_fp64(layer, x, **arguments).items():
        assert relative_error(actual[part], expected) < 5e-2, part


def test_cache_of_a_layer(device, integration):
    """A prefill leaves FLA's cache: windows of W inputs, and the state."""
    utils = pytest.importorskip("fla.models.utils", reason="FLA's models (flash-linear-attention) are not installed")
    layer, cache = whole_layer(device).eval(), utils.Cache()
    x, _ = layer_inputs("batch", device)
    with torch.no_grad(), Ran() as ran:
        y, _, returned_cache = layer(x, past_key_values=cache, use_cache=True)
    assert ran.ops == REGION and returned_cache is cache and torch.equal(y, run_layer(layer, x)["y"])
    windows, states = (cache[0][x] for x in ("conv_state", "recurrent_state"))
    for part, window in zip("qkv", windows, strict=True):
        assert torch.equal(window, getattr(layer, f"{part}_proj")(x)[:, -4:].mT)
    assert states.shape == (2, 4, 128, 64) and states.any() and cache.get_seq_length() == x.shape[1]


class Adapted(torch.nn.Module):
    """A part in another, as LoRA and quantization have it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args, **kwargs):
        return self.part(*args, **kwargs)


def change_hook(layer):
    layer.q_conv1d.register_forward_hook(lambda *args: None)


def change_forward(layer):
    layer.v_conv1d.forward = layer.v_conv1d.forward


def change_part(layer):
    layer.k_conv1d = Adapted(layer.k_conv1d)


def change_projection(layer):
    layer.q_proj = Adapted(layer.q_proj)


def change_norm(layer):
    layer.o_norm = torch.nn.RMSNorm(128)


CHANGES = {
    "the delta rule alone (q_conv1d is hooked)": (change_hook, {}),
    "the delta rule alone (v_conv1d is hooked)": (change_forward, {}),
    "the delta rule alone (k_conv1d is a Adapted, not a ShortConvolution)": (change_part, {}),
    "the delta rule alone (o_norm is a RMSNorm, not a FusedRMSNormGated)": (change_norm, {}),
    "the delta rule alone (q_conv1d is 5 taps wide)": (lambda layer: None, {"conv_size": 5}),
    "the delta rule alone (the layer has no gated norm)": (lambda layer: None, {"use_gate": False}),
    "the delta rule alone (the layer has no convolution)": (lambda layer: None, {"use_short_conv": False}),
    "the delta rule alone (q_proj has no weight)": (change_projection, {}),
    "the delta rule alone (its dtype is torch.float32)": (lambda layer: layer.float(), {}),
    "nothing (K = 60 and V = 120)": (lambda layer: None, {"head_dim": 60}),
    "nothing (FLA_FLASH_QLA=0)": (lambda layer: None, {}),
}


@pytest.mark.parametrize("text", CHANGES)
@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
def test_layers_of_other_parts(text, integration, monkeypatch, caplog):
    """FLA's own forward runs, and the log says why."""
    fla_layer._say.cache_clear()
    change, sizes = CHANGES[text]
    layer = whole_layer("cpu", **sizes)
    change(layer)
    if "FLA_FLASH_QLA" in text:
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
    calls = []
    x, _ = layer_inputs("batch", "cpu")
    with caplog.at_level("INFO", "fla.flash_qla"), monkeypatch.context() as patch:
        patch.setattr(fla_layer, "_their_forward", lambda *args, **kwargs: calls.append((args, kwargs)) or "theirs")
        assert layer(x, use_cache=True, cu_seqlens=None) == layer(x, use_cache=True, cu_seqlens=None) == "theirs"
    assert len(calls) == 2 and calls[0][0][:2] == (layer, x) and calls[0][1] == {"cu_seqlens": None}
    assert caplog.messages == [f"flash_qla runs {text} of GatedDeltaNet"]


def test_decoding_keeps_the_forward(integration, monkeypatch):
    """Few tokens without gradients, and what continues a cache."""
    layer = whole_layer("cpu").eval()
    x, _ = layer_inputs("batch", "cpu")
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(fla_layer, "_their_forward", lambda *args, **kwargs: "theirs")
        assert layer(x[:, :64]) == "theirs" != layer(x[:, :65])
        assert layer(x, past_key_values=[{"conv_state": (), "recurrent_state": None}]) == "theirs"


def test_the_forward_is_restored():
    theirs = fla_layer._LAYER.forward
    for _ in range(2):
        use_flash_qla()
        assert fla_layer._LAYER.forward is fla_layer.forward is not theirs
    restore()
    assert fla_layer._LAYER.forward is theirs


@pytest.mark.parametrize("name", ["128/128", "96/192, allow_neg_eigval"])
def test_layer_continues(name, integration, device):
    """A prefill in two pieces; the second is a decoding, because it has no more than 64 tokens."""
    utils = pytest.importorskip("fla.models.utils", reason="FLA's models (flash-linear-attention) are not installed")
    layer = build_layer(name, device).eval()
    x, _ = layer_inputs("batch", device)
    cache = utils.Cache()
    with torch.no_grad(), Ran() as ran:
        pieces = [layer(piece, past_key_values=cache, use_cache=True)[0] for piece in x.split([70, 10], dim=1)]
    assert ran.ops == [*([INFERENCE] if device == "cpu" else REGION), DECODING]
    whole = run_layer_naively(layer, x)["y"]
    exact = run_layer_naively(copy.deepcopy(layer).float(), x.float())["y"].double()
    error = relative_error(torch.cat(pieces, 1), exact)
    assert error < LAYER_RATIO[device] * relative_error(whole, exact)
