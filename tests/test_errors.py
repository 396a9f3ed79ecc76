"""Wrong input raises before anything is launched, and says which argument, what was expected and what came."""

import inspect
import itertools
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import test_region
import torch
from cases import Case, make_gradients, make_inputs, on_meta, packed
from subprocesses import run_python

import flash_qla
from flash_qla.integrations import fla

pytestmark = pytest.mark.usefixtures("errors_change_nothing")

OPS = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=[*DEVICES, "meta"])
def device(request):
    """The fake implementations check meta tensors, as when a model is traced."""
    return request.param


def good(op: str, device: str, **case) -> dict:
    """Arguments that op accepts. For the backward, g and A need not be what a forward returned: nothing is computed."""
    if device == "meta":
        return on_meta(good(op, "cpu", **case))
    case = Case(**{"T": 64, **case})
    inputs = make_inputs(case, device)
    if op.endswith("_bwd"):
        A = inputs["q"].new_zeros((*inputs["beta"].shape, 64))
        inputs |= {"A": A, **make_gradients(case, device)}
        if case.use_gate_in_kernel:
            inputs["g_raw"] = inputs["g"]
    return inputs


def check_raises(op: str, inputs: dict, argument: str, *parts: str):
    """The message names op and argument, and holds every part."""
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] if inputs["q"].is_cuda else 0
    with pytest.raises(RuntimeError) as error:
        getattr(flash_qla, op)(**inputs)
    message = str(error.value)
    assert f"flash_qla::{op}:" in message
    assert re.search(rf"\b{argument}\b", message), message
    for part in ("expected", *parts):
        assert part in message, message
    if inputs["q"].is_cuda:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations, "raised after an allocation"


def replaced(name, make):
    """An edit that replaces one argument by make(argument)."""
    return lambda inputs: {**inputs, name: make(inputs[name])}


# Fault -> (the edit, the argument named, texts that the message must hold). Inputs have B=1, T=64, H_k=2,
# H_v=4, K=V=128.
WRONG = {
    "q rank": (replaced("q", lambda x: x[0]), "q", ["3", "[64, 2, 128]", "4"]),
    "k rank": (replaced("k", lambda x: x[0]), "k", ["[64, 2, 128]", "[1, 64, 2, 128]"]),
    "max_seqlen": (lambda inputs: {**inputs, "max_seqlen": -1}, "max_seqlen", ["-1", "at least 0"]),
    "v rank": (replaced("v", lambda x: x[None]), "v", ["5", "[1, 1, 64, 4, 128]", "4"]),
    "g rank": (replaced("g", lambda x: x[..., None]), "g", ["[1, 64, 4, 1]", "[1, 64, 4]"]),
    "beta rank": (replaced("beta", lambda x: x[0]), "beta", ["[64, 4]", "[1, 64, 4]"]),
    "k heads": (replaced("k", lambda x: x.repeat(1, 1, 2, 1)), "k", ["[1, 64, 4, 128]", "[1, 64, 2, 128]"]),
    "k head dim": (replaced("k", lambda x: x[..., :64]), "k", ["[1, 64, 2, 64]", "[1, 64, 2, 128]"]),
    "k tokens": (replaced("k", lambda x: x[:, :63]), "k", ["[1, 63, 2, 128]", "[1, 64, 2, 128]"]),
    "v tokens": (replaced("v", lambda x: x[:, :63]), "v", ["[1, 63, 4, 128]", "[1, 64, 4, 128]"]),
    "v batch": (replaced("v", lambda x: x.repeat(2, 1, 1, 1)), "v", ["[2, 64, 4, 128]", "[1, 64, 4, 128]"]),
    "v heads not a multiple": (replaced("v", lambda x: x[:, :, :3]), "v", ["3", "multiple", "2"]),
    "no v heads": (replaced("v", lambda x: x[:, :, :0]), "v", ["0", "multiple", "2"]),
    "heads first": (
        lambda inputs: {**inputs, **{name: inputs[name].transpose(1, 2) for name in ("q", "k", "v")}},
        "v",
        ["[1, 4, 64, 128]", "[1, 2, 64, 128]"],
    ),
    "g heads": (replaced("g", lambda x: x[..., :2]), "g", ["[1, 64, 2]", "[1, 64, 4]"]),
    "g tokens": (replaced("g", lambda x: x[:, :1]), "g", ["[1, 1, 4]", "[1, 64, 4]"]),
    "g heads first": (replaced("g", lambda x: x.transpose(1, 2)), "g", ["[1, 4, 64]", "[1, 64, 4]"]),
    "beta heads": (replaced("beta", lambda x: x[..., :2]), "beta", ["[1, 64, 2]", "[1, 64, 4]"]),
    "q integer": (replaced("q", lambda x: x.int()), "q", ["int32", "bfloat16"]),
    "k dtype": (replaced("k", lambda x: x.half()), "k", ["float16", "bfloat16"]),
    "v dtype": (replaced("v", lambda x: x.float()), "v", ["float32", "bfloat16"]),
    "g integer": (replaced("g", lambda x: x.long()), "g", ["int64", "float32"]),
    "beta bool": (replaced("beta", lambda x: x > 0), "beta", ["ool", "float32"]),
    "state count": (
        replaced("initial_state", lambda x: x.repeat(2, 1, 1, 1)),
        "initial_state",
        ["[2, 4, 128, 128]", "[1, 4, 128, 128]"],
    ),
    "state rank": (replaced("initial_state", lambda x: x[0]), "initial_state", ["[4, 128, 128]", "[1, 4, 128, 128]"]),
    "state heads": (
        replaced("initial_state", lambda x: x[:, :2]),
        "initial_state",
        ["[1, 2, 128, 128]", "[1, 4, 128, 128]"],
    ),
    "state integer": (replaced("initial_state", lambda x: x.int()), "initial_state", ["int32", "float32"]),
}

