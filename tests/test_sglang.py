"""SGLang's calls through flash_qla: against the recurrence in fp64, and beside SGLang's own kernels."""

import sys
import types
from types import SimpleNamespace

import engines
import pytest
import test_decode as decoding
import torch
from accuracy import BARS, relative_error
from cases import Case as PrefillCase
from engines import APART, DTYPES, SIZES, STATE_DTYPES, indices
from test_decode import BF16, FP32, Case

from flash_qla.integrations import sglang

KERNELS = "sglang.kernels.ops.attention"
FUNCTIONS = {
    "chunk_gated_delta_rule": f"{KERNELS}.fla.chunk",
    "fused_recurrent_gated_delta_rule_packed_decode": f"{KERNELS}.fla.fused_recurrent",
    "fused_sigmoid_gating_delta_rule_update": f"{KERNELS}.linear.fused_sigmoid_gating_recurrent",
    "fused_recurrent_linear_replayssm_decode": f"{KERNELS}.linear.fused_recurrent_linear_replayssm",
}
CHUNK, PACKED, UPDATE, REPLAY = FUNCTIONS


# One token of each sequence, packed

ONE_TOKEN = {"plain": [5, 0, 7], "no slot": [5, -1, 7, -1], "no slots at all": [-1, -1]}


@pytest.mark.parametrize(("name", "l2norm"), [*((name, True) for name in ONE_TOKEN), ("plain", False)])
@DTYPES
def test_packed_decode(device, dtype, state_dtype, name, l2norm):
    inputs, arguments = engines.packed_call(ONE_TOKEN[name], dtype, state_dtype, l2norm=l2norm)
    function = sglang.fused_recurrent_gated_delta_rule_packed_decode
    engines.check_packed_decode(function, device, inputs, arguments, null_index=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_TOKEN)
@STATE_DTYPES
def test_packed_decode_beside(state_dtype, name):
    _, arguments = engines.packed_call(ONE_TOKEN[name], BF16, state_dtype)
    function = engines.theirs(FUNCTIONS[PACKED], PACKED)
    ours = sglang.fused_recurrent_gated_delta_rule_packed_decode
    engines.check_packed_decode_beside(ours, function, "cuda", arguments)


# One token of each sequence on states that lag

PACKED_ARGUMENTS = (
    *("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices"),
    "use_qk_l2norm_in_kernel",
)


def replay_call(slots: list[int], dtype: torch.dtype, state_dtype: torch.dtype, l2norm: bool, L: int) -> dict:
    """The arguments as SGLang's layers pass them; caches have the dtype of the states."""
    inputs, arguments = engines.packed_call(slots, dtype, state_dtype, l2norm=l2norm)
    (pool_slots, H_v, V, K), H_k = inputs["state_pool"].shape, inputs["k"].shape[2]
    return arguments | {
        "d_cache": torch.zeros(pool_slots, H_v, L, V, dtype=state_dtype),
        "k_cache": torch.zeros(pool_slots, H_k, L, K, dtype=state_dtype),
        "g_cache": torch.zeros(pool_slots, H_v, L),
        "write_pos": torch.zeros(len(slots), dtype=torch.int32),
    }


def next_token(call: dict, step: int) -> dict:
    """Inputs of a step; without the l2norm its keys have unit length."""
    generator = torch.Generator().manual_seed(step)
    token = {x: torch.randn(call[x].shape, generator=generator) for x in ("mixed_qkv", "a", "b")}
    if not call["use_qk_l2norm_in_kernel"]:
        _, H_k, _, K = call["k_cache"].shape
        keys = token["mixed_qkv"][:, H_k * K : 2 * H_k * K].unflatten(1, (H_k, K))
        keys /= keys.norm(dim=-1, keepdim=True)
    return {name: x.to(call[name].device, call[name].dtype) for name, x in token.items()}


