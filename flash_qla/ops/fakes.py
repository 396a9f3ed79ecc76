"""Fake implementations of the ops: dtypes and shapes of their results, for torch.compile and torch.export.

The checks here make wrong arguments fail when a graph is traced, with the texts of csrc/tokens.cpp and its neighbours.
The library checks everything again on real tensors. The file is long because it has every op's checks and results.
"""

import torch

from flash_qla import _binary
from flash_qla._layout import CHUNK, DECODE_BACKLOG, HEAD_DIM_STEP, MOST_VALUE_DIM
from flash_qla.ops import schemas
from flash_qla.ops.checks import FLOAT8, FLOATING, check_state_dtype

_INDICES = (torch.int32, torch.int64)


def _fake_of(op):
    """Registers a function of the op's call as the op's fake."""
    call_type = schemas.call_of(op)

    def register(fake):
        torch.library.register_fake(op._schema.name, lambda *args, **kwargs: fake(call_type(*args, **kwargs)))
        return fake

    return register


def _check(call, condition, message):
    torch._check(condition, lambda: f"flash_qla::{type(call).__name__}: {message()}")


def _check_dtype(call, name, expected, text):
    dtype = getattr(call, name).dtype
    names = [str(x).removeprefix("torch.") for x in (dtype, *expected)]
    _check(call, dtype in expected, lambda: f"{name} has dtype {names[0]}, expected {text or ' or '.join(names[1:])}")


def _check_floating(call, *names):
    for name in names:
        if getattr(call, name) is not None:
            _check_dtype(call, name, FLOATING, "bfloat16, float16, float32 or float64")


def _check_rank(call, name, rank, symbols):
    x = getattr(call, name)
    _check(
        call,
        x.dim() == rank,
        lambda: f"{name} has {x.dim()} dimensions (shape {list(x.shape)}), expected {rank} ({symbols})",
    )


def _check_shape(call, name, expected, symbols, explain_layout=False):
    tensor = getattr(call, name)

    def describe():
        message = f"{name} has shape {list(tensor.shape)}, expected {list(expected)} ({symbols})"
        if explain_layout:
            message += f", because q has shape {list(call.q.shape)}: tensors are [B, T, H, D], tokens before heads"
        return message

    _check(call, tensor.dim() == len(expected), describe)
    for size, expected_size in zip(tensor.shape, expected, strict=True):
        _check(call, size == expected_size, describe)


def _check_device(call, name, reference="q"):
    device, expected = getattr(call, name).device, getattr(call, reference).device
    _check(call, device == expected, lambda: f"{name} is on {device}, expected {expected}, the device of {reference}")