PACKED = {"lengths": (60, 4)}
WRONG_VARLEN = {
    "cu_seqlens dtype": (replaced("cu_seqlens", lambda x: x.float()), "cu_seqlens", ["float32", "int32", "int64"]),
    "cu_seqlens int16": (replaced("cu_seqlens", lambda x: x.short()), "cu_seqlens", ["int32", "int64"]),
    "cu_seqlens rank": (replaced("cu_seqlens", lambda x: x[None]), "cu_seqlens", ["2", "[1, 3]", "1"]),
    "cu_seqlens scalar": (replaced("cu_seqlens", lambda x: x[0]), "cu_seqlens", ["0", "[]", "1"]),
    "cu_seqlens empty": (replaced("cu_seqlens", lambda x: x[:0]), "cu_seqlens", ["[0]"]),
    "state for the batch": (
        replaced("initial_state", lambda x: x[:1]),
        "initial_state",
        ["[1, 4, 128, 128]", "[2, 4, 128, 128]"],
    ),
}


# The backward alone
WRONG_GRADIENT = {
    "A rank": (replaced("A", lambda x: x[0]), "A", ["[64, 4, 64]", "[1, 64, 4, 64]"]),
    "A heads": (replaced("A", lambda x: x[:, :, :2]), "A", ["[1, 64, 2, 64]", "[1, 64, 4, 64]"]),
    "A of another chunk size": (replaced("A", lambda x: x[..., :32]), "A", ["[1, 64, 4, 32]", "[1, 64, 4, 64]"]),
    "A dtype": (replaced("A", lambda x: x.float()), "A", ["float32", "bfloat16"]),
    "A integer": (replaced("A", lambda x: x.int()), "A", ["int32", "bfloat16"]),
    "do rank": (replaced("do", lambda x: x[0]), "do", ["[64, 4, 128]", "[1, 64, 4, 128]"]),
    "do heads first": (replaced("do", lambda x: x.transpose(1, 2)), "do", ["[1, 4, 64, 128]", "[1, 64, 4, 128]"]),
    "do tokens": (replaced("do", lambda x: x[:, :63]), "do", ["[1, 63, 4, 128]", "[1, 64, 4, 128]"]),
    "do head dim": (replaced("do", lambda x: x[..., :64]), "do", ["[1, 64, 4, 64]", "[1, 64, 4, 128]"]),
    "do integer": (replaced("do", lambda x: x.int()), "do", ["int32", "float32"]),
    "dht count": (replaced("dht", lambda x: x.repeat(2, 1, 1, 1)), "dht", ["[2, 4, 128, 128]", "[1, 4, 128, 128]"]),
    "dht rank": (replaced("dht", lambda x: x[0]), "dht", ["[4, 128, 128]", "[1, 4, 128, 128]"]),
    "dht heads": (replaced("dht", lambda x: x[:, :2]), "dht", ["[1, 2, 128, 128]", "[1, 4, 128, 128]"]),
    "dht integer": (replaced("dht", lambda x: x.int()), "dht", ["int32", "float32"]),
    "neither g nor g_raw": (replaced("g", lambda x: None), "g_raw", ["None", "g of the forward"]),
    "no sums": (
        lambda inputs: {**inputs, "g": None, "A": None, "g_raw": inputs["g"][:, :5]},
        "g_raw",
        ["[1, 5, 4]", "[1, 64, 4]"],
    ),
    "g_raw without the gate": (lambda inputs: {**inputs, "g_raw": inputs["g"]}, "g_raw", ["use_gate_in_kernel"]),
}