@pytest.mark.parametrize(("name", "l2norm"), [*((name, True) for name in ONE_TOKEN), ("plain", False)])
@DTYPES
def test_replay(device, dtype, state_dtype, name, l2norm):
    """As SGLang's packed decode in its tests: other tokens at each step, and a flush within the cycle."""
    L, steps, forced = 3, 8, 4
    call = engines.moved(replay_call(ONE_TOKEN[name], dtype, state_dtype, l2norm, L), device)
    packed = {x: y.clone() if torch.is_tensor(y) else y for x, y in call.items() if x in PACKED_ARGUMENTS}
    slots = [slot for slot in ONE_TOKEN[name] if slot >= 0]
    bar = 2 * max(decoding.BARS[dtype], decoding.BARS[state_dtype])  # each may be a bar away from the truth
    for step in range(steps):
        token = next_token(call, step)
        flush = torch.full_like(call["write_pos"], step == forced)
        out, pool = sglang.fused_recurrent_linear_replayssm_decode(
            **call | token | {"force_flush": flush if step == forced else None}
        )
        assert out is call["out"] and pool is call["initial_state"]
        expected, expected_pool = sglang.fused_recurrent_gated_delta_rule_packed_decode(**packed | token)
        if slots:
            assert relative_error(out, expected.double()) < bar
        else:
            assert not out.any()
        if slots and (call["write_pos"][0] == L - 1 or step == forced):
            assert relative_error(pool[slots], expected_pool[slots].double()) < bar
        call["write_pos"] = torch.where(flush != 0, 0, (call["write_pos"] + 1) % L)


@pytest.mark.gpu
@STATE_DTYPES
def test_replay_beside(state_dtype):
    """Each function with caches of its own."""
    function = engines.theirs(FUNCTIONS[REPLAY], REPLAY)
    arguments = replay_call([5, 0, 7], BF16, state_dtype, True, 4)
    arguments["initial_state"] = arguments["initial_state"].contiguous()
    calls = [engines.moved(arguments, "cuda") for _ in range(2)]
    for step in range(6):
        token = next_token(calls[0], step)
        write_pos = {"write_pos": torch.full((3,), step % 4, dtype=torch.int32, device="cuda")}
        (o, _), (their_o, _) = (
            f(**call | token | write_pos)
            for f, call in zip((sglang.fused_recurrent_linear_replayssm_decode, function), calls, strict=True)
        )
        assert relative_error(o, their_o.double()) < APART
        if step == 3:
            engines.check_beside(*(call["initial_state"] for call in calls), arguments["initial_state"])


def test_replay_refuses():
    arguments = replay_call([5, 0, 7], FP32, FP32, True, 4)
    function = sglang.fused_recurrent_linear_replayssm_decode
    engines.check_refuses(function, arguments, arguments["initial_state"], {"is_kda": True})


# Tokens and drafts

TREES = [[-1, 0, 0, 1], [5, 0, 1, 0], [0, 0, 0, 0], [-1, 0, 1, 2]]  # the first of each is not read
DRAFTS = {"disable_state_update": True, "intermediate_state_indices": [4, 2, 0, 3, 1], "cache_steps": 4}
UPDATES = {
    "plain": ((1, 1, 1), [5, 0, 7], {}),
    "no slot": ((1, 1, 1, 1), [5, -1, 7, 0], {}),
    "padded": ((1, 1, 0, 0), [5, 3, -1, -1, 9, 11], {}),
    "several tokens": ((3, 1, 4, 0), [5, -1, 7, 0], {}),
    "drafts": ((4, 4, 4), [5, 3, 0], DRAFTS),
    "drafts, ragged": ((3, 1, 4, 2), [5, 3, 0, 9], DRAFTS),
    "drafts, padded": ((4, 4, 4, 4), [5, 3, -1, -1, 8], DRAFTS),
    "drafts, not kept": ((4, 4), [5, 3], DRAFTS | {"intermediate_state_indices": [-1, 2]}),
    "drafts and the last state": ((3, 1, 4), [5, 3, 7], DRAFTS | {"disable_state_update": False}),
    "trees": ((4, 4, 4, 4), [5, 3, 0, 9], DRAFTS | {"retrieve_parent_token": TREES}),
    "trees, ragged": ((4, 2, 3, 1), [5, 3, 0, 9], DRAFTS | {"retrieve_parent_token": TREES}),
    "trees, padded": ((4, 4, 4, 4), [5, 3, -1, -1], DRAFTS | {"retrieve_parent_token": TREES}),
}


