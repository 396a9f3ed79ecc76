"""vLLM's calls through flash_qla: against the recurrence in fp64, and beside vLLM's own kernels."""

from types import SimpleNamespace

import engines
import pytest
import test_decode as decoding
import torch
from accuracy import BARS, relative_error
from cases import Case as PrefillCase
from engines import APART, DTYPES, SIZES, STATE_DTYPES, indices
from test_decode import BF16, FP32, Case

import flash_qla
from flash_qla.integrations import vllm

OPS = "vllm.third_party.flash_linear_attention.ops"
FUNCTIONS = {
    "chunk_gated_delta_rule": f"{OPS}.chunk",
    "fi_chunk_gated_delta_rule": "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "fused_recurrent_gated_delta_rule_packed_decode": f"{OPS}.fused_recurrent",
    "fused_sigmoid_gating_delta_rule_update": f"{OPS}.fused_sigmoid_gating",
    "fused_recurrent_gated_delta_rule": f"{OPS}.fused_recurrent",
}
PACKED, UPDATE, READY = list(FUNCTIONS)[2:]
CONVOLUTION, PREPARATION = "causal_conv1d_fn", "fused_post_conv_prep"


# One token of each sequence, packed

ONE_TOKEN = {"plain": [5, 3, 7], "no slot": [5, 0, 7, -1], "padded": [5, 3, 0, 0], "no slots at all": [0, 0]}


@pytest.mark.parametrize(("name", "l2norm"), [*((name, True) for name in ONE_TOKEN), ("plain", False)])
@DTYPES
def test_packed_decode(device, dtype, state_dtype, name, l2norm):
    inputs, arguments = engines.packed_call(ONE_TOKEN[name], dtype, state_dtype, l2norm=l2norm)
    engines.check_packed_decode(
        vllm.fused_recurrent_gated_delta_rule_packed_decode, device, inputs, arguments, null_index=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_TOKEN)
@STATE_DTYPES
def test_packed_decode_beside(state_dtype, name):
    _, arguments = engines.packed_call(ONE_TOKEN[name], BF16, state_dtype)
    function = engines.theirs(FUNCTIONS[PACKED], PACKED)
    engines.check_packed_decode_beside(vllm.fused_recurrent_gated_delta_rule_packed_decode, function, "cuda", arguments)


# Tokens and drafts

TABLE = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [0, 0, 0, 0]]
DRAFTS = (3, 1, 4, 2, 0)
UPDATES = {
    "plain": ((1, 1, 1), {"ssm_state_indices": [5, 3, 7]}),
    "no slot": ((1, 1, 1, 1), {"ssm_state_indices": [5, 0, 7, -1]}),
    "padded": ((1, 1, 0, 0), {"ssm_state_indices": [5, 3, 0, 0, 9, 11]}),
    "drafts": (DRAFTS, {"ssm_state_indices": TABLE, "num_accepted_tokens": [2, 1, 4, 3, 1]}),
    "new drafts": (DRAFTS, {"ssm_state_indices": TABLE}),
    "drafts, padded": (
        (2, 2, 0, 0),
        {"ssm_state_indices": [*TABLE[:2], [0] * 4, [0] * 4, [0] * 4], "num_accepted_tokens": [3, 1, 1, 1, 1]},
    ),
    "drafts, no slot": (
        (2, 2, 2),
        {"ssm_state_indices": [[1, 0, 3, 4], [5, 6, 0, 8], [9, 0, 0, 12]], "num_accepted_tokens": [2, 1, 4]},
    ),
}


def update_arguments(inputs: dict, **options) -> dict:
    """The arguments as vLLM's layers pass them."""
    return engines.update_inputs(inputs) | {
        "initial_state": inputs["state_pool"],
        "inplace_final_state": True,
        **options,
    }


def update_call(name: str, dtype: torch.dtype, state_dtype: torch.dtype, padding: int) -> tuple[dict, dict]:
    lengths, options = UPDATES[name]
    options = {option: indices(values) for option, values in options.items()}
    case = Case(lengths=lengths, padding=padding, dtype=dtype, gate_dtype=dtype, state_dtype=state_dtype, **SIZES)
    inputs = decoding.make_inputs(case)
    return inputs, update_arguments(inputs, **options)