# Both activations inside
WRONG_INSIDE = {
    "no A_log": (replaced("A_log", lambda x: None), "A_log", ["None", "[H_v]", "use_gate_in_kernel"]),
    "A_log heads": (replaced("A_log", lambda x: x[:2]), "A_log", ["[2]", "[4]", "[H_v]"]),
    "A_log rank": (replaced("A_log", lambda x: x[None]), "A_log", ["[1, 4]", "[4]"]),
    "A_log integer": (replaced("A_log", lambda x: x.int()), "A_log", ["int32", "float32"]),
    "dt_bias heads": (replaced("dt_bias", lambda x: x.repeat(2)), "dt_bias", ["[8]", "[4]", "[H_v]"]),
    "dt_bias integer": (replaced("dt_bias", lambda x: x.long()), "dt_bias", ["int64", "float32"]),
    "raw g integer": (replaced("g", lambda x: x.int()), "g", ["int32", "float32"]),
    "raw g heads": (replaced("g", lambda x: x[..., :2]), "g", ["[1, 64, 2]", "[1, 64, 4]"]),
    "raw beta integer": (replaced("beta", lambda x: x.int()), "beta", ["int32", "float32"]),
}


def rates(inputs: dict) -> torch.Tensor:
    return torch.zeros(4, device=inputs["q"].device)


WRONG_OUTSIDE = {
    "A_log": (lambda x: {**x, "A_log": rates(x)}, "A_log", ["None", "use_gate_in_kernel"]),
    "dt_bias": (lambda x: {**x, "dt_bias": rates(x)}, "dt_bias", ["None", "use_gate_in_kernel"]),
    "the gate alone": (lambda x: {**x, "use_gate_in_kernel": True}, "A_log", ["None", "[H_v]"]),
    "the gate with a bias only": (
        lambda x: {**x, "use_gate_in_kernel": True, "dt_bias": rates(x)},
        "A_log",
        ["None", "[H_v]"],
    ),
    "allow_neg_eigval": (lambda x: {**x, "allow_neg_eigval": True}, "allow_neg_eigval", ["use_beta_sigmoid_in_kernel"]),
}