def update_arguments(inputs: dict, **options) -> dict:
    """The arguments as SGLang's layers pass them."""
    sglang_arguments = {"initial_state_source": inputs["state_pool"], "softplus_beta": 1.0, "softplus_threshold": 20.0}
    return engines.update_inputs(inputs) | sglang_arguments | {"is_kda": False, **options}


def update_call(name: str, dtype: torch.dtype, state_dtype: torch.dtype, padding: int) -> tuple[dict, dict]:
    lengths, slots, options = UPDATES[name]
    case = Case(lengths=lengths, padding=padding, dtype=dtype, gate_dtype=dtype, state_dtype=state_dtype, **SIZES)
    inputs = decoding.make_inputs(case)
    options = {option: indices(x) if isinstance(x, list) else x for option, x in options.items()}
    if "cache_steps" in options:
        options["intermediate_states_buffer"] = decoding.make_pool(case, 5, 4).contiguous()
    return inputs, update_arguments(inputs, initial_state_indices=indices(slots), **options)


def expected_of_update(inputs: dict, arguments: dict) -> tuple:
    options = {}
    if arguments.get("retrieve_parent_token") is not None:
        options["parents"] = arguments["retrieve_parent_token"].clone()
        options["parents"][:, 0] = -1
    return engines.expected_of(inputs, arguments["initial_state_indices"], null_index=-1, **options)


@pytest.mark.parametrize("name", UPDATES)
@DTYPES
def test_update(device, dtype, state_dtype, name):
    inputs, arguments = update_call(name, dtype, state_dtype, padding=2)
    check_update(sglang.fused_sigmoid_gating_delta_rule_update, device, inputs, arguments)


def check_update(function, device, inputs, arguments):
    expected, states, is_real = expected_of_update(inputs, arguments)
    call = engines.moved(arguments, device)
    o = function(**call)
    tables = {name: x for name, x in arguments.items() if torch.is_tensor(x) and not x.is_floating_point()}
    assert all(torch.equal(call[name].cpu(), x) for name, x in tables.items())  # they are the engine's
    slots = arguments["initial_state_indices"].tolist()
    written = {slots[n]: s[-1] for n, s in enumerate(states) if is_real[n] and len(s) > 1}
    if arguments.get("disable_state_update"):
        written = {}
    pool = call["initial_state_source"].cpu()
    decoding.check({"state_pool": pool}, written, o.cpu(), expected, inputs["state_pool"])
    if "cache_steps" in arguments:
        before = arguments["intermediate_states_buffer"].flatten(0, 1)
        rows = arguments["intermediate_state_indices"].tolist()
        kept = {
            4 * rows[n] + t: state
            for n, (_, *later) in enumerate(states)
            if is_real[n] and rows[n] >= 0
            for t, state in enumerate(later)
        }
        buffer = call["intermediate_states_buffer"].cpu().flatten(0, 1)
        decoding.check({"state_pool": buffer}, kept, o.cpu(), expected, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UPDATES)
