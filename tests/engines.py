"""Shared by test_vllm.py and test_sglang.py. Inputs of decoding and its fp64 recurrence are test_decode.py's."""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable

import pytest
import test_decode as decoding
import torch
from accuracy import BARS, relative_error
from cases import make_inputs, reference_of
from reference import Reference
from signatures import LAYERS, RECORD, parameters_of_function
from test_decode import BF16, FP32, Case
from torch.utils._python_dispatch import TorchDispatchMode

import flash_qla
from flash_qla.integrations import _engines

RECORDED = json.loads(RECORD.read_text())
# The engines' head dimensions and dtypes; gaps between slots, because pages hold other data too
SIZES = {"K": 128, "V": 128, "gap": 64}
DTYPES = pytest.mark.parametrize(
    ("device", "dtype", "state_dtype"),
    [
        ("cpu", FP32, FP32),
        ("cpu", BF16, BF16),
        pytest.param("cuda", BF16, FP32, marks=pytest.mark.gpu),
        pytest.param("cuda", BF16, BF16, marks=pytest.mark.gpu),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
STATE_DTYPES = pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
# Largest distance of two kernels on bf16 inputs: each may be a bar away from the truth.
APART = 2 * BARS[BF16]


def theirs(path: str, name: str) -> Callable:
    """The engine's own function; the engine is installed, or its kernels alone are on the path."""
    reason = f"{path} cannot be imported: {path.partition('.')[0]}, or its kernels alone, and Triton are not installed"
    return getattr(pytest.importorskip(path, reason=reason, exc_type=ImportError), name)


def moved(arguments: dict, device: str) -> dict:
    """Copies on the device, with the same strides."""

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return {name: move(x) for name, x in arguments.items()}


def indices(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def update_inputs(inputs: dict) -> dict:
    """Arguments of fused_sigmoid_gating_delta_rule_update that both engines share.

    q, k and v are parts of one tensor, as the convolution returns them.
    """
    names = ("q", "k", "v")
    mixed = torch.cat([inputs[name].flatten(2) for name in names], -1)
    parts = mixed.split([inputs[name].shape[2:].numel() for name in names], -1)
    arguments = {name: part.unflatten(-1, inputs[name].shape[2:]) for name, part in zip(names, parts, strict=True)}
    arguments |= {name: inputs[name].flatten(0, 1) for name in ("a", "b")}
    return arguments | {name: inputs[name] for name in ("A_log", "dt_bias", "cu_seqlens", "use_qk_l2norm_in_kernel")}


def expected_of(inputs: dict, slots: torch.Tensor, null_index: int, **options) -> tuple:
    """The results in fp64 of sequences that start from these slots.

    Returns:
        o: zero for sequences without a slot.
        states: of each sequence, the initial one and those after its tokens.
        is_real: [N], whether a sequence has a slot.
    """
    N = len(decoding.extents(inputs))
    slots, accepted = slots[:N], options.get("num_accepted_tokens")
    first = slots if slots.dim() == 1 else slots[torch.arange(N), 0 if accepted is None else accepted[:N].long() - 1]
    is_real = first > null_index
    o, states = decoding.states_after_tokens({**inputs, "state_indices": first.clamp_min(0), **options})
    return o * tokens_of(inputs, is_real)[..., None, None], states, is_real


def tokens_of(inputs: dict, of: torch.Tensor) -> torch.Tensor:
    """[B, T], bool: the tokens of these sequences."""
    mask = torch.zeros(inputs["q"].shape[:2], dtype=torch.bool)
    for (row, begin, end), is_selected in zip(decoding.extents(inputs), of, strict=True):
        mask[row, begin:end] = is_selected
    return mask


def check_beside(ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> None:
    """The same slots were written, with nearly the same states. The dimensions before the last three are slots."""
    ours, theirs, before = (x.cpu().flatten(0, -4) for x in (ours, theirs, before))
    changed = [(x != before).flatten(1).any(1) for x in (ours, theirs)]
    assert torch.equal(*changed)
    if changed[0].any():
        assert relative_error(ours[changed[0]], theirs[changed[0]].double()) < APART


def packed_call(slots: list[int], dtype: torch.dtype, state_dtype: torch.dtype, **options) -> tuple[dict, dict]:
    """Inputs of test_decode.py, and an engine's arguments for them, for one token of each sequence."""
    case = Case(B=len(slots), dtype=dtype, gate_dtype=dtype, state_dtype=state_dtype, **SIZES, **options)
    inputs = decoding.make_inputs(case)
    packed = decoding.packed(inputs, one_token=True)
    arguments = {x: packed[x] for x in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "use_qk_l2norm_in_kernel")} | {
        "scale": SIZES["K"] ** -0.5,
        "initial_state": inputs["state_pool"],
        "out": torch.full_like(inputs["v"], 7.0),
        "ssm_state_indices": indices(slots),
    }
    return inputs, arguments


def check_packed_decode(function: Callable, device: str, inputs: dict, arguments: dict, null_index: int) -> None:
    slots = arguments["ssm_state_indices"]
    expected, states, is_real = expected_of(inputs, slots, null_index)
    call = moved(arguments, device)
    out, pool = function(**call)
    assert out is call["out"] and pool is call["initial_state"]
    written = {slots[n].item(): after[-1] for n, after in enumerate(states) if is_real[n]}
    decoding.check({"state_pool": pool.cpu()}, written, out.cpu(), expected, inputs["state_pool"])


def check_packed_decode_beside(ours: Callable, theirs: Callable, device: str, arguments: dict) -> None:
    calls = [moved(arguments, device) for _ in range(2)]
    (o, pool), (their_o, their_pool) = (f(**call) for f, call in zip((ours, theirs), calls, strict=True))
    assert o.dtype == their_o.dtype and relative_error(o, their_o.double()) < APART
    check_beside(pool, their_pool, arguments["initial_state"])


def prefill_inputs(case, device: str, **states: torch.Tensor) -> tuple[dict, Reference]:
    """Arguments of chunk_gated_delta_rule that engines give, and the results in fp64. States are V-first."""
    assert case.state_v_first
    inputs = make_inputs(case, device) | states
    expected = reference_of(inputs)
    for name in ("state_v_first", "auto_cp"):
        del inputs[name]
    return inputs, expected


def check_refuses(function: Callable, arguments: dict, pool: torch.Tensor, change: dict) -> None:
    """The message names the argument, the last one of `change`, and nothing is written."""
    before = pool.clone()
    with pytest.raises(NotImplementedError, match=re.escape(f"{list(change)[-1]} is ")):
        function(**arguments | change)
    assert torch.equal(pool, before)


# What layers pass


def recorded_calls(integration: types.ModuleType) -> list:
    """Parameters of a test: our function with a release's signature, and a call that layers of the release make."""
    engine, releases_by_call = engine_of(integration), {}
    for release in RECORDED[engine]:
        for path in LAYERS[engine]:
            for name, calls in release["signatures"][path].items():
                for call in calls or ():
                    key = (path.removesuffix(".py").replace("/", "."), name, call)
                    key = (*key, signature_of(release["signatures"], name))
                    releases_by_call.setdefault(key, []).extend(release["releases"])
    functions = integration._replacement.functions
    return [
        pytest.param(
            next(x for x in functions[path][name] if x and ", ".join(parameters_of_function(x)) == signature),
            call,
            id=f"{name} of {releases[0]} to {releases[-1]}",
        )
        for (path, name, call, signature), releases in releases_by_call.items()
    ]


def passed(call: str, names: dict) -> dict:
    """The arguments of a call, whose text stands in a layer, where these names have these values."""
    return eval(call, {call.partition("(")[0]: dict}, names)


def longer(x: torch.Tensor, rows: int = 3) -> torch.Tensor:
    """More rows, as engines have for other tokens of a step and for padding: no sequence may read them."""
    return torch.cat([x, x[-1:].expand(rows, *x.shape[1:])])


# The convolution before a prefill


# Without one of these tensors an engine's own causal_conv1d_fn takes the call
CONVOLUTION_TENSORS = ("conv_states", "query_start_loc", "cache_indices")


def convolution_call(null_index: int, columns: int = 3) -> dict:
    """Arguments of the engines' causal_conv1d_fn, by its names: rows that are slices of a projection, windows with
    tokens before channels, and more slots and flags than sequences."""
    D, lengths, slots = 24, (5, 0, 70, 3, 1), [7, 3, null_index, 9, 4]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "x": randn(sum(lengths), D + 8)[:, :D].T,
        "weight": randn(D, 4),
        "bias": randn(D),
        "conv_states": randn(12, columns, D).mT,
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
        "cache_indices": longer(indices(slots)),
        "has_initial_state": longer(torch.tensor([True, True, True, False, True])),
    }


def check_convolution(function: Callable, device: str, arguments: dict, null_index: int, call: dict) -> None:
    """`call`: the arguments as a layer passes them, with the tensors of `arguments`."""
    arguments = moved(arguments, device)
    tensors = {id(x): moved({"x": x}, device)["x"] for x in call.values() if torch.is_tensor(x)}
    pool, slots = arguments["conv_states"], arguments["cache_indices"].tolist()[:5]
    flags = arguments["has_initial_state"].tolist()
    starts = [slot > null_index and flag for slot, flag in zip(slots, flags, strict=False)]
    initial = torch.stack([pool[s] if has else torch.zeros_like(pool[0]) for s, has in zip(slots, starts, strict=True)])
    bias = None if call.get("bias", True) is None else arguments["bias"]
    y, windows = flash_qla.causal_conv1d(
        arguments["x"].T[None], arguments["weight"], bias, initial_state=initial, output_final_state=True,
        cu_seqlens=arguments["query_start_loc"],
    )  # fmt: skip
    expected = pool.clone()
    for n, slot in enumerate(slots):
        if slot > null_index:
            expected[slot] = windows[n]
    call = {name: tensors.get(id(x), x) for name, x in call.items()}
    actual = function(**call)
    assert actual.shape == arguments["x"].shape and torch.equal(actual, y[0].T)
    assert torch.equal(call["conv_states"], expected)


def check_convolution_of_the_engine(integration: types.ModuleType, arguments: dict, monkeypatch, caplog) -> None:
    """The engine's own function takes a call on wider windows, and the log says so once."""
    engine = engine_of(integration)
    with pytest.raises(NotImplementedError, match="windows have 5 columns"):
        integration.causal_conv1d_fn(**arguments)
    modules = stand_ins(engine, monkeypatch)
    integration.use_flash_qla()
    replaced = [vars(x)["causal_conv1d_fn"] for x in modules.values() if "causal_conv1d_fn" in vars(x)]
    with caplog.at_level("INFO", f"{engine}.flash_qla"):
        assert [function(**arguments) for function in replaced * 2] == ["theirs"] * 2 * len(replaced)
    integration.restore()
    (message,) = [x for x in caplog.messages if "its own" in x]
    assert message.startswith(f"{engine} runs its own causal_conv1d_fn: windows have 5 columns for 4 taps")


# What reaches the ops


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "flash_qla":
            schema = func._schema
            arguments = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
            arguments |= dict(zip([x.name for x in schema.arguments], args, strict=False)) | kwargs
            for name, x in arguments.items():
                if isinstance(x, torch.Tensor):
                    is_read = name not in ("out", "h")  # of those only the memory counts
                    arguments[name] = x.clone() if is_read else (x.shape, x.dtype)
            self.calls.append((schema.name.removeprefix("flash_qla::"), arguments))
        return func(*args, **kwargs)


def op_call(function: Callable, arguments: dict) -> tuple[str, dict]:
    """The op that the function calls, once, and all of its arguments as they were before."""
    with torch.inference_mode(), _Recorder() as recorder:
        function(**moved(arguments, "cpu"))
    (call,) = recorder.calls
    return call


def check_effects(function: Callable, arguments: dict, effects: dict[str, tuple[object, str]], elsewhere: str) -> None:
    """Each argument reaches the op.

    Args:
        effects: argument -> (another value, the arguments of the op that it changes).
        elsewhere: arguments that other tests show.
    """
    assert sorted([*effects, *elsewhere.split()]) == sorted(inspect.signature(function).parameters)
    op, before = op_call(function, arguments)
    for name, (value, expected) in effects.items():
        other, after = op_call(function, arguments | {name: value})
        changed = {x for x in before if not _same(before[x], after[x])}
        assert other == op and changed == set(expected.split()), (name, changed)


def _same(x: object, y: object) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and x == y


def halved(arguments: dict, names: str, of_op: dict[str, str] | None = None) -> dict[str, tuple[object, str]]:
    """Effects of other numbers in these tensors. of_op: names that differ in the op."""
    return {name: (arguments[name] / 2, (of_op or {}).get(name, name)) for name in names.split()}


def convolution_effects(arguments: dict) -> dict[str, tuple[object, str]]:
    """Effects of the arguments of convolution_call. Slots and flags beyond those of the sequences have none."""
    pairs = {"conv_states": "state_pool"}
    slots, flags = arguments["cache_indices"], arguments["has_initial_state"]
    return halved(arguments, "x weight bias conv_states", pairs) | {
        "query_start_loc": (indices([0, 5, 10, 70, 74, 79]), "cu_seqlens"),
        "cache_indices": (slots[:5].flip(0), "state_indices"),
        "has_initial_state": (~flags[:5], "has_initial_state"),
        "activation": (None, "use_silu"),
    }


# Replacing functions


# The name in a module of layers -> the function's own, where they differ by more than a prefix
FUNCTION_OF = {"fused_recurrent_gdn_replayssm_decode": "fused_recurrent_linear_replayssm_decode"}


def signature_of(signatures: dict, name: str) -> str:
    """Of the function with this name in a module of layers."""
    return signatures[FUNCTION_OF.get(name, name.removeprefix("fla_"))]


def sources_of(engine: str, signatures: dict) -> dict[str, str]:
    """{module: its source}: stand-ins for the modules of a release's layers, by its entry in signatures.json."""
    sources = {}
    for path, names in LAYERS[engine].items():
        there = [name for name in names if signatures[path][name] is not None]
        of = {name: signature_of(signatures, name) for name in there}
        lines = [f"def {name}({of[name]}): return 'theirs'" for name in there]
        sources[path.removesuffix(".py").replace("/", ".")] = "\n".join(lines) + "\n"
    return sources


def stand_ins(engine: str, monkeypatch, release: int = -1) -> dict[str, types.ModuleType]:
    """The modules of a recorded release, the newest by default, in place of the engine's."""
    modules = {}
    for path, source in sources_of(engine, RECORDED[engine][release]["signatures"]).items():
        module = modules[path] = types.ModuleType(path)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, path, module)
    return modules


def functions_of(modules: dict[str, types.ModuleType], replacement: _engines.Replacement) -> list[Callable | None]:
    return [getattr(modules[path], name, None) for path, names in replacement.functions.items() for name in names]


def ours_of(function: Callable | None) -> Callable | None:
    """flash_qla's function of one that an engine has, which may call the engine's own."""
    return getattr(function, _engines._OURS, function)


def engine_of(integration: types.ModuleType) -> str:
    return integration.__name__.rpartition(".")[2]


def check_use_and_restore(integration: types.ModuleType, monkeypatch) -> None:
    """Of each recorded release: our function has the signature of the engine's."""
    replacement, engine = integration._replacement, engine_of(integration)
    for release in range(len(RECORDED[engine])):
        modules = stand_ins(engine, monkeypatch, release)
        before = functions_of(modules, replacement)
        candidates = [x for functions in replacement.functions.values() for x in functions.values()]
        for _ in range(2):
            integration.use_flash_qla()
            now = functions_of(modules, replacement)
            assert all(ours_of(x) in ours for x, ours in zip(now, candidates, strict=True))
            for ours, theirs in zip(now, before, strict=True):
                assert ours is theirs is None or _engines._parameters(ours) == _engines._parameters(theirs)
        for _ in range(2):
            integration.restore()
            assert functions_of(modules, replacement) == before


def with_another_default(function: Callable) -> Callable:
    signature = inspect.signature(function)
    optional = next(x for x in signature.parameters.values() if x.default is not x.empty)
    changed = signature.parameters | {optional.name: optional.replace(default="another")}

    def other(): ...

    other.__signature__ = signature.replace(parameters=list(changed.values()))
    return other


def check_other_releases(integration: types.ModuleType, monkeypatch) -> None:
    """Nothing changes if the last function has other arguments or is missing, or without the engine."""
    replacement = integration._replacement
    modules = stand_ins(engine_of(integration), monkeypatch)
    *before, _ = functions_of(modules, replacement)
    path, functions = list(replacement.functions.items())[-1]
    name = list(functions)[-1]

    def check_raises(error: type, text: str) -> None:
        with pytest.raises(error, match=re.escape(text)):
            integration.use_flash_qla()
        assert functions_of(modules, replacement)[:-1] == before

    setattr(modules[path], name, lambda q, k: None)
    check_raises(RuntimeError, f"{path}.{name} is (q, k)")
    setattr(modules[path], name, with_another_default(functions[name][0]))
    check_raises(RuntimeError, f"{path}.{name} is (")
    delattr(modules[path], name)
    check_raises(RuntimeError, f"{path}.{name} is nothing")
    monkeypatch.setitem(sys.modules, path, None)
    check_raises(ImportError, path)