@pytest.mark.parametrize("function", (UPDATE, READY))
def test_as_many_drafts_as_sequences(device, function):
    """Without padding: drafts of different numbers are not one token of each sequence."""
    inputs, arguments = update_call("drafts, padded", FP32 if device == "cpu" else BF16, FP32, padding=0)
    assert inputs["q"].shape[1] == arguments["cu_seqlens"].numel() - 1
    check_update(
        getattr(vllm, function), device, inputs, with_ready_gates(arguments) if function == READY else arguments
    )


@pytest.mark.parametrize("name", UPDATES)
@DTYPES
def test_update(device, dtype, state_dtype, name):
    inputs, arguments = update_call(name, dtype, state_dtype, padding=2)
    check_update(vllm.fused_sigmoid_gating_delta_rule_update, device, inputs, arguments)


def with_ready_gates(arguments: dict) -> dict:
    """Arguments of fused_recurrent_gated_delta_rule, whose g and beta have the activations already."""
    names = ("a", "b", "A_log", "dt_bias")
    a, b, A_log, dt_bias = (arguments[name].float() for name in names)
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    ready = {"g": g.view(arguments["v"].shape[:3]), "beta": b.sigmoid().view(arguments["v"].shape[:3])}
    return {name: x for name, x in arguments.items() if name not in names} | ready


@pytest.mark.parametrize("name", UPDATES)
@DTYPES
def test_ready_update(device, dtype, state_dtype, name):
    inputs, arguments = update_call(name, dtype, state_dtype, padding=2)
    check_update(vllm.fused_recurrent_gated_delta_rule, device, inputs, with_ready_gates(arguments))


@pytest.mark.parametrize(
    "change",
    [{"beta": None}, {"initial_state": None}, {"inplace_final_state": False}, {"ssm_state_indices": None}],
    ids=lambda x: next(iter(x)),
)
def test_ready_update_refuses(change):
    _, arguments = update_call("plain", FP32, FP32, padding=0)
    pool = arguments["initial_state"]
    engines.check_refuses(vllm.fused_recurrent_gated_delta_rule, with_ready_gates(arguments), pool, change)


def check_update(function, device, inputs, arguments):
    slots, accepted = arguments["ssm_state_indices"], arguments.get("num_accepted_tokens")
    options = {} if accepted is None else {"num_accepted_tokens": accepted}
    expected, states, is_real = engines.expected_of(inputs, slots, null_index=0, **options)
    call = engines.moved(arguments, device)
    o, pool = function(**call)
    assert pool is call["initial_state"]
    written = {}
    for n, (_, *later) in enumerate(states):
        if is_real[n] and slots.dim() == 2:
            written |= dict(zip(slots[n].tolist(), later, strict=False))
        elif is_real[n] and later:
            written[slots[n].item()] = later[-1]
    written = {slot: state for slot, state in written.items() if slot > 0}
    decoding.check({"state_pool": pool.cpu()}, written, o.cpu(), expected, inputs["state_pool"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", UPDATES)
@STATE_DTYPES
@pytest.mark.parametrize("of", (UPDATE, READY))
def test_update_beside(state_dtype, name, of):
    """Outputs of sequences without a slot are left out, because vLLM does not write them."""
    function = engines.theirs(FUNCTIONS[of], of)
    inputs, arguments = update_call(name, BF16, state_dtype, padding=0)
    options = {x: arguments[x] for x in ("num_accepted_tokens",) if x in arguments}
    _, _, is_real = engines.expected_of(inputs, arguments["ssm_state_indices"], null_index=0, **options)
    tokens = engines.tokens_of(inputs, is_real).to("cuda")
    arguments = with_ready_gates(arguments) if of == READY else arguments
    calls = [engines.moved(arguments, "cuda") for _ in range(2)]
    (o, pool), (their_o, their_pool) = getattr(vllm, of)(**calls[0]), function(**calls[1])
    assert o.dtype == their_o.dtype and relative_error(o[tokens], their_o[tokens].double()) < APART
    engines.check_beside(pool, their_pool, arguments["initial_state"])


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_rejected_drafts(device):
    """Four drafts, of which some are accepted, and two tokens after those."""
    accepted, dtype = [1, 3, 4], FP32 if device == "cpu" else BF16
    inputs = decoding.make_inputs(Case(B=3, T=6, dtype=dtype, **SIZES))
    table = indices([[3, 4, 5, 6], [13, 12, 11, 10], [20, 25, 21, 22]])
    chain = {"state_indices": table[:, 0], "parents": indices([[-1, 0, 1, 2, m - 1, 4] for m in accepted])}
    expected, states = decoding.states_after_tokens(inputs | chain)
    pool = inputs["state_pool"]
    for begin, end, num_accepted in ((0, 4, [1, 1, 1]), (4, 6, accepted)):
        part = {x: inputs[x][:, begin:end].flatten(0, 1)[None] for x in ("q", "k", "v", "a", "b")}
        offsets = torch.arange(4, dtype=torch.int32) * (end - begin)
        call = engines.moved(
            update_arguments(
                inputs | part | {"state_pool": pool, "cu_seqlens": offsets},
                ssm_state_indices=table,
                num_accepted_tokens=indices(num_accepted),
            ),
            device,
        )
        o, pool = (x.cpu() for x in vllm.fused_sigmoid_gating_delta_rule_update(**call))
        assert relative_error(o.view(3, end - begin, *o.shape[2:]), expected[:, begin:end]) <= decoding.BARS[dtype]
    for n in range(3):
        for t in range(2):
            assert relative_error(pool[table[n, t]], states[n][5 + t]) <= decoding.BARS[FP32]


def test_batched():
    """A batch without cu_seqlens has several tokens of each sequence."""
    inputs = decoding.make_inputs(Case(B=3, T=2))
    table = indices([[1, 2], [5, 6], [9, 10]])
    expected, states, _ = engines.expected_of(inputs, table, null_index=0)
    before = inputs["state_pool"].clone()
    o, _ = vllm.fused_sigmoid_gating_delta_rule_update(**update_arguments(inputs, ssm_state_indices=table))
    written = {table[n, t].item(): states[n][t + 1] for n in range(3) for t in range(2)}
    decoding.check(inputs, written, o, expected, before)


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 2.0},
        {"threshold": 10.0},
        {"initial_state": None},
        {"inplace_final_state": False},
        {"ssm_state_indices": None},
        {"is_kda": True},
    ],
    ids=lambda x: next(iter(x)),
)
def test_update_refuses(change):
    _, arguments = update_call("plain", FP32, FP32, padding=0)
    pool = arguments["initial_state"]
    engines.check_refuses(vllm.fused_sigmoid_gating_delta_rule_update, arguments, pool, change)