@STATE_DTYPES
def test_update_beside(state_dtype, name):
    """Sequences without a slot are left out, because SGLang starts them from zero."""
    function = engines.theirs(FUNCTIONS[UPDATE], UPDATE)
    inputs, arguments = update_call(name, BF16, state_dtype, padding=0)
    _, _, is_real = expected_of_update(inputs, arguments)
    tokens = engines.tokens_of(inputs, is_real).to("cuda")
    calls = [engines.moved(arguments, "cuda") for _ in range(2)]
    o, their_o = (
        f(**call) for f, call in zip((sglang.fused_sigmoid_gating_delta_rule_update, function), calls, strict=True)
    )
    assert o.dtype == their_o.dtype and relative_error(o[tokens], their_o[tokens].double()) < APART
    pools = [call["initial_state_source"] for call in calls]
    engines.check_beside(*pools, arguments["initial_state_source"])
    if "cache_steps" in arguments:
        rows = arguments["intermediate_state_indices"][: len(is_real)][is_real].long()
        rows = rows[rows >= 0]
        buffers = [call["intermediate_states_buffer"].cpu()[rows] for call in calls]
        engines.check_beside(*buffers, arguments["intermediate_states_buffer"][rows])


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("with_tree", (False, True))
def test_rejected_drafts(device, with_tree):
    """Four drafts, of which some are accepted, and two tokens after those. The engine copies the state after the last
    accepted one to the pool."""
    last, dtype = [0, 2, 3], FP32 if device == "cpu" else BF16
    trees = [[-1, 0, 0, 1], [-1, 0, 0, 1], [-1, 0, 1, 1]] if with_tree else [[-1, 0, 1, 2]] * 3
    inputs = decoding.make_inputs(Case(B=3, T=6, dtype=dtype, **SIZES))
    parents = indices([[*tree, node, 4] for tree, node in zip(trees, last, strict=True)])
    expected, states = decoding.states_after_tokens(inputs | {"parents": parents})
    slots, pool = inputs["state_indices"], inputs["state_pool"]
    buffer = decoding.make_pool(Case(**SIZES), 3, 4)
    drafts = {
        "disable_state_update": True,
        "intermediate_states_buffer": buffer,
        "intermediate_state_indices": indices([2, 0, 1]),
        "cache_steps": 4,
        "retrieve_parent_token": indices(trees) if with_tree else None,
    }
    for begin, end, options in ((0, 4, drafts), (4, 6, {})):
        part = {x: inputs[x][:, begin:end].flatten(0, 1)[None] for x in ("q", "k", "v", "a", "b")}
        part |= {"state_pool": pool, "cu_seqlens": torch.arange(4, dtype=torch.int32) * (end - begin)}
        call = engines.moved(update_arguments(inputs | part, initial_state_indices=slots, **options), device)
        o = sglang.fused_sigmoid_gating_delta_rule_update(**call).cpu()
        assert relative_error(o.view(3, end - begin, *o.shape[2:]), expected[:, begin:end]) <= decoding.BARS[dtype]
        pool = call["initial_state_source"].cpu()
        if options:
            assert torch.equal(pool, inputs["state_pool"])
            pool[slots] = call["intermediate_states_buffer"].cpu()[[2, 0, 1], last]
    for n, slot in enumerate(slots.tolist()):
        assert relative_error(pool[slot], states[n][-1]) <= decoding.BARS[FP32]


@pytest.mark.parametrize(
    "change",
    [
        {"softplus_beta": 2.0},
        {"softplus_threshold": 10.0},
        {"initial_state_source": None},
        {"initial_state_indices": None},
        {"is_kda": True},
        {"lower_bound": -5.0},
        {"cache_ring": True},
        {"replayssm_rawv": torch.zeros(1)},
        {"replayssm_rawk": torch.zeros(1)},
        {"replayssm_g": torch.zeros(1)},
        {"replayssm_beta": torch.zeros(1)},
        {"match_cutedsl_decode": True},
        {"retrieve_parent_token": indices([[-1]] * 3), "disable_state_update": False},
    ],
    ids=lambda x: next(iter(x)),
)
def test_update_refuses(change):
    _, arguments = update_call("plain", FP32, FP32, padding=0)
    pool = arguments["initial_state_source"]
    engines.check_refuses(sglang.fused_sigmoid_gating_delta_rule_update, arguments, pool, change)


# Prefill

PREFILLS = {
    "plain": (
        PrefillCase(lengths=(70, 0, 64, 130), keys="raw", use_qk_l2norm_in_kernel=True, state_v_first=True),
        [5, 0, 7, 3],
    ),
    "no slot": (PrefillCase(lengths=(5, 70, 64, 3), state_v_first=True), [-1, 4, 0, -1]),
    "no slots at all": (PrefillCase(lengths=(5, 70), padding=9, state_v_first=True), [-1, -1]),
    "batched": (PrefillCase(B=2, T=70, H_v=6, state_v_first=True), [5, 2]),
    "nothing": (PrefillCase(lengths=(), padding=70, state_v_first=True), []),
}


