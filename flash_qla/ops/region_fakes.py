"""Fakes of the region's ops, from those of its parts (see fakes.py)."""

import math

from flash_qla.ops import schemas
from flash_qla.ops.convolution_fakes import (
    _fake_convolution,
    _fake_convolution_backward,
    _fake_convolution_prefill,
)
from flash_qla.ops.fakes import (
    _check,
    _check_device,
    _check_dtype,
    _check_floating,
    _check_rank,
    _check_shape,
    _fake_backward_packed,
    _fake_decode,
    _fake_forward_packed,
    _fake_norm,
    _fake_norm_backward,
    _fake_of,
    _fake_prefill,
    _split_qkv,
)


def _check_region(call):
    """The checks of csrc/region.cpp on z, a and b, and the channels of mixed."""
    mixed, z = call.mixed, call.z
    _check_rank(call, "mixed", 3, "[B, T, D]")
    B, T, D = mixed.shape
    H_k, K = call.num_k_heads, call.head_k_dim
    _check_device(call, "z", "mixed")
    _check_dtype(call, "z", (mixed.dtype,), f"{str(mixed.dtype).removeprefix('torch.')}, the dtype of mixed")
    _check_rank(call, "z", 4, "[B, T, H_v, V]")
    H_v, V = z.shape[2:]
    _check_shape(call, "z", (B, T, H_v, V), "[B, T, H_v, V]")
    _check(
        call,
        H_k >= 1 and K >= 1 and D - 2 * H_k * K == H_v * V,
        lambda: (
            f"mixed has {D} channels, expected 2 H_k K + H_v V, with num_k_heads H_k = {H_k}, head_k_dim K = {K} and "
            f"the heads of z, H_v = {H_v} of V = {V}"
        ),
    )
    for name in ("a", "b"):
        _check_device(call, name, "mixed")
        _check_floating(call, name)
        _check_shape(call, name, (B, T, H_v), "[B, T, H_v]")


_RULE_FLAGS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def _part_of_region(op, call, **arguments):
    """The call of a part's op: the arguments that it shares with the region's, and the others."""
    call_type = schemas.call_of(op)
    shared = {name: x for name, x in call._asdict().items() if name in call_type._fields}
    return call_type(**(shared | arguments))


@_fake_of(schemas.region)
def _fake_region(call):
    _check_region(call)
    windows = {"bias": call.conv_bias, "use_silu": True, "initial_state": call.initial_window}
    convolution = _part_of_region(schemas.convolution, call, x=call.mixed, weight=call.conv_weight, **windows)
    x, final_window = _fake_convolution(convolution)
    rule = _part_of_region(schemas.forward_packed, call, mixed_qkv=x, g=call.a, beta=call.b, **_RULE_FLAGS)
    o, final_state = _fake_forward_packed(rule)
    norm = {"weight": call.norm_weight, "eps": call.norm_eps, "activation": call.norm_activation}
    return _fake_norm(_part_of_region(schemas.norm, call, o=o, **norm)), final_state, final_window, o


@_fake_of(schemas.region_backward)
def _fake_region_backward(call):
    _check_region(call)
    norm = {"weight": call.norm_weight, "eps": call.norm_eps, "activation": call.norm_activation}
    do, dz, dnorm_weight = _fake_norm_backward(_part_of_region(schemas.norm_backward, call, **norm))
    rule = {"mixed_qkv": call.mixed, "g": call.a, "beta": call.b, "do": do}
    dx, db, da, *sums = _fake_backward_packed(_part_of_region(schemas.backward_packed, call, **rule, **_RULE_FLAGS))
    windows = {"bias": call.conv_bias, "use_silu": True, "initial_state": call.initial_window, "dht": call.dwindow}
    tokens = {"x": call.mixed, "weight": call.conv_weight, "dy": dx}
    convolution = _part_of_region(schemas.convolution_backward, call, **tokens, **windows)
    dmixed, dconv_weight, dconv_bias, dwindow0 = _fake_convolution_backward(convolution)
    dh0, dA_log, ddt_bias = sums
    return (dmixed, dz, da, db, dconv_weight, dconv_bias, dnorm_weight, dA_log, ddt_bias, dh0, dwindow0)