def _check_tokens(call, *gates):
    """Checks devices, dtypes and shapes of tokens. `gates` names the arguments [B, T, H_v].

    Returns:
        N, the number of sequences.
    """
    for name, x in call._asdict().items():
        if isinstance(x, torch.Tensor):
            # One meta tensor is enough for the dispatcher to call the fake; the others may be on any device.
            _check_device(call, name)
    q, v = call.q, call.v
    _check_floating(call, "q")
    for name in ("k", "v"):
        _check_dtype(call, name, (q.dtype,), f"{str(q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_rank(call, "q", 4, "[B, T, H_k, K]")
    _check_rank(call, "v", 4, "[B, T, H_v, V]")
    B, T, H_k, K = q.shape
    _, _, H_v, V = v.shape
    _check(
        call,
        H_k >= 1 and K >= 1,
        lambda: f"q has shape {list(q.shape)}, expected at least one head and one head dimension ([B, T, H_k, K])",
    )
    _check(
        call,
        H_v >= 1 and H_v % H_k == 0,
        lambda: f"v has {H_v} heads, expected a positive multiple of the {H_k} heads of q and k",
    )
    _check_shape(call, "k", (B, T, H_k, K), "[B, T, H_k, K]", explain_layout=True)
    _check_shape(call, "v", (B, T, H_v, V), "[B, T, H_v, V]", explain_layout=True)
    for name in gates:
        _check_floating(call, name)
        _check_shape(call, name, (B, T, H_v), "[B, T, H_v]", explain_layout=True)
    max_seqlen = getattr(call, "max_seqlen", None)
    if max_seqlen is not None:
        _check(call, max_seqlen >= 0, lambda: f"max_seqlen is {max_seqlen}, expected at least 0")
    if getattr(call, "cu_seqlens", None) is None:
        return B
    _check_dtype(call, "cu_seqlens", _INDICES, None)
    _check_rank(call, "cu_seqlens", 1, "[N + 1]")
    offsets = call.cu_seqlens.shape[0]
    _check(call, offsets >= 1, lambda: "cu_seqlens has shape [0], expected at least one offset ([N + 1])")
    _check(call, B == 1, lambda: f"q has batch size {B}, expected 1 with cu_seqlens (sequences are packed along T)")
    return offsets - 1


def _check_inputs(call, *states, g="g"):
    """Checks the arguments that all ops of chunks share. `states` names those that have the shape of a state, `g` the
    argument with the gates.

    Returns:
        state_shape: [N, H_v, K, V], or [N, H_v, V, K] with state_v_first.
        compute_dtype: the dtype of the arithmetic, of states, and of g and beta without activations.
    """
    N = _check_tokens(call, g, "beta")
    q, (_, _, H_v, V) = call.q, call.v.shape
    K = q.shape[-1]
    if call.state_v_first:
        state_shape, symbols = (N, H_v, V, K), "[N, H_v, V, K], state_v_first"
    else:
        state_shape, symbols = (N, H_v, K, V), "[N, H_v, K, V]"
    for name in states:
        if getattr(call, name) is not None:
            _check_floating(call, name)
            _check_shape(call, name, state_shape, symbols)
    _check_activations(call, H_v)
    return state_shape, torch.float64 if q.dtype == torch.float64 else torch.float32


def _without_gate(name):
    return f"{name} is a tensor, expected None without use_gate_in_kernel"


def _check_with_gate(call, name, expected):
    """Checks that the argument is a tensor if and only if use_gate_in_kernel is True."""
    is_tensor = getattr(call, name) is not None
    _check(call, call.use_gate_in_kernel or not is_tensor, lambda: _without_gate(name))
    missing = f"{name} is None, expected {expected} with use_gate_in_kernel"
    _check(call, is_tensor or not call.use_gate_in_kernel, lambda: missing)


def _check_activations(call, H_v):
    _check_with_gate(call, "A_log", "a tensor [H_v]")
    for name in ("A_log", "dt_bias"):
        if getattr(call, name) is not None:
            _check(call, call.use_gate_in_kernel, lambda name=name: _without_gate(name))
            _check_floating(call, name)
            _check_shape(call, name, (H_v,), "[H_v]")
    _check(
        call,
        call.use_beta_sigmoid_in_kernel or not call.allow_neg_eigval,
        lambda: "allow_neg_eigval is expected with use_beta_sigmoid_in_kernel only",
    )


def _shape_of_h(call, N):
    """V-first, as h_shape of csrc/passes.cpp."""
    B, T, H_v, V = call.v.shape
    padding = CHUNK - 1 if call.cu_seqlens is None else (CHUNK - 1) * N
    return B, (T + padding) // CHUNK, H_v, V, call.q.shape[3]


def _fake_results(call, output_low_level, output_h):
    """(g_cumsum, A, o, h, final_state), as allocate_forward of csrc/passes.cpp returns them."""
    state_shape, compute_dtype = _check_inputs(call, "initial_state")
    check_state_dtype(type(call).__name__, call.state_dtype)
    q = call.q
    (B, T, H_v, V), N = call.v.shape, state_shape[0]

    def empty(requested, shape, dtype):
        return q.new_empty(shape if requested else (0,), dtype=dtype)

    h = empty(output_h, _shape_of_h(call, N), q.dtype)
    return (
        empty(output_low_level, (B, T, H_v), compute_dtype),
        empty(output_low_level, (B, T, H_v, CHUNK), q.dtype),
        empty(True, (B, T, H_v, V), q.dtype),
        h.transpose(-2, -1) if output_h and not call.state_v_first else h,
        empty(call.output_final_state, state_shape, compute_dtype if call.state_dtype is None else call.state_dtype),
    )


@_fake_of(schemas.forward)
def _fake_forward(call):
    _, _, o, _, final_state = _fake_results(call, output_low_level=False, output_h=False)
    return o, final_state


def _split_qkv(x, H_k, K, H_v):
    """q, k and v of a tensor [B, T, 2 H_k K + H_v V], as split_tokens of csrc/tokens.cpp."""
    q, k, v = x.split([H_k * K, H_k * K, x.shape[-1] - 2 * H_k * K], -1)
    return q.unflatten(-1, (H_k, K)), k.unflatten(-1, (H_k, K)), v.unflatten(-1, (H_v, -1))


def _split_tokens(call):
    """The parts of a call's mixed_qkv, with the checks of csrc/call.cpp: split."""
    x, H_k, K = call.mixed_qkv, call.num_k_heads, call.head_k_dim
    _check_floating(call, "mixed_qkv")
    _check_rank(call, "mixed_qkv", 3, "[B, T, 2 H_k K + H_v V]")
    _check_rank(call, "g", 3, "[B, T, H_v]")
    _check(call, H_k >= 1, lambda: f"num_k_heads is {H_k}, expected at least 1")
    _check(call, K >= 1, lambda: f"head_k_dim is {K}, expected at least 1")
    width, H_v = x.shape[2], call.g.shape[2]
    values = width - 2 * H_k * K
    _check(
        call,
        H_v >= 1 and values > 0 and values % H_v == 0,
        lambda: (
            f"mixed_qkv has {width} channels, expected 2 H_k K + H_v V, with num_k_heads H_k = {H_k}, head_k_dim K = "
            f"{K} and the H_v = {H_v} heads of g"
        ),
    )
    return _split_qkv(x, H_k, K, H_v)


def _unpacked_arguments(call):
    """The arguments of a packed call that the call on q, k and v has too."""
    return {name: x for name, x in call._asdict().items() if name not in ("mixed_qkv", "num_k_heads", "head_k_dim")}


@_fake_of(schemas.forward_packed)
def _fake_forward_packed(call):
    return _fake_forward(schemas.ForwardCall(*_split_tokens(call), **_unpacked_arguments(call)))


@_fake_of(schemas.backward_packed)
def _fake_backward_packed(call):
    arguments = _unpacked_arguments(call) | {"g": None, "A": None, "g_raw": call.g}
    _, _, _, *others = _fake_backward(schemas.BackwardCall(*_split_tokens(call), **arguments))
    return call.mixed_qkv.new_empty(call.mixed_qkv.shape), *others


@_fake_of(schemas.forward_low_level)
def _fake_low_level(call):
    return _fake_results(call, output_low_level=True, output_h=call.output_h)


def _check_backward_inputs(call, *states):
    """_check_inputs for an op of the backward, whose gates are g, g_raw or both."""
    _check(
        call,
        call.g is not None or call.g_raw is not None,
        lambda: "g and g_raw are None, expected the sums of the gates as g, or the g of the forward as g_raw",
    )
    checked = _check_inputs(call, *states, g="g_raw" if call.g is None else "g")
    if call.g is not None:
        condition = "with g and without use_gate_in_kernel"
        has_g_raw = call.g_raw is not None
        _check(call, call.use_gate_in_kernel or not has_g_raw, lambda: f"g_raw is a tensor, expected None {condition}")
        missing = "g_raw is None, expected the g of the forward, a tensor [B, T, H_v], with use_gate_in_kernel"
        _check(call, has_g_raw or not call.use_gate_in_kernel, lambda: missing)
    if call.g_raw is not None:
        _check_floating(call, "g_raw")
        _check_shape(call, "g_raw", call.beta.shape, "[B, T, H_v]")
    _check_floating(call, "do")
    _check_shape(call, "do", call.v.shape, "[B, T, H_v, V], like v")
    return checked


@_fake_of(schemas.backward)
def _fake_backward(call):
    state_shape, compute_dtype = _check_backward_inputs(call, "initial_state", "dht")
    if call.A is not None:
        _check_dtype(call, "A", (call.q.dtype,), f"{str(call.q.dtype).removeprefix('torch.')}, the dtype of q")
        _check_shape(call, "A", (*call.beta.shape, CHUNK), f"[B, T, H_v, {CHUNK}]")
    return *_fake_gradients(call, compute_dtype), *_fake_sums(call, state_shape, compute_dtype)


def _fake_gradients(call, compute_dtype):
    """(dq, dk, dv, db, dg), the gradients that have tokens."""
    q = call.q
    return (
        q.new_empty(q.shape),
        q.new_empty(call.k.shape),
        q.new_empty(call.v.shape),
        q.new_empty(call.beta.shape, dtype=call.beta.dtype if call.use_beta_sigmoid_in_kernel else compute_dtype),
        q.new_empty(call.beta.shape, dtype=call.g_raw.dtype if call.use_gate_in_kernel else compute_dtype),
    )


def _fake_sums(call, state_shape, compute_dtype):
    """(dh0, dA_log, ddt_bias), the gradients without tokens."""
    q, H_v = call.q, call.v.shape[2]
    return (
        q.new_empty((0,) if call.initial_state is None else state_shape, dtype=compute_dtype),
        q.new_empty((0,) if call.A_log is None else (H_v,), dtype=compute_dtype),
        q.new_empty((0,) if call.dt_bias is None else (H_v,), dtype=compute_dtype),
    )


def _check_head_dim(call, name, symbol, dim, most):
    _check(
        call,
        0 < dim <= most and dim % HEAD_DIM_STEP == 0,
        lambda: (
            f"{name} has head dimension {symbol} = {dim}, expected a multiple of {HEAD_DIM_STEP} up to {most} on a GPU"
        ),
    )


def _fake_maps_and_workspace(call, N, compute_dtype, workspace_bytes, **pass_fields):
    """Maps and workspace of csrc/ranks.h. The GPU's dispatch returns how much workspace its kernels take."""
    q, (B, T, H_v, V) = call.q, call.v.shape
    H_k, K = q.shape[2:]
    maps = q.new_empty((len(call.map_sequences), H_v, V + K, K), dtype=compute_dtype)
    size = 0
    if any(isinstance(x, torch.SymInt) for x in (B, T, N, H_k, H_v, K, V)):
        size = torch.library.get_ctx().new_dynamic_size()  # the dispatch would fix all sizes it gets
    elif q.device.type == "cuda" and B * T > 0 and N > 0:
        _check_head_dim(call, "q", "K", K, _binary.MOST_KEY_DIM)
        _check_head_dim(call, "v", "V", V, MOST_VALUE_DIM)
        device = torch.cuda.current_device() if q.device.index is None else q.device.index
        card = _binary.card(device)
        _check(call, bool(card), lambda: f"q is on {q.device}, expected a GPU of this machine")
        shape = {"B": B, "T": T, "N": N, "H_k": H_k, "H_v": H_v, "K": K, "V": V, **card, **pass_fields}
        flags = {"varlen": call.cu_seqlens is not None, "auto_cp": call.auto_cp}
        size = workspace_bytes(**shape, **flags, use_qk_l2norm=call.use_qk_l2norm_in_kernel)
    return maps, q.new_empty((size,), dtype=torch.uint8)


@_fake_of(schemas.forward_begin)
def _fake_forward_begin(call):
    state_shape, dtype = _check_inputs(call, "initial_state")
    return (
        *_fake_maps_and_workspace(call, state_shape[0], dtype, _binary.forward_workspace_bytes),
        call.q.new_empty(call.v.shape),
    )


@_fake_of(schemas.forward_finish)
def _fake_forward_finish(call):
    state_shape, dtype = _check_inputs(call, "initial_state")
    dtype = dtype if call.state_dtype is None else call.state_dtype
    return call.q.new_empty(state_shape if call.output_final_state else (0,), dtype=dtype)


@_fake_of(schemas.backward_begin)
def _fake_backward_begin(call):
    state_shape, dtype = _check_backward_inputs(call, "dht")
    activations = call.use_gate_in_kernel or call.use_beta_sigmoid_in_kernel
    maps_and_workspace = _fake_maps_and_workspace(
        call, state_shape[0], dtype, _binary.backward_workspace_bytes, activations=activations
    )
    return *maps_and_workspace, *_fake_gradients(call, dtype)


@_fake_of(schemas.backward_replay)
def _fake_backward_replay(call):
    _check_backward_inputs(call, "initial_state")


@_fake_of(schemas.backward_finish)
def _fake_backward_finish(call):
    return _fake_sums(call, *_check_backward_inputs(call, "initial_state", "dht"))


def _check_indices(call, N, tables):
    """Checks tables of indices with a row a sequence: name of the argument -> symbols, such as "[N, S]"."""
    for name, symbols in tables.items():
        table = getattr(call, name)
        if table is not None:
            _check_dtype(call, name, _INDICES, None)
            _check_rank(call, name, len(symbols.split()), symbols)
            _check(
                call,
                table.shape[0] == N,
                lambda name=name, rows=table.shape[0], symbols=symbols: (
                    f"{name} has {rows} rows, expected {N}, the number of sequences ({symbols})"
                ),
            )


def _check_pool(call, N, states, tables, v_first=True, float8=True):
    """Checks states [.., H_v, V, K] and tables of indices with a row a sequence.

    Args:
        N: the number of sequences.
        states, tables: name of the argument -> symbols of its dimensions, such as "[slots, H_v, V, K]".
        v_first: False if the states are [.., H_v, K, V].
        float8: whether states may have 8 bits.
    """
    K, (_, _, H_v, V) = call.q.shape[-1], call.v.shape
    for name, symbols in states.items():
        x = getattr(call, name)
        if x is not None:
            if float8:
                text = "bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2"
                _check_dtype(call, name, (*FLOATING, *FLOAT8), text)
            else:
                _check_floating(call, name)
            _check_rank(call, name, len(symbols.split()), symbols)
            _check_shape(call, name, (*x.shape[:-3], H_v, *((V, K) if v_first else (K, V))), symbols)
    _check_indices(call, N, tables)


def _check_tables(call, N):
    """The checks of csrc/pool.cpp on the tables of a prefill, and on which arguments it has."""
    indices = {"state_indices": "[N]", "initial_state_indices": "[N]", "checkpoint_indices": "[N, blocks]"}
    _check_indices(call, N, indices)
    if call.has_initial_state is not None:
        _check_dtype(call, "has_initial_state", (torch.bool,), None)
        _check_shape(call, "has_initial_state", (N,), "[N]")
    every = call.checkpoint_every
    _check(call, every >= 0, lambda: f"checkpoint_every is {every}, expected at least 0")
    destinations = (call.checkpoint_indices is not None) + (call.checkpoints is not None)
    _check(
        call,
        destinations == (every > 0),
        lambda: (
            f"checkpoint_every is {every} with {destinations} of checkpoint_indices and checkpoints, expected one of "
            "them"
            if every
            else "checkpoint_indices or checkpoints is a tensor, expected None without checkpoint_every"
        ),
    )


def _check_h(call, N):
    if call.h is None:
        return
    _check_dtype(call, "h", (call.q.dtype,), f"{str(call.q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_shape(call, "h", _shape_of_h(call, N), "[B, chunks, H_v, V, K]")
    every = call.checkpoint_every
    _check(
        call,
        every % CHUNK == 0,
        lambda: f"h is a tensor, expected None with checkpoint_every {every}, no multiple of {CHUNK}",
    )


@_fake_of(schemas.prefill)
def _fake_prefill(call):
    N = _check_tokens(call, "g", "beta")
    _check_activations(call, call.v.shape[2])
    states = {"state_pool": "[slots, H_v, V, K]", "checkpoints": "[total, H_v, V, K]"}
    _check_pool(call, N, states, {})
    _check_tables(call, N)
    _check_h(call, N)
    if call.out is None:
        return call.q.new_empty(call.v.shape)
    _check_dtype(call, "out", (call.q.dtype,), f"{str(call.q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_shape(call, "out", call.v.shape, "[B, T, H_v, V], like v")
    return call.q.new_empty((0,))


def _check_decode_tokens(call):
    N = _check_tokens(call, "a", "b")
    _check_gates_of_decoding(call)
    return N


def _check_state_per_sequence(call, N):
    _check(
        call,
        call.state_pool.shape[0] == N,
        lambda: (
            f"state_pool has {call.state_pool.shape[0]} states, expected {N}, the number of sequences, without "
            "state_indices"
        ),
    )


def _check_output(call):
    """The fake result of decoding."""
    if call.out is None:
        return call.q.new_empty(call.v.shape)
    _check_dtype(call, "out", (call.q.dtype,), f"{str(call.q.dtype).removeprefix('torch.')}, the dtype of q")
    _check_shape(call, "out", call.v.shape, "[B, T, H_v, V], like v")
    return call.q.new_empty((0,))  # o is in `out`


@_fake_of(schemas.decode)
def _fake_decode(call):
    N = _check_decode_tokens(call)
    state = "H_v, V, K]" if call.state_v_first else "H_v, K, V]"
    states = {"state_pool": f"[slots, {state}", "intermediate_states": f"[rows, steps, {state}"}
    rank = 0 if call.state_indices is None else call.state_indices.dim()
    if call.state_indices is not None:
        _check(call, rank in (1, 2), lambda: f"state_indices has {rank} dimensions, expected 1 or 2 ([N] or [N, S])")
    tables = {"state_indices": "[N]" if rank == 1 else "[N, S]", "num_accepted_tokens": "[N]"}
    tables |= {"write_indices": "[N, S]", "intermediate_indices": "[N]", "parents": "[N, S]"}
    _check_pool(call, N, states, tables, call.state_v_first)
    if call.state_indices is None:
        _check_state_per_sequence(call, N)
        _check(
            call,
            call.write_indices is None,
            lambda: "write_indices is a tensor, expected None without state_indices",
        )
    if rank == 2:
        _check(call, call.state_indices.shape[1] >= 1, lambda: "state_indices has no columns, expected at least one")
    _check(
        call,
        rank == 2 or call.num_accepted_tokens is None,
        lambda: "num_accepted_tokens is a tensor, expected None unless state_indices is [N, S]",
    )
    _check(
        call,
        call.intermediate_states is not None or call.intermediate_indices is None,
        lambda: "intermediate_indices is a tensor, expected None without intermediate_states",
    )
    _check(
        call,
        call.parents is None or call.write_indices is not None or not call.update_state,
        lambda: "update_state is True, expected False with parents: a tree of tokens has no last state",
    )
    return _check_output(call)


def _check_gates_of_decoding(call):
    for name in ("A_log", "dt_bias"):
        if getattr(call, name) is not None:
            _check(call, call.A_log is not None, lambda: "dt_bias is a tensor, expected None without A_log")
            _check_floating(call, name)
            _check_shape(call, name, call.v.shape[2:3], "[H_v]")
    sigmoid = call.use_beta_sigmoid_in_kernel
    _check(
        call,
        (call.A_log is not None if sigmoid is None else sigmoid) or not call.allow_neg_eigval,
        lambda: "allow_neg_eigval is expected with use_beta_sigmoid_in_kernel only",
    )


@_fake_of(schemas.decode_packed)
def _fake_decode_packed(call):
    """Splits mixed_qkv as make_packed_decode_call of csrc/decode.cpp does, and checks the parts."""
    x, a, b = call.mixed_qkv, call.a, call.b
    _check(call, x.dim() in (2, 3), lambda: f"mixed_qkv has {x.dim()} dimensions, expected 2 or 3")
    _check(call, call.state_pool.dim() == 4, lambda: f"state_pool has {call.state_pool.dim()} dimensions, expected 4")
    if x.dim() == 2:
        x, a, b = (y.unsqueeze(1) for y in (x, a, b))
    _, H_v, *state = call.state_pool.shape
    V, K = state if call.state_v_first else reversed(state)
    keys = x.shape[-1] - H_v * V
    _check(call, keys > 0 and keys % (2 * K) == 0, lambda: "mixed_qkv is expected to have 2 H_k K + H_v V channels")
    fields = {name: y for name, y in call._asdict().items() if name != "mixed_qkv"} | {"a": a, "b": b}
    return _fake_decode(schemas.DecodeCall(*_split_qkv(x, keys // (2 * K), K, H_v), **fields))


@_fake_of(schemas.decode_buffered)
def _fake_decode_buffered(call):
    N = _check_decode_tokens(call)
    _, T, H_k, K = call.q.shape
    _, _, H_v, V = call.v.shape
    _check(call, T == 1, lambda: f"q has {T} tokens of each sequence, expected 1 ([B, 1, H_k, K])")
    tables = dict.fromkeys(("state_indices", "write_pos", "force_flush"), "[N]")
    _check_pool(call, N, {"state_pool": "[slots, H_v, V, K]"}, tables, float8=False)
    _check_rank(call, "d_cache", 4, "[slots, H_v, L, V]")
    if call.state_indices is None:
        _check_state_per_sequence(call, N)
    slots, L = call.state_pool.shape[0], call.d_cache.shape[2]
    _check(
        call,
        1 <= L <= DECODE_BACKLOG,
        lambda: f"d_cache has backlogs of {L} steps, expected 1 to {DECODE_BACKLOG} ([slots, H_v, L, V])",
    )
    compute_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    for name, shape, symbols, dtypes in (
        ("d_cache", (H_v, L, V), "[slots, H_v, L, V]", (compute_dtype, call.q.dtype)),
        ("k_cache", (H_k, L, K), "[slots, H_k, L, K]", (compute_dtype, call.q.dtype)),
        ("g_cache", (H_v, L), "[slots, H_v, L]", (compute_dtype,)),
    ):
        _check_dtype(call, name, tuple(dict.fromkeys(dtypes)), None)
        _check_shape(call, name, (slots, *shape), symbols)
    return _check_output(call)


def _check_norm(call):
    """As make_norm_call of csrc/norm.cpp."""
    o = call.o
    _check_floating(call, "o")
    _check(
        call,
        o.dim() >= 1 and o.shape[-1] >= 1,
        lambda: f"o has shape {list(o.shape)}, expected at least one channel ([.., V])",
    )
    for name in ("z", "weight", *(("dy",) if hasattr(call, "dy") else ())):
        _check_device(call, name, "o")
        _check_floating(call, name)
        if name == "weight":
            _check_shape(call, name, o.shape[-1:], "[V], the channels of o")
        else:
            _check_shape(call, name, o.shape, "[.., V], like o")
    _check_dtype(call, "z", (o.dtype,), f"{str(o.dtype).removeprefix('torch.')}, the dtype of o")
    _check(call, call.eps >= 0, lambda: f"eps is {call.eps}, expected at least 0")
    _check(
        call,
        call.activation in ("silu", "sigmoid"),
        lambda: f'activation is "{call.activation}", expected "silu" or "sigmoid"',
    )


@_fake_of(schemas.norm)
def _fake_norm(call):
    _check_norm(call)
    return call.o.new_empty(call.o.shape)


@_fake_of(schemas.norm_backward)
def _fake_norm_backward(call):
    _check_norm(call)
    o = call.o
    dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
    return o.new_empty(o.shape), o.new_empty(o.shape), o.new_empty(o.shape[-1:], dtype=dtype)