def prefill_call(name: str, state_dtype: torch.dtype, device: str) -> tuple[dict, object]:
    case, slots = PREFILLS[name]
    slots = indices(slots)
    pool = decoding.make_pool(Case(H_v=case.H_v, state_dtype=state_dtype, **SIZES), 9)
    states = torch.where((slots >= 0)[:, None, None, None], pool[slots.clamp_min(0)], 0)
    inputs, expected = engines.prefill_inputs(case, device, initial_state=states.to(device))
    return inputs | engines.moved({"initial_state": pool, "initial_state_indices": slots}, device), expected


def without_slots(name: str, o: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero for the sequences without a slot."""
    case, slots = PREFILLS[name]
    o, h, token, chunk = o.clone(), h.clone(), 0, 0
    for slot, length in zip(slots, case.lengths or (), strict=False):
        end, chunk_end = token + length, chunk - -length // 64
        if slot < 0:
            o[:, token:end] = 0
            h[:, chunk:chunk_end] = 0
        token, chunk = end, chunk_end
    return o, h


@pytest.mark.parametrize("name", PREFILLS)
@STATE_DTYPES
@pytest.mark.parametrize("inplace_update", (True, False))
def test_chunk(device, name, state_dtype, inplace_update):
    arguments, expected = prefill_call(name, state_dtype, device)
    arguments |= {"inplace_update": inplace_update}
    arguments["initial_state_indices"] = torch.nn.functional.pad(arguments["initial_state_indices"], (0, 3))
    check_chunk(sglang.chunk_gated_delta_rule, name, arguments, expected)


def check_chunk(function, name, arguments, expected):
    slots = arguments["initial_state_indices"].tolist()[: len(expected.final_state)]
    pool = arguments["initial_state"]
    before, inplace_update = pool.clone(), arguments.get("inplace_update", True)
    o, nothing, h = function(**arguments)
    assert nothing is None and o.dtype == h.dtype == BF16
    for actual, exact in zip((o, h), without_slots(name, expected.o, expected.h), strict=True):
        assert relative_error(actual, exact) < BARS[BF16] if exact.any() else not actual.any()
    written = {slot: n for n, slot in enumerate(slots) if slot >= 0} if inplace_update else {}
    for slot, state in enumerate(pool):
        if slot in written:
            assert relative_error(state, expected.final_state[written[slot]]) < BARS[BF16]
        else:
            assert torch.equal(state, before[slot])


@pytest.mark.parametrize(
    "change",
    [{"head_first": True}, {"initial_state": None}, {"initial_state_indices": None}],
    ids=lambda x: next(iter(x)),
)
def test_chunk_refuses(change):
    arguments, _ = prefill_call("plain", FP32, "cpu")
    engines.check_refuses(sglang.chunk_gated_delta_rule, arguments, arguments["initial_state"], change)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("plain", "no slot"))
def test_chunk_beside(name):
    """A pool without gaps, which SGLang's function wants; h has rows of no sequence after the others."""
    function = engines.theirs(FUNCTIONS[CHUNK], CHUNK)
    arguments, _ = prefill_call(name, FP32, "cuda")
    before = arguments["initial_state"].contiguous()
    calls = [arguments | {"initial_state": before.clone()} for _ in range(2)]
    (o, _, h), (their_o, _, their_h) = (
        f(**call) for f, call in zip((sglang.chunk_gated_delta_rule, function), calls, strict=True)
    )
    their_o, their_h = without_slots(name, their_o, their_h)
    assert o.dtype == their_o.dtype and relative_error(o, their_o.double()) < APART
    assert h.dtype == their_h.dtype and relative_error(h[:, : their_h.shape[1]], their_h.double()) < APART
    engines.check_beside(*(call["initial_state"] for call in calls), before)


# Modes


def enable_the_mode(monkeypatch, how: str) -> None:
    """--enable-deterministic-inference, which sets the variable, and this mode in the process of a model."""
    if how == "in the process":
        module = types.ModuleType("sglang.srt.batch_invariant_ops")
        module.is_batch_invariant_mode_enabled = lambda: True
        monkeypatch.setitem(sys.modules, module.__name__, module)
    else:
        monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", how)


@pytest.mark.parametrize("inplace_update", (True, False))
@pytest.mark.parametrize(
    ("how", "expected"),
    [("1", True), ("true", True), ("in the process", True), ("0", False), ("False", False), ("", False)],
)
def test_deterministic_mode(how, expected, inplace_update, monkeypatch):
    arguments, _ = prefill_call("plain", FP32, "cpu")
    arguments["inplace_update"] = inplace_update
    _, call = engines.op_call(sglang.chunk_gated_delta_rule, arguments)
    assert not call["batch_invariant"]
    enable_the_mode(monkeypatch, how)
    _, call = engines.op_call(sglang.chunk_gated_delta_rule, arguments)
    assert call["batch_invariant"] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("how", ("1", "in the process"))
def test_same_bits_in_any_batch(how, monkeypatch):
    """A prompt alone, whose segments are others without the mode, and among fifteen."""
    enable_the_mode(monkeypatch, how)
    case = PrefillCase(lengths=(2048,) * 16, H_k=8, H_v=16, state_v_first=True)
    inputs, _ = engines.prefill_inputs(case, "cuda")
    pool, slots = inputs.pop("initial_state"), torch.arange(16, dtype=torch.int32, device="cuda")
    alone = inputs | {x: inputs[x][:, :2048] for x in ("q", "k", "v", "g", "beta")}
    alone |= {"cu_seqlens": inputs["cu_seqlens"][:2], "initial_state_indices": slots[:1]}
    pools = [pool.clone(), pool.clone()]
    o, _, h = sglang.chunk_gated_delta_rule(**alone, initial_state=pools[0])
    many, _, many_h = sglang.chunk_gated_delta_rule(**inputs, initial_state=pools[1], initial_state_indices=slots)
    assert torch.equal(o, many[:, :2048]) and torch.equal(h, many_h[:, : h.shape[1]])
    assert torch.equal(pools[0][0], pools[1][0])


# What layers pass


def step(call: str) -> tuple[dict, dict]:
    """Inputs of decoding, and the names of a layer; gates of more tokens, and more slots."""
    inputs, arguments = update_call("trees, ragged" if "cache_steps" in call else "plain", FP32, FP32, padding=0)
    return inputs, {name: arguments[name] for name in ("q", "k", "v", "A_log", "dt_bias")} | {
        "a": engines.longer(arguments["a"]),
        "b": engines.longer(arguments["b"]),
        "ssm_states": arguments["initial_state_source"],
        "cache_indices": engines.longer(arguments["initial_state_indices"]),
        "query_start_loc": arguments["cu_seqlens"],
        **{
            name: arguments.get(name)
            for name in (
                "intermediate_states_buffer",
                "intermediate_state_indices",
                "cache_steps",
                "retrieve_parent_token",
            )
        },
    }


def packed_step() -> tuple[dict, dict]:
    slots = [5, 0, 7]
    inputs, arguments = engines.packed_call(slots, FP32, FP32)
    names = {"ssm_states": "initial_state", "cache_indices": "ssm_state_indices"}
    namespace = arguments | {name: arguments[x] for name, x in names.items()}
    caches = replay_call(slots, FP32, FP32, True, 4)
    namespace |= {f"replayssm_{x}": caches[f"{x}_cache"] for x in ("d", "k", "g")}
    return inputs, namespace | {
        "replayssm_write_pos": caches["write_pos"],
        "replayssm_force_flush": torch.ones_like(caches["write_pos"]),
    }


@pytest.mark.parametrize(("function", "call"), engines.recorded_calls(sglang))
def test_calls_of_layers(function, call):
    name = call.partition("(")[0]
    if name == CHUNK:
        arguments, expected = prefill_call("plain", FP32, "cpu")
        names = arguments | {
            "recurrent_state": arguments["initial_state"],
            "query_start_loc": arguments["cu_seqlens"],
            "recurrent_state_indices_args": {"initial_state_indices": arguments["initial_state_indices"]},
            "inplace_update_args": {"inplace_update": True},
        }
        check_chunk(function, "plain", engines.passed(call, names), expected)
    elif name == UPDATE:
        inputs, names = step(call)
        check_update(function, "cpu", inputs, engines.passed(call, names))
    elif name == "causal_conv1d_fn":
        check_convolution(function, "cpu", call)
    elif name == "fused_qkv_split_gdn_prefill":
        sizes = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_q_dim": 8, "head_k_dim": 8}
        x = torch.randn(7, 80)[:, :64]
        names = {"mixed_qkv": x, "layer": SimpleNamespace(**sizes, head_v_dim=8)}
        q, k, v = eval(call, {name: function}, names)
        assert q.shape == k.shape == (1, 7, 2, 8) and v.shape == (1, 7, 4, 8) and q.data_ptr() == x.data_ptr()
        assert torch.equal(torch.cat([y.flatten(2) for y in (q, k, v)], 2)[0], x)
    else:
        inputs, names = packed_step()
        engines.check_packed_decode(function, "cpu", inputs, engines.passed(call, names), null_index=-1)


def check_convolution(function, device: str, call: str) -> None:
    arguments = engines.convolution_call(null_index=-1)
    x, flags = arguments["x"], arguments["has_initial_state"]
    names = {
        # A layer transposes before or in the call
        "mixed_qkv": x.T if "transpose" in call else x,
        "layer": SimpleNamespace(conv_weights=arguments["weight"], bias=arguments["bias"], activation="silu"),
        **dict.fromkeys(("conv_states", "conv_states_contig"), arguments["conv_states"]),
        **dict.fromkeys(("cache_indices", "state_cache_indices", "conv_cache_indices"), arguments["cache_indices"]),
        "has_initial_states": flags,
        "forward_batch": SimpleNamespace(extend_prefix_lens=flags.int(), extend_seq_lens_cpu=[5, 0, 70, 3, 1]),
        "query_start_loc": arguments["query_start_loc"],
        "self": SimpleNamespace(forward_metadata=SimpleNamespace(query_start_loc=arguments["query_start_loc"])),
        "conv_kwargs": {},
        "seq_lens_cpu": [5, 0, 70, 3, 1],
    }
    positional, keywords = eval(call.replace("causal_conv1d_fn(", "bound("), {"bound": lambda *x, **y: (x, y)}, names)
    passed_arguments = dict(zip(("x", "weight", "bias"), positional, strict=True)) | keywords
    engines.check_convolution(function, device, arguments, -1, passed_arguments)


@pytest.mark.gpu
def test_convolution_on_a_gpu():
    for function, call in (x.values for x in engines.recorded_calls(sglang)):
        if call.startswith("causal_conv1d_fn"):
            check_convolution(function, "cuda", call)


def test_convolution_of_wider_windows(monkeypatch, caplog):
    engines.check_convolution_of_the_engine(sglang, engines.convolution_call(-1, columns=5), monkeypatch, caplog)
    with pytest.raises(NotImplementedError, match="block_table is given"):
        sglang.causal_conv1d_fn(**engines.convolution_call(-1), block_table=torch.zeros(1), seq_lens_cpu=[1])


@pytest.mark.parametrize("name", engines.CONVOLUTION_TENSORS)
def test_convolution_without_a_tensor(name):
    with pytest.raises(NotImplementedError, match=f"causal_conv1d_fn: {name} is None"):
        sglang.causal_conv1d_fn(**engines.convolution_call(-1) | {name: None})


# Each argument

L2NORM = {"use_qk_l2norm_in_kernel": (False, "use_qk_l2norm_in_kernel")}


def test_effects_on_packed_decode():
    _, arguments = engines.packed_call([5, 0, 7], FP32, FP32)
    names = "mixed_qkv a b A_log dt_bias scale initial_state"
    effects = engines.halved(arguments, names, {"initial_state": "state_pool"}) | L2NORM
    effects["ssm_state_indices"] = (indices([5, 3, 0]), "state_indices")
    engines.check_effects(sglang.fused_recurrent_gated_delta_rule_packed_decode, arguments, effects, "out")


def test_effects_on_replay():
    arguments = replay_call([5, 0, 7], FP32, FP32, True, 4)
    effects = (
        engines.halved(arguments, "a b A_log dt_bias scale initial_state", {"initial_state": "state_pool"}) | L2NORM
    )
    caches = {name: (torch.ones_like(arguments[name]), name) for name in ("d_cache", "k_cache", "g_cache", "write_pos")}
    effects |= caches | {
        "mixed_qkv": (arguments["mixed_qkv"] / 2, "q k v"),
        "ssm_state_indices": (indices([5, 3, 0]), "state_indices"),
        "force_flush": (torch.ones_like(arguments["write_pos"]), "force_flush"),
        **dict.fromkeys(("block_v", "num_warps", "num_stages", "nk"), (4, "")),  # they tune SGLang's kernel
    }
    function = sglang.fused_recurrent_linear_replayssm_decode
    engines.check_effects(function, arguments, effects, "out is_kda")  # test_replay, test_replay_refuses


def test_effects_on_update():
    _, arguments = update_call("drafts, ragged", FP32, FP32, padding=0)
    effects = engines.halved(
        arguments, "q k v a b A_log dt_bias initial_state_source", {"initial_state_source": "state_pool"}
    )
    effects |= {
        "initial_state_indices": (indices([5, 3, 0, 7]), "state_indices"),
        "scale": (0.3, "scale"),
        "use_qk_l2norm_in_kernel": (not arguments["use_qk_l2norm_in_kernel"], "use_qk_l2norm_in_kernel"),
        "cu_seqlens": (indices([0, 2, 4, 8, 10]), "cu_seqlens"),
        "disable_state_update": (False, "update_state"),
        "intermediate_states_buffer": (arguments["intermediate_states_buffer"] / 2, "intermediate_states"),
        "intermediate_state_indices": (indices([1, 2, 0, 3]), "intermediate_indices"),
        "cache_steps": (3, ""),  # the buffer's shape has it
        "retrieve_parent_token": (indices(TREES), "parents"),
    }
    refused = "softplus_beta softplus_threshold is_kda lower_bound cache_ring match_cutedsl_decode"
    refused += " replayssm_rawv replayssm_rawk replayssm_g replayssm_beta"  # test_update_refuses
    engines.check_effects(sglang.fused_sigmoid_gating_delta_rule_update, arguments, effects, refused)


def test_effects_on_convolution():
    arguments = engines.convolution_call(-1)
    effects = engines.convolution_effects(arguments) | {"pad_slot_id": (0, "null_index")}
    engines.check_effects(sglang.causal_conv1d_fn, arguments, effects, "kwargs")  # test_convolution_of_wider_windows


def test_effects_on_chunk():
    arguments, _ = prefill_call("plain", FP32, "cpu")
    effects = engines.halved(arguments, "q k v g beta initial_state", {"initial_state": "state_pool"}) | {
        "scale": (0.3, "scale"),
        "initial_state_indices": (indices([5, 0, 7, 4]), "state_indices"),
        "cu_seqlens": (indices([0, 64, 70, 134, 264]), "cu_seqlens"),
        "inplace_update": (False, "state_pool state_indices"),  # a pool of copies
        **L2NORM,
    }
    engines.check_effects(sglang.chunk_gated_delta_rule, arguments, effects, "head_first")  # test_chunk_refuses


# Stand-ins for the engine


def test_use_and_restore(monkeypatch):
    engines.check_use_and_restore(sglang, monkeypatch)


def test_other_releases(monkeypatch):
    engines.check_other_releases(sglang, monkeypatch)
