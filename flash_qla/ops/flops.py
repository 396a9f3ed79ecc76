"""FLOP counts of the ops, for torch.utils.flop_counter.FlopCounterMode.

A multiplication with its addition is 2 FLOP, as in PyTorch's own counts, and only products of matrices count. The
products are those of docs/design.md, per value head and chunk of C = 64 tokens, with a state K x V. G and F are the
gradients of Q K^T and, up to beta, of K K^T (kernels_tl/gradients/chunk_backward.py):

    forward     K S, Q S, K^T V_new                                           3 of C x K x V
                K K^T, Q K^T                                                  2 of C x C x K
                L residual, P V_new                                           2 of C x C x V

    backward    K S, K^T V_new: the states again                              2 of C x K x V
                K dS', Q^T dO, K^T U, dO S^T, U S^T, V_new dS'^T              6 of C x K x V
                K K^T, Q K^T, G K, G^T Q, (diag(beta) F + F^T diag(beta)) K   5 of C x C x K
                L residual, P^T dO, L^T dV_new, dO V_new^T, U V_new^T         5 of C x C x V
                A^T dA A^T, the gradient through the inverse                  2 of C x C x C

The last two are part of the formula, although the kernels take them from U and V_new. A token and value head takes

    forward     2 (3 K V + 2 C (K + V))              164 kFLOP at K = V = 128
    backward    2 (8 K V + 5 C (K + V) + 2 C^2)      442 kFLOP at K = V = 128
    decoding    2 (3 K V): S k, S q and the product of the change with k, which buffered decoding defers

A channel and token of the convolution takes 2 W, and 4 W in the backward, as PyTorch counts its own.

A count has all tokens of the call. It includes tokens after the last offset of cu_seqlens, because the host never reads
the offsets. Maps of splits and of ranks do not count, because their number depends on the lengths and on the card. If
a pass has several ops, the last one has the count of the whole pass.
"""

import math

from flash_qla._layout import CHUNK
from flash_qla.ops import schemas
from flash_qla.ops.later import when_imported


def forward_flop(K: int, V: int) -> int:
    """Per token and value head; the module has the products."""
    return 2 * (3 * K * V + 2 * CHUNK * (K + V))


def backward_flop(K: int, V: int) -> int:
    """Per token and value head; the module has the products."""
    return 2 * (8 * K * V + 5 * CHUNK * (K + V) + 2 * CHUNK * CHUNK)


def decode_flop(K: int, V: int) -> int:
    """Per token and value head; the module has the products."""
    return 2 * 3 * K * V


def _rule_formula(op, flop):
    """The count of an op with q [B, T, H_k, K] and v [B, T, H_v, V]."""
    call_type = schemas.call_of(op)

    def count(*args, out_shape=None, **kwargs):
        call = call_type(*args, **kwargs)
        B, T, H_v, V = call.v
        return B * T * H_v * flop(call.q[-1], V)

    return count


def _packed_formula(op, flop):
    """The same for mixed_qkv [B, T, 2 H_k K + H_v V]."""
    call_type = schemas.call_of(op)

    def count(*args, out_shape=None, **kwargs):
        call = call_type(*args, **kwargs)
        B, T, channels = call.mixed_qkv
        H_v, K = call.g[2], call.head_k_dim
        return B * T * H_v * flop(K, (channels - 2 * call.num_k_heads * K) // H_v)

    return count


def _convolution_formula(op, per_tap):
    """The op's count of FLOP, as PyTorch's of a convolution: per_tap of each channel and token."""
    call_type = schemas.call_of(op)

    def count(*args, out_shape=None, **kwargs):
        call = call_type(*args, **kwargs)
        return math.prod(call.x) * call.weight[-1] * per_tap

    return count


def _region_formula(op, flop, per_tap):
    """The op's count of FLOP: the delta rule's and the convolution's."""
    call_type = schemas.call_of(op)

    def count(*args, out_shape=None, **kwargs):
        call = call_type(*args, **kwargs)
        B, T, H_v, V = call.z
        return B * T * H_v * flop(call.head_k_dim, V) + math.prod(call.mixed) * call.conv_weight[-1] * per_tap

    return count


def _decode_packed_formula(*args, out_shape=None, **kwargs):
    call = schemas.DecodePackedCall(*args, **kwargs)
    _, H_v, *state = call.state_pool  # [V, K] or [K, V]
    return math.prod(call.mixed_qkv[:-1]) * H_v * decode_flop(*state)


def _decode_region_formula(*args, out_shape=None, **kwargs):
    call = schemas.call_of(schemas.region_decode)(*args, **kwargs)
    V, K = call.state_pool[2:]
    taps = 0 if call.conv_weight is None else call.conv_weight[-1]
    return math.prod(call.z) // V * decode_flop(K, V) + math.prod(call.mixed) * taps * 2


def _zero_formula(*args, out_shape=None, **kwargs):
    return 0


def _register(flop_counter):
    for op, flop in (
        (schemas.forward, forward_flop),
        (schemas.forward_low_level, forward_flop),
        (schemas.forward_finish, forward_flop),
        (schemas.prefill, forward_flop),
        (schemas.backward, backward_flop),
        (schemas.backward_finish, backward_flop),
        (schemas.decode, decode_flop),
        (schemas.decode_buffered, decode_flop),
    ):
        flop_counter.register_flop_formula(op.overloadpacket)(_rule_formula(op, flop))
    for op, flop in ((schemas.forward_packed, forward_flop), (schemas.backward_packed, backward_flop)):
        flop_counter.register_flop_formula(op.overloadpacket)(_packed_formula(op, flop))
    flop_counter.register_flop_formula(schemas.decode_packed.overloadpacket)(_decode_packed_formula)
    for op, per_tap in ((schemas.convolution, 2), (schemas.convolution_prefill, 2), (schemas.convolution_backward, 4)):
        flop_counter.register_flop_formula(op.overloadpacket)(_convolution_formula(op, per_tap))
    for op, flop, per_tap in (
        (schemas.region, forward_flop, 2),
        (schemas.region_prefill, forward_flop, 2),
        (schemas.region_backward, backward_flop, 4),
    ):
        flop_counter.register_flop_formula(op.overloadpacket)(_region_formula(op, flop, per_tap))
    flop_counter.register_flop_formula(schemas.region_decode.overloadpacket)(_decode_region_formula)
    without_products = (schemas.norm, schemas.norm_backward)
    for op in (schemas.forward_begin, schemas.backward_begin, schemas.backward_replay, *without_products):
        flop_counter.register_flop_formula(op.overloadpacket)(_zero_formula)


when_imported("torch.utils.flop_counter", _register, "flash_qla's ops have no FLOP counts")