# The backward alone, with the gate inside
WRONG_RAW_GATE = {
    "g_raw none": (replaced("g_raw", lambda x: None), "g_raw", ["None", "[B, T, H_v]", "use_gate_in_kernel"]),
    "g_raw rank": (replaced("g_raw", lambda x: x[0]), "g_raw", ["[64, 4]", "[1, 64, 4]"]),
    "g_raw heads": (replaced("g_raw", lambda x: x[..., :2]), "g_raw", ["[1, 64, 2]", "[1, 64, 4]"]),
    "g_raw integer": (replaced("g_raw", lambda x: x.int()), "g_raw", ["int32", "float32"]),
}
GATE = {"use_gate_in_kernel": True}
# op, name of the fault, options of the case, the fault
ALL_WRONG = [
    (op, name, options, fault)
    for ops, options, faults in (
        (OPS, {}, WRONG | WRONG_OUTSIDE),
        (OPS, PACKED, WRONG_VARLEN),
        (OPS, GATE | {"use_beta_sigmoid_in_kernel": True}, WRONG_INSIDE),
        (OPS[2:], {}, WRONG_GRADIENT),
        (OPS[2:], GATE, WRONG_RAW_GATE),
    )
    for op in ops
    for name, fault in faults.items()
]


@pytest.mark.parametrize(("op", "name", "options", "fault"), ALL_WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_input(device, op, name, options, fault):
    edit, argument, parts = fault
    check_raises(op, edit(good(op, device, **options)), argument, *parts)


@pytest.mark.parametrize("op", OPS)
def test_heads_first(device, op):
    """The error names q's shape and the order of dimensions, for q, k and v, for them without the gates, and for k."""
    right = good(op, device)
    orders = "because q has shape {}: tensors are [B, T, H, D], tokens before heads"
    q, k, v = (right[name].transpose(1, 2) for name in ("q", "k", "v"))
    check_raises(op, right | {"q": q, "k": k, "v": v}, "v", orders.format("[1, 2, 64, 128]"))
    check_raises(op, right | {"k": k}, "k", orders.format("[1, 64, 2, 128]"))
    gates = {"q": v, "k": v, "v": v} | ({"do": right["do"].transpose(1, 2)} if "do" in right else {})
    check_raises(op, right | gates, "g", "[1, 4, 64]", orders.format("[1, 4, 64, 128]"))


def test_final_state_gradient_for_the_batch(device):
    """The number of states is that of the sequences of cu_seqlens."""
    inputs = good("chunk_gated_delta_rule_bwd", device, lengths=(60, 4), initial_state=None)
    inputs["dht"] = inputs["dht"][:1]
    check_raises("chunk_gated_delta_rule_bwd", inputs, "dht", "[1, 4, 128, 128]", "[2, 4, 128, 128]")


@pytest.mark.parametrize("name", ("beta", "do"))
def test_none_for_what_the_backward_needs(name):
    inputs = good("chunk_gated_delta_rule_bwd", "cpu", T=5)
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{name}\b"):
        flash_qla.chunk_gated_delta_rule_bwd(**{**inputs, name: None})


@pytest.mark.parametrize("op", OPS)
def test_batch_with_cu_seqlens(device, op):
    inputs = {**good(op, device, B=2), "cu_seqlens": torch.tensor([0, 64], device=device)}
    check_raises(op, inputs, "q", "2", "1", "cu_seqlens")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("empty", ((slice(None), slice(None), slice(0, 0)), (..., slice(0, 0))), ids=("heads", "dims"))
def test_no_key_heads_or_dims(device, op, empty):
    inputs = good(op, device, initial_state=None)
    inputs.update(q=inputs["q"][empty], k=inputs["k"][empty])
    check_raises(op, inputs, "q", str(list(inputs["q"].shape)))


@pytest.mark.parametrize(("op", "name"), [(op, "initial_state") for op in OPS] + [(OPS[2], "dht")])
def test_state_in_the_other_layout(op, name):
    """Shows where K != V, so on the CPU only."""
    inputs = good(op, "cpu", K=16, V=8)
    if name == "dht":
        inputs["initial_state"] = None
    check_raises(op, {**inputs, "state_v_first": True}, name, "[1, 4, 16, 8]", "[1, 4, 8, 16]", "state_v_first")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("offsets", "parts"),
    (
        ([1, 64], ["1", "0"]),
        ([-3, 64], ["-3", "0"]),
        ([0, 65], ["65", "64"]),
        ([0, 40, 20, 64], ["40", "20"]),
        ([0, -5, 64], ["-5"]),
        ([0, 2**40, 64], [str(2**40)]),
    ),
    ids=str,
)
def test_cu_seqlens_contents_on_cpu(op, offsets, parts):
    inputs = {**good(op, "cpu", initial_state=None, dht=None), "cu_seqlens": torch.tensor(offsets)}
    check_raises(op, inputs, "cu_seqlens", *parts)