# Prefill

PREFILLS = {
    "plain": PrefillCase(lengths=(70, 0, 64, 130), keys="raw", use_qk_l2norm_in_kernel=True, state_v_first=True),
    "padding": PrefillCase(lengths=(5, 300), padding=9, H_v=6, state_v_first=True),
    "batched": PrefillCase(B=2, T=70, state_v_first=True),
}


@pytest.mark.parametrize("case", [*PREFILLS.values(), PrefillCase(B=2, T=70, state_v_first=True, scale=0.3)], ids=str)
@pytest.mark.parametrize("with_out", (False, True))
def test_chunk(device, case, with_out):
    inputs, expected = engines.prefill_inputs(case, device)
    out = torch.full((inputs["v"].numel() + 10,), 7.0, dtype=case.dtype, device=device)
    o, final_state = vllm.chunk_gated_delta_rule(
        **inputs,
        output_final_state=True,
        chunk_indices=indices([0]),
        chunk_offsets=indices([0]),
        core_attn_out=out if with_out else None,
    )
    assert relative_error(o, expected.o) < BARS[case.dtype] and o.dtype == case.dtype
    assert relative_error(final_state, expected.final_state) < BARS[case.dtype] and final_state.dtype == FP32
    if with_out:
        assert o.data_ptr() == out.data_ptr() and torch.equal(out[:-10], o.flatten()) and (out[-10:] == 7).all()
    assert vllm.chunk_gated_delta_rule(**inputs)[1] is None


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("options", ({}, {"use_cp": False}), ids=str)
def test_fi_chunk(device, name, options):
    case = PREFILLS[name]
    inputs, expected = engines.prefill_inputs(case, device)
    del inputs["scale"]
    o, final_state = vllm.fi_chunk_gated_delta_rule(**inputs, output_final_state=True, **options)
    assert relative_error(o, expected.o) < BARS[case.dtype]
    assert relative_error(final_state, expected.final_state) < BARS[case.dtype] and final_state.dtype == FP32


@pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("every", (64, 128))
def test_fi_chunk_checkpoints(device, every, state_dtype):
    lengths = (70, 0, 64, 260, 128)
    inputs, expected = engines.prefill_inputs(
        PrefillCase(lengths=lengths, initial_state=state_dtype, state_v_first=True), device
    )
    del inputs["scale"]
    before = inputs["initial_state"].clone()
    states, chunk = [], 0  # the state after m chunks is that at the start of the next one, or the final one
    for n, length in enumerate(lengths):
        later = [*expected.h[0, chunk + 1 : chunk + -(-length // 64)], expected.final_state[n]]
        states += [later[m * every // 64 - 1] for m in range(1, length // every + 1)]
        chunk += -(-length // 64)
    starts = indices([0, *(length // every for length in lengths)]).cumsum(0)
    checkpoints = torch.full((len(states) + 1, *before.shape[1:]), 7.0, device=device)
    o, final_state = vllm.fi_chunk_gated_delta_rule(
        **inputs,
        output_final_state=True,
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=starts.to(device),
        checkpoint_every_n_tokens=every,
    )
    assert len(states) == starts[-1] and (checkpoints[-1] == 7).all()
    assert relative_error(o, expected.o) < BARS[BF16]
    assert relative_error(final_state, expected.final_state) < BARS[BF16] and final_state.dtype == FP32
    for state, exact in zip(checkpoints, states, strict=False):
        assert relative_error(state, exact) < BARS[BF16]
    assert torch.equal(inputs["initial_state"], before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fi_chunk_gated_delta_rule"))
def test_prefill_beside(name):
    function = engines.theirs(FUNCTIONS[name], name)
    if name == "fi_chunk_gated_delta_rule":
        pytest.importorskip("flashinfer", reason="FlashInfer, which vLLM calls here, is not installed")
    case = PrefillCase(lengths=(70, 5, 64, 300), H_k=4, H_v=8, state_v_first=True)
    inputs, _ = engines.prefill_inputs(case, "cuda")
    del inputs["scale"]
    actual, expected = (f(**inputs, output_final_state=True) for f in (getattr(vllm, name), function))
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype and relative_error(x, y.double()) < APART


# Modes

ONE_KEPT = {"state_checkpoints": torch.zeros(3, 4, 64, 64, dtype=BF16), "checkpoint_every_n_tokens": 64}


def prefill_arguments(**options) -> dict:
    """Of both functions of prefill."""
    inputs, _ = engines.prefill_inputs(PrefillCase(lengths=(64, 130), K=64, V=64, H_v=4, state_v_first=True), "cpu")
    del inputs["scale"]
    return inputs | {"output_final_state": True, **options}


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fi_chunk_gated_delta_rule"))
@pytest.mark.parametrize("value", (None, "0", "1"))
def test_batch_invariant_mode(name, value, monkeypatch):
    """VLLM_BATCH_INVARIANT=1 reaches the op, in every kind of call."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    kinds = [{}, {"initial_state": None}]
    kinds += [ONE_KEPT] if name == "fi_chunk_gated_delta_rule" else [{"core_attn_out": torch.zeros(10**5, dtype=BF16)}]
    for options in kinds:
        op, call = engines.op_call(getattr(vllm, name), prefill_arguments(**options))
        assert call.get("batch_invariant", False) == (value == "1"), (op, options)


@pytest.mark.parametrize("options", ({}, ONE_KEPT), ids=("plain", "checkpoints"))
def test_use_cp(options):
    """Without CP no sequence is split. Checkpoints of fewer bits do not round the states between them."""
    call = {}
    for use_cp in ("auto", True, False):
        arguments = prefill_arguments(use_cp=use_cp, **options)
        _, call[use_cp] = engines.op_call(vllm.fi_chunk_gated_delta_rule, arguments)
        assert call[use_cp].get("batch_invariant", False) == (use_cp is False) and call[use_cp].get("auto_cp", True)
    assert not options or (call["auto"]["checkpoints"].dtype, call[False]["checkpoints"].dtype) == (BF16, FP32)


def test_checkpoints_in_the_batch_invariant_mode(device, monkeypatch):
    """Checkpoints in bf16 are the rounded states, and change no bit of the results."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    arguments = engines.moved(prefill_arguments(), device)
    rounded = torch.full_like(ONE_KEPT["state_checkpoints"], 7.0, device=device)
    exact = torch.zeros_like(rounded, dtype=FP32)
    outputs = [
        vllm.fi_chunk_gated_delta_rule(**arguments, **options)
        for options in (
            {},
            {"state_checkpoints": rounded[:], "checkpoint_every_n_tokens": 64},
            {"state_checkpoints": exact, "checkpoint_every_n_tokens": 64},
        )
    ]
    for results in outputs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outputs[0], results, strict=True))
    assert torch.equal(rounded, exact.to(BF16)) and exact[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fi_chunk_gated_delta_rule"))
def test_same_bits_in_any_batch(name, monkeypatch):
    """A prompt alone, whose kernels and segments are others without the mode, and among fifteen."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    case = PrefillCase(lengths=(2048,) * 16, H_k=8, H_v=16, state_v_first=True)
    inputs, _ = engines.prefill_inputs(case, "cuda")
    del inputs["scale"]
    states = inputs.pop("initial_state")
    alone = {x: y[:, :2048] for x, y in inputs.items() if x in ("q", "k", "v", "g", "beta")}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": inputs["use_qk_l2norm_in_kernel"]}
    function = getattr(vllm, name)
    o, state = function(**alone, initial_state=states[:1], cu_seqlens=inputs["cu_seqlens"][:2], **options)
    many, after = function(**inputs | options, initial_state=states)
    assert torch.equal(o, many[:, :2048]) and torch.equal(state, after[:1])


# What layers pass


def step(call: str) -> tuple[dict, dict]:
    """Inputs of decoding, and the names of a layer: those of the call's sequences, and gates of more tokens."""
    kind = next(x for x in ("non_spec", "spec", "decode") if f"query_{x}" in call)
    inputs, arguments = update_call("drafts" if kind == "spec" else "plain", FP32, FP32, padding=0)
    ready = with_ready_gates(arguments)
    N, T = arguments["cu_seqlens"].numel() - 1, inputs["q"].shape[1]
    sequences = "spec" if kind == "spec" else "non_spec"
    names = {"query": "q", "key": "k", "value": "v", "a": "a", "b": "b"}
    namespace = {f"{name}_{kind}": arguments[x] for name, x in names.items()}
    namespace |= {f"g_{kind}": ready["g"], f"beta_{kind}": ready["beta"]}
    namespace |= {name: engines.longer(arguments[name], rows=5) for name in ("a", "b")}
    return inputs, namespace | {
        "num_decode_tokens": T,
        "ssm_state": arguments["initial_state"],
        f"{sequences}_query_start_loc": engines.longer(arguments["cu_seqlens"]),
        f"{sequences}_state_indices_tensor": engines.longer(arguments["ssm_state_indices"]),
        "num_accepted_tokens": engines.longer(arguments["num_accepted_tokens"]) if kind == "spec" else None,
        "attn_metadata": SimpleNamespace(num_decodes=N, num_spec_decodes=N),
        "self": SimpleNamespace(A_log=arguments["A_log"], dt_bias=arguments["dt_bias"]),
    }


def packed_step() -> tuple[dict, dict]:
    slots = [5, 3, 7]
    inputs, arguments = engines.packed_call(slots, FP32, FP32)
    K = inputs["k"].shape[3]
    return inputs, {
        "mixed_qkv_non_spec": arguments["mixed_qkv"],
        "a": arguments["a"],
        "b": arguments["b"],
        "ssm_state": arguments["initial_state"],
        "out_buf": arguments["out"],
        "num_actual_tokens": len(slots),
        "non_spec_state_indices_tensor": engines.longer(arguments["ssm_state_indices"]),
        "self": SimpleNamespace(A_log=arguments["A_log"], dt_bias=arguments["dt_bias"], head_k_dim=K),
    }


def prefill_step() -> tuple[object, dict]:
    inputs, expected = engines.prefill_inputs(PrefillCase(lengths=(64, 130), state_v_first=True), "cpu")
    namespace = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
    names = {"query": "q", "key": "k", "value": "v", "g": "g", "beta": "beta"}
    namespace |= {f"{name}_non_spec": inputs[x] for name, x in names.items()}
    states = inputs["initial_state"]
    return expected, namespace | {
        "state": states,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": False,
        "chunk_indices": indices([[0, 0], [1, 0], [1, 1], [1, 2]]),
        "chunk_offsets": indices([0, 1, 4]),
        "core_attn_out": None,
        "use_cp": "auto",
        "has_checkpoint": True,
        "state_checkpoints": torch.zeros(3, *states.shape[1:]),
        "checkpoint_cu_starts": indices([0, 1, 3]),
        "plan": SimpleNamespace(cu_starts=indices([0, 1, 3]), every_n_tokens=64),
        "non_spec_query_start_loc": inputs["cu_seqlens"],
        "attn_metadata": SimpleNamespace(prefill_query_start_loc=inputs["cu_seqlens"]),
    }


@pytest.mark.parametrize(("function", "call"), engines.recorded_calls(vllm))
def test_calls_of_layers(function, call):
    name = call.partition("(")[0]
    if name == PACKED:
        inputs, names = packed_step()
        engines.check_packed_decode(function, "cpu", inputs, engines.passed(call, names), null_index=0)
    elif name in (UPDATE, READY):
        inputs, names = step(call)
        check_update(function, "cpu", inputs, engines.passed(call, names))
    elif name == CONVOLUTION:
        check_convolution(function, "cpu", call)
    elif name == PREPARATION:
        conv_output, names = preparation_step()
        q, k, v, g, beta = function(**engines.passed(call, names))
        assert torch.equal(torch.cat([x.flatten(1) for x in (q, k, v)], 1), conv_output)
        assert q.data_ptr() == conv_output.data_ptr() and v.stride(0) == conv_output.stride(0)
        assert g.shape == beta.shape == (73, 4)
    else:
        expected, names = prefill_step()
        o, final_state = function(**engines.passed(call, names))
        assert relative_error(o, expected.o) < BARS[BF16]
        assert relative_error(final_state, expected.final_state) < BARS[BF16]


def check_convolution(function, device: str, call: str) -> None:
    arguments = engines.convolution_call(null_index=0)
    names = {
        "mixed_qkv_non_spec_T": arguments["x"],
        "conv_weights": arguments["weight"],
        "self": SimpleNamespace(conv1d=SimpleNamespace(bias=arguments["bias"]), activation="silu"),
        "conv_state": arguments["conv_states"],
        "has_initial_state": arguments["has_initial_state"],
        "non_spec_state_indices_tensor": arguments["cache_indices"],
        "non_spec_query_start_loc": arguments["query_start_loc"],
        "attn_metadata": None,
    }
    passed = eval(call.replace(f"{CONVOLUTION}(", "bound("), {"bound": lambda *x, **y: (x, y)}, names)
    positional, keywords = passed
    passed_arguments = dict(zip(("x", "weight", "bias"), positional, strict=True)) | keywords
    engines.check_convolution(function, device, arguments, 0, passed_arguments)


def preparation_step(dtype=BF16) -> tuple[torch.Tensor, dict]:
    """The result of a convolution [T, D], rows apart, and the names in layers."""
    generator = torch.Generator().manual_seed(0)
    conv_output = torch.randn(73, 520, generator=generator).to(dtype)[:, :512]
    a, b = torch.randn(2, 73, 4, generator=generator).to(dtype)
    A_log, dt_bias = torch.randn(2, 4, generator=generator)
    layer = {"A_log": A_log, "dt_bias": dt_bias, "head_k_dim": 64, "head_v_dim": 64}
    names = {"self": SimpleNamespace(**layer, num_k_heads=4, tp_size=2), "num_k_heads": 2}
    names |= dict.fromkeys(("dummy_mixed_qkv", "mixed_qkv_non_spec", "conv_output_prefill"), conv_output)
    names |= {f"{x}{of}": y for x, y in (("a", a), ("b", b)) for of in ("_non_spec", "_prefill")}
    return conv_output, names | {"dummy_a": a, "dummy_b": b}


@pytest.mark.gpu
def test_convolution_on_a_gpu():
    calls = [x.values for x in engines.recorded_calls(vllm) if x.values[1].startswith(CONVOLUTION)]
    for function, call in calls:
        check_convolution(function, "cuda", call)


def test_convolution_of_drafts(monkeypatch, caplog):
    """With drafts vLLM's windows have columns for them."""
    engines.check_convolution_of_the_engine(vllm, engines.convolution_call(0, columns=5), monkeypatch, caplog)
    arguments = engines.convolution_call(0)
    with pytest.raises(NotImplementedError, match="tables of blocks"):
        vllm.causal_conv1d_fn(**arguments, initial_state_idx=arguments["cache_indices"])


@pytest.mark.parametrize("name", engines.CONVOLUTION_TENSORS)
def test_convolution_without_a_tensor(name):
    with pytest.raises(NotImplementedError, match=f"causal_conv1d_fn: {name} is None"):
        vllm.causal_conv1d_fn(**engines.convolution_call(0) | {name: None})


def prepared(device: str, dtype=BF16) -> tuple[dict, dict]:
    """q, k, v, g and beta as a layer passes them on, and flash_qla's arguments for the same."""
    _, names = preparation_step(dtype)
    conv_output, layer = names["conv_output_prefill"].to(device), names["self"]
    a, b, A_log, dt_bias = (x.to(device) for x in (names["a_prefill"], names["b_prefill"], layer.A_log, layer.dt_bias))
    outputs = vllm.fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, 2, 64, 64)
    q, k, v, *_ = (x[None] for x in outputs[:3])
    inside = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"), True)
    expected = {"q": q, "k": k, "v": v, "g": a[None], "beta": b[None], "A_log": A_log, "dt_bias": dt_bias} | inside
    return dict(zip(("q", "k", "v", "g", "beta"), (x.unsqueeze(0) for x in outputs), strict=True)), expected


@pytest.mark.parametrize("into_memory", (False, True))
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fi_chunk_gated_delta_rule"))
def test_prefill_of_views(name, into_memory, device):
    """The prefill applies l2norm and activations to what fused_post_conv_prep returns."""
    tokens, expected = prepared(device)
    state, cu_seqlens = torch.randn(2, 4, 64, 64).to(device), torch.tensor([0, 3, 73], device=device)
    shared = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
    arguments = shared | {"use_qk_l2norm_in_kernel": False}
    kept = torch.empty(1, 4, 64, 64, device=device)
    if into_memory and name == "chunk_gated_delta_rule":
        arguments["core_attn_out"] = torch.empty(80 * 4 * 64, dtype=BF16, device=device)
    elif into_memory:
        arguments |= {"state_checkpoints": kept, "checkpoint_every_n_tokens": 64}
    actual = getattr(vllm, name)(**tokens, **arguments)
    o, final_state = flash_qla.chunk_gated_delta_rule(**expected, **shared, state_v_first=True)
    bar = 0 if device == "cpu" else 5e-3
    assert relative_error(actual[0], o.double()) <= bar
    assert relative_error(actual[1], final_state.double()) <= bar
    if into_memory and name.startswith("fi"):
        _, after = flash_qla.chunk_gated_delta_rule(
            **{x: y[:, 3:67] if torch.is_tensor(y) and y.dim() > 1 else y for x, y in expected.items()},
            initial_state=state[1:], output_final_state=True, state_v_first=True,
        )  # fmt: skip
        assert relative_error(kept, after.double()) <= 5e-3


def test_no_other_function_takes_raw_gates():
    """Sizes can be read, and a dimension added."""
    g = prepared("cpu")[0]["g"]
    assert g.shape == (1, 73, 4) and g.dim() == 3 and g.dtype == BF16 and g.device.type == "cpu" and not g.is_cuda
    for use in (
        torch.exp,
        torch.Tensor.float,
        torch.Tensor.data_ptr,
        lambda x: x + 1,
        lambda x: x.data,
        lambda x: x[0],
    ):
        with pytest.raises(NotImplementedError, match="before their activation"):
            use(g)
    with pytest.raises(NotImplementedError, match="apply_l2norm is False and output_g_exp False"):
        vllm.fused_post_conv_prep(torch.zeros(1, 12), *torch.zeros(4, 1, 1), 1, 4, 4, apply_l2norm=False)


def test_too_few_gates():
    _, arguments = update_call("plain", FP32, FP32, padding=0)
    with pytest.raises(RuntimeError, match="b has shape"):
        vllm.fused_sigmoid_gating_delta_rule_update(**arguments | {"b": arguments["b"][1:]})


def test_one_token_of_each_sequence_is_packed_decoding():
    """The op's kernel, and so the bits, are the same whichever of both functions a layer calls."""
    _, arguments = update_call("plain", FP32, FP32, padding=0)
    _, call = engines.op_call(vllm.fused_sigmoid_gating_delta_rule_update, arguments)
    assert call["cu_seqlens"] is None and call["q"].shape[:2] == call["a"].shape[:2] == (3, 1)


# Each argument


def test_effects_on_packed_decode():
    _, arguments = engines.packed_call([5, 3, 7], FP32, FP32)
    of_op = {"initial_state": "state_pool"}
    effects = engines.halved(arguments, "mixed_qkv a b A_log dt_bias scale initial_state", of_op)
    effects |= {
        "ssm_state_indices": (indices([5, 3, 0]), "state_indices"),
        "use_qk_l2norm_in_kernel": (False, "use_qk_l2norm_in_kernel"),
    }
    engines.check_effects(vllm.fused_recurrent_gated_delta_rule_packed_decode, arguments, effects, "out")


@pytest.mark.parametrize("of", (UPDATE, READY))
def test_effects_on_update(of):
    _, arguments = update_call("drafts", FP32, FP32, padding=0)
    arguments = with_ready_gates(arguments) if of == READY else arguments
    gates = {"g": "a", "beta": "b"} if of == READY else {}
    names = "q k v initial_state " + ("g beta" if of == READY else "a b A_log dt_bias")
    effects = engines.halved(arguments, names, gates | {"initial_state": "state_pool"})
    table = arguments["ssm_state_indices"]
    effects |= {
        "scale": (0.3, "scale"),
        "cu_seqlens": (indices([0, 2, 4, 8, 10, 10]), "cu_seqlens"),
        "ssm_state_indices": (table.flip(1), "state_indices write_indices"),
        "num_accepted_tokens": (indices([1, 1, 1, 1, 1]), "num_accepted_tokens"),
        "use_qk_l2norm_in_kernel": (not arguments["use_qk_l2norm_in_kernel"], "use_qk_l2norm_in_kernel"),
    }
    refused = "inplace_final_state" + ("" if of == READY else " beta threshold is_kda")  # test_update_refuses
    engines.check_effects(getattr(vllm, of), arguments, effects, refused)


@pytest.mark.parametrize("with_out", (False, True))
def test_effects_on_chunk(with_out):
    out = {"core_attn_out": torch.zeros(10**5, dtype=BF16)} if with_out else {}
    arguments = prefill_arguments(**out)
    of_op = {"initial_state": "state_pool"} if with_out else {}
    effects = engines.halved(arguments, "q k v g beta initial_state", of_op) | {
        "scale": (0.3, "scale"),
        "output_final_state": (False, "" if with_out else "output_final_state"),
        "cu_seqlens": (indices([0, 100, 194]), "cu_seqlens"),
        "chunk_indices": (indices([0]), ""),  # they follow from cu_seqlens
        "chunk_offsets": (indices([0]), ""),
        "use_qk_l2norm_in_kernel": (True, "use_qk_l2norm_in_kernel"),
    }
    engines.check_effects(vllm.chunk_gated_delta_rule, arguments, effects, "core_attn_out")


@pytest.mark.parametrize("with_checkpoints", (False, True))
def test_effects_on_fi_chunk(with_checkpoints):
    arguments = prefill_arguments(use_qk_l2norm_in_kernel=False, **(ONE_KEPT if with_checkpoints else {}))
    of_op = {"initial_state": "state_pool"} if with_checkpoints else {}
    effects = engines.halved(arguments, "q k v g beta initial_state", of_op) | {
        "output_final_state": (False, "" if with_checkpoints else "output_final_state"),
        "cu_seqlens": (indices([0, 66, 194]), "cu_seqlens"),
        "checkpoint_cu_starts": (indices([0]), ""),  # they follow from cu_seqlens
        "use_qk_l2norm_in_kernel": (True, "use_qk_l2norm_in_kernel"),
    }
    if with_checkpoints:
        effects |= {
            "state_checkpoints": (torch.ones_like(ONE_KEPT["state_checkpoints"]), "checkpoints"),
            "checkpoint_every_n_tokens": (128, "checkpoint_every"),
        }
    elsewhere = "use_cp" + ("" if with_checkpoints else " state_checkpoints checkpoint_every_n_tokens")
    engines.check_effects(vllm.fi_chunk_gated_delta_rule, arguments, effects, elsewhere)


# Stand-ins for the engine


def test_use_and_restore(monkeypatch):
    engines.check_use_and_restore(vllm, monkeypatch)


def test_other_releases(monkeypatch):
    engines.check_other_releases(vllm, monkeypatch)