def _check_windows_of_decoding(call, D):
    """As DecodeRegion::make_convolution of csrc/decode_region.cpp."""
    weight, pool, snapshots = call.conv_weight, call.window_pool, call.intermediate_windows
    if weight is None:
        for name in ("conv_bias", "window_pool", "intermediate_windows"):
            _check(
                call,
                getattr(call, name) is None,
                lambda name=name: f"{name} is a tensor, expected None without conv_weight",
            )
        return
    _check(call, pool is not None, lambda: "window_pool is None, expected a tensor with conv_weight")
    _check_rank(call, "window_pool", 3, "[slots, D, columns]")
    indices, B, T = call.state_indices, *call.mixed.shape[:2]
    if call.num_accepted_tokens is not None:
        _check(
            call,
            call.parents is None,
            lambda: "parents is a tensor, expected None with num_accepted_tokens: accepted drafts are a chain",
        )
        W = weight.shape[-1] if weight.dim() > 1 else 0
        min_columns = W - 2 + (indices.shape[1] if indices.dim() == 2 else 1)
        _check(
            call,
            pool.shape[2] >= min_columns,
            lambda: (
                f"window_pool has {pool.shape[2]} columns, expected at least {min_columns} with num_accepted_tokens: "
                "W - 1, and one for each column of state_indices but the first"
            ),
        )
        pool = pool[..., : max(W - 1, 0)]
    windows = {"x": call.mixed.new_empty(B, T, D), "weight": weight, "bias": call.conv_bias, "state_pool": pool}
    windows |= {"use_silu": True, "state_indices": indices[:, 0] if indices.dim() == 2 else indices}
    _fake_convolution_prefill(_part_of_region(schemas.convolution_prefill, call, **windows))
    slots = call.state_pool.shape[0]
    _check(
        call,
        pool.shape[0] == slots,
        lambda: f"window_pool has {pool.shape[0]} slots, expected {slots}, those of state_pool",
    )
    if snapshots is not None:
        symbols = "[rows, steps, D, W - 1]"
        _check_device(call, "intermediate_windows", "mixed")
        dtype = str(pool.dtype).removeprefix("torch.")
        _check_dtype(call, "intermediate_windows", (pool.dtype,), f"{dtype}, the dtype of window_pool")
        _check_rank(call, "intermediate_windows", 4, symbols)
        _check_shape(call, "intermediate_windows", (*snapshots.shape[:2], D, weight.shape[-1] - 1), symbols)
        are_sliding = min(snapshots.shape[1], snapshots.shape[3]) > 1 and snapshots.stride(1) == snapshots.stride(3)
        _check(
            call,
            call.parents is None or not are_sliding,
            lambda: (
                "intermediate_windows share memory from step to step, expected windows of their own with parents: only "
                "a chain's slide"
            ),
        )


@_fake_of(schemas.region_decode)
def _fake_region_decode(call):
    """Checks stand-ins of the parts' tensors, as DecodeRegion of csrc/decode_region.cpp does."""
    mixed, pool = call.mixed, call.state_pool
    _check_device(call, "state_pool", "mixed")
    _check_rank(call, "state_pool", 4, "[slots, H_v, V, K]")
    symbols = "[B, T, 2 H_k K + H_v V] or [B, T, H_k, 2 K + H_v / H_k V]"
    _check(call, mixed.dim() in (3, 4), lambda: f"mixed has {mixed.dim()} dimensions, expected 3 or 4 ({symbols})")
    B, T, *channels = mixed.shape
    H_v, V, K = pool.shape[1:]
    D = math.prod(channels)
    H_k = (D - H_v * V) // (2 * K) if K else 0
    fits = H_k >= 1 and 2 * H_k * K + H_v * V == D and channels in ([D], [H_k, D // H_k])
    _check(
        call,
        fits,
        lambda: f"mixed has {D} channels, expected 2 H_k K + H_v V, of state_pool K = {K} and H_v V = {H_v * V}",
    )
    _check(
        call,
        H_v % H_k == 0,
        lambda: f"mixed has {H_k} key heads, expected a divisor of the state_pool's H_v = {H_v}",
    )
    for name, values in (("z", (V,)), ("a", ()), ("b", ())):
        heads = (H_k, H_v // H_k) if getattr(call, name).dim() == 4 + len(values) else (H_v,)
        symbols = ["B", "T", *(("H_k", "H_v / H_k") if len(heads) == 2 else ("H_v",)), *("V" for _ in values)]
        _check_device(call, name, "mixed")
        _check_shape(call, name, (B, T, *heads, *values), f"[{', '.join(symbols)}]")
        _check_floating(call, name)
    _check_dtype(call, "z", (mixed.dtype,), f"{str(mixed.dtype).removeprefix('torch.')}, the dtype of mixed")
    _check_windows_of_decoding(call, D)
    q, v, gates = mixed.new_empty(B, T, H_k, K), mixed.new_empty(B, T, H_v, V), mixed.new_empty(B, T, H_v)
    y = _fake_decode(_part_of_region(schemas.decode, call, q=q, k=q, v=v, a=gates, b=gates))
    norm = {"weight": call.norm_weight, "eps": call.norm_eps, "activation": call.norm_activation}
    _fake_norm(_part_of_region(schemas.norm, call, o=v, z=v, **norm))
    return y


@_fake_of(schemas.region_prefill)
def _fake_region_prefill(call):
    _check_region(call)
    windows = {"bias": call.conv_bias, "use_silu": True, "state_pool": call.window_pool}
    windows |= {"checkpoints": call.window_checkpoints, "x": call.mixed, "weight": call.conv_weight}
    x = _fake_convolution_prefill(_part_of_region(schemas.convolution_prefill, call, **windows))
    q, k, v = _split_qkv(x, call.num_k_heads, call.head_k_dim, call.z.shape[2])
    tokens = {"q": q, "k": k, "v": v, "g": call.a, "beta": call.b, "out": None}
    o = _fake_prefill(_part_of_region(schemas.prefill, call, **tokens, **_RULE_FLAGS))
    norm = {"weight": call.norm_weight, "eps": call.norm_eps, "activation": call.norm_activation}
    y = _fake_norm(_part_of_region(schemas.norm, call, o=o, **norm))
    if call.out is None:
        return y
    _check_device(call, "out", "z")
    _check_dtype(call, "out", (y.dtype,), f"{str(y.dtype).removeprefix('torch.')}, the dtype of z")
    _check_shape(call, "out", call.z.shape, "[B, T, H_v, V], like z")
    return y.new_empty((0,))