def of_one_number(op: str, device: str, T: int, N: int | None = None, H_v: int = 1, B: int = 1) -> dict:
    """Arguments of any size in no memory."""

    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros((), dtype=dtype, device=device).expand(*shape)

    inputs = {name: zeros(B, T, H_v if name in ("v", "do") else 1, 8) for name in ("q", "k", "v", "do")}
    inputs |= {"g": zeros(B, T, H_v, dtype=torch.float32), "beta": zeros(B, T, H_v), "A": zeros(B, T, H_v, 64)}
    if N is not None:
        inputs["cu_seqlens"] = zeros(N + 1, dtype=torch.int32)
    if not op.endswith("_bwd"):
        del inputs["A"], inputs["do"]
    return inputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_more_than_32_bits_count(device, op):
    """Tokens and sequences are counted with 32 bits; elements are not (test_gpu_large.py)."""
    check_raises(op, of_one_number(op, device, T=2**31), "q", "1 x 2147483648 tokens", "2147483647")
    check_raises(op, of_one_number(op, device, T=2**30, B=2), "q", "2 x 1073741824 tokens", "2147483647")
    check_raises(op, of_one_number(op, device, T=64, N=2**31), "cu_seqlens", "2147483649 offsets", "2147483647")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_most_of_the_gpu(op):
    """The limits of a grid's dimensions and of the plan's rows."""
    many = of_one_number(op, "cuda", T=64, N=2**26)
    check_raises(op, many, "q", "64 tokens in 67108864 sequences", "2147483647", "64")
    check_raises(op, of_one_number(op, "cuda", T=1, H_v=65536), "v", "65536 heads", "65535")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in OPS for name in ("k", "v", "g", "beta", "initial_state", "cu_seqlens")]
    + [(OPS[2], name) for name in ("A", "do", "dht", "g_raw")]
    + [(op, name) for op in OPS for name in ("A_log", "dt_bias")],
)
def test_argument_on_the_cpu(op, name):
    inputs = good(op, "cuda", lengths=(60, 4), use_gate_in_kernel=True)
    inputs[name] = inputs[name].cpu()
    check_raises(op, inputs, name, "cpu", "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("K", "V", "argument", "got", "most"),
    ((264, 128, "q", 264, 256), (512, 512, "q", 512, 256), (36, 64, "q", 36, 256), (64, 520, "v", 520, 512)),
)
def test_head_dims_of_the_gpu(op, K, V, argument, got, most):
    check_raises(op, good(op, "cuda", K=K, V=V), argument, str(got), "a multiple of 8", str(most))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_dtypes_of_the_gpu(op, dtype):
    check_raises(op, good(op, "cuda", dtype=dtype), "q", str(dtype).removeprefix("torch."), "bfloat16", "float16")


# Errors inside PyTorch

FAILING = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from every_op import make_call

def fails(*_):
    raise RuntimeError("the reason")

call = make_call("gated_delta_rule_forward_begin", "cpu")
library = torch.library.Library("aten", "IMPL")
for operator in ("copy_", "fill_.Scalar", "zero_"):  # the last one that it calls first
    library.impl(operator, fails, "CPU")
    try:
        call()
    except RuntimeError as error:
        print(operator, "said", str(error).splitlines()[0], flush=True)
os._exit(0)
"""


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="PyTorch 2.13 passes it on")
def test_what_pytorch_says_is_passed_on():
    """An operator that fails below an op: its words, and not only which call it was."""
    lines = run_python(FAILING.format(tests=str(Path(__file__).parent)), FLASH_QLA_QUIET="1").splitlines()
    messages = dict(line.split(" said ") for line in lines if " said " in line)
    assert messages.keys() == {"copy_", "fill_.Scalar", "zero_"}
    assert all("the reason" in text and "API call failed" not in text for text in messages.values()), messages


# Arguments of other types. The functions look at nothing before a call, and explain after it.

FUNCTIONS = [x for name, x in vars(flash_qla).items() if name in flash_qla.__all__ and callable(x)]
FUNCTIONS.append(fla.fused_recurrent_gated_delta_rule)


def arguments_of(function, kind: type) -> list[str]:
    hints = typing.get_type_hints(function)
    return [x for x, hint in hints.items() if x != "return" and kind in (hint, *typing.get_args(hint))]


def minimal(function) -> dict:
    """Tensors for the arguments that have no default."""
    parameters = inspect.signature(function).parameters.values()
    required = [x.name for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    arguments = dict.fromkeys(required, torch.zeros(1, 3, 1, 8))
    if function is fla.fused_recurrent_gated_delta_rule:  # which ignores A_log without the gate
        arguments |= dict.fromkeys(("g", "A_log"), torch.zeros(1, 3, 1)) | {"use_gate_in_kernel": True}
    return arguments


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
def test_no_tensor_as_a_tensor(function):
    """Each argument."""
    names = [x for x in arguments_of(function, torch.Tensor) if x not in ("gk", "gv")]  # these are refused
    assert names[0] in ("q", "mixed_qkv", "mixed", "x", "o")
    for name, value in itertools.product(names, ([0, 3], (0, 3), np.zeros(3), 1.5)):
        text = rf"^{function.__name__}: {name} is of type {type(value).__name__}; pass a tensor on the device of"
        with pytest.raises(TypeError, match=text) as error:
            function(**minimal(function) | {name: value})
        assert error.value.__suppress_context__


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", (torch.jagged, torch.strided), ids=str)
def test_a_nested_tensor(function, layout):
    first, *_ = arguments = minimal(function)
    nested = torch.nested.nested_tensor([torch.zeros(3, 1, 8), torch.zeros(2, 1, 8)], layout=layout)
    expected = "cu_seqlens, such as" if "cu_seqlens" in inspect.signature(function).parameters else "a tensor of all"
    tensors = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    for changes in ({first: nested}, dict.fromkeys(tensors, nested)):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: {first} is a NestedTensor; pass .*{expected}"):
            function(**arguments | changes)


WITH_STATE_DTYPE = [x for x in FUNCTIONS if arguments_of(x, torch.dtype)]


@pytest.mark.parametrize("function", WITH_STATE_DTYPE, ids=lambda x: x.__name__)
def test_no_dtype_as_a_dtype(function):
    assert len(WITH_STATE_DTYPE) == 5 and arguments_of(function, torch.dtype) == ["state_dtype"]
    arguments = good("chunk_gated_delta_rule", "cpu", T=5)
    arguments = packed(arguments) if function is flash_qla.chunk_gated_delta_rule_packed else arguments
    arguments = test_region.make(test_region.Case(), "cpu")[0] if function is flash_qla.gated_delta_net else arguments
    for value, came in (("fp16", "'fp16'"), (np.float16, "<class 'numpy.float16'>"), (16, "16")):
        with pytest.raises(TypeError, match=f"^{function.__name__}: state_dtype is {came}, expected a torch.dtype"):
            function(**arguments, state_dtype=value)
    for value in (torch.int32, torch.float8_e8m0fnu, torch.bits8):  # the last two are unknown to the stable ABI
        with pytest.raises(RuntimeError, match=f"{function.__name__}: state_dtype is .*, expected bfloat16"):
            function(**arguments, state_dtype=value)


def test_an_error_of_the_op_stays():
    """Where the types are right."""
    with pytest.raises(RuntimeError, match=r"^flash_qla::chunk_gated_delta_rule: g has") as error:
        flash_qla.chunk_gated_delta_rule(**good("chunk_gated_delta_rule", "cpu", T=5) | {"g": torch.zeros(1)})
    assert error.value.__context__ is None


# The Python functions' keywords

KEYWORDS_WITHOUT_EFFECT = (
    ("head_first", False),
    ("head_first", 0),
    ("chunk_indices", None),
    ("chunk_indices", torch.tensor([[0, 0]])),
    ("chunk_size", None),
    ("chunk_size", 64),
    ("cu_seqlens_cpu", torch.tensor([0, 5])),
    ("cp_context", None),
    ("enable_fwd_cp_cache", False),
    ("force_intra_cp", False),
    ("transpose_state_layout", False),
)


@pytest.mark.parametrize(("name", "value"), KEYWORDS_WITHOUT_EFFECT, ids=str)
def test_other_libraries_keywords_that_change_nothing(name, value):
    inputs = good("chunk_gated_delta_rule", "cpu", T=5)
    expected = flash_qla.chunk_gated_delta_rule(**inputs)[0]
    assert torch.equal(flash_qla.chunk_gated_delta_rule(**inputs, **{name: value})[0], expected)


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("head_first", True),
        ("chunk_size", 32),
        ("chunk_size", torch.tensor(64)),
        ("cp_context", ...),
        ("force_intra_cp", True),
        ("transpose_state_layout", True),
        ("no_such_keyword", None),
        ("no_such_keyword", 1),
    ),
    ids=str,
)
def test_keywords_that_would_change_the_result_raise(name, value):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=name) as raised:
        flash_qla.chunk_gated_delta_rule(**good("chunk_gated_delta_rule", "cpu", T=5), **{name: value})
    assert not torch.is_tensor(value) or f"{name} is of type Tensor, expected" in str(raised.value)


@pytest.mark.parametrize(
    ("function", "keyword", "meant"),
    (
        (flash_qla.chunk_gated_delta_rule, "output_final_states", "output_final_state"),
        (flash_qla.chunk_gated_delta_rule, "chunk_indexes", "chunk_indices"),
        (fla.chunk_gated_delta_rule, "use_gate_in_kernels", "use_gate_in_kernel"),
        (fla.chunk_gated_delta_rule, "headfirst", "head_first"),
        (fla.fused_recurrent_gated_delta_rule, "initial_states", "initial_state"),
        (fla.build_cp_context, "kernel_size", "conv1d_kernel_size"),
    ),
    ids=lambda x: getattr(x, "__module__", x),
)
def test_keywords_that_are_nearly_right(function, keyword, meant):
    arguments = good("chunk_gated_delta_rule", "cpu", T=5)
    required = {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}
    if function is fla.build_cp_context:
        required = {"cu_seqlens": torch.tensor([0, 5]), "group": None}
    expected = rf"^{function.__name__}\(\) got an unexpected keyword argument '{keyword}'. Did you mean '{meant}'\?$"
    with pytest.raises(TypeError, match=expected):
        function(**required, **{keyword: None})


@pytest.mark.parametrize("op", OPS[1:])
def test_unknown_keywords_of_the_low_level_functions_raise(op):
    with pytest.raises(TypeError, match="no_such_keyword"):
        getattr(flash_qla, op)(**good(op, "cpu", T=5), no_such_keyword=None)
