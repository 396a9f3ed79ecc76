"""Numbers with several fields, as layout.py lays them out; states/consumer_position.cuh reads the same."""

import tilelang.language as T

from kernels_tl.core.common import extern
from kernels_tl.core.pipeline import Stage
from kernels_tl.layout import ConsumerBits, Ring


def _field(number, first, mask):
    return number >> first & mask if first else number & mask


def stage(ring):
    """The stage of K, Q, matrices and gates."""
    return Stage(_field(ring, Ring.STAGE, 3), _field(ring, Ring.PHASE, 1))


def value_stage(ring):
    """The stage of V."""
    return Stage(_field(ring, Ring.VALUE_STAGE, 1), _field(ring, Ring.VALUE_PHASE, 1))


def next_chunk(number, first=0):
    """A number whose ring, from bit `first` on, has moved on by one chunk. V's stage and phase count as one number."""
    in_last_stage = (number & (3 << first)) == ((Ring.STAGES - 1) << first)
    to_first_stage = (number ^ (1 << Ring.PHASE << first)) - ((Ring.STAGES - 1) << first)
    following = T.if_then_else(in_last_stage, to_first_stage, number + (1 << first))
    return (following + (1 << Ring.VALUE_STAGE << first)) & ((1 << Ring.END << first) - 1)


def position_of_thread(tile_bytes):
    """The thread's first position. tile_bytes is the size of a warpgroup's tile."""
    offset, column = extern("transposed_offset", returns="int32"), extern("first_column", returns="int32")
    warpgroup = T.truncdiv(T.get_thread_binding(), 128)
    return offset + warpgroup * (tile_bytes + (1 << ConsumerBits.WARPGROUP)) + (column << ConsumerBits.COLUMN)


def offset(position):
    """Bytes from the tiles of the CTA's two warpgroups, which follow one another."""
    return _field(position, ConsumerBits.OFFSET, 0xFFFF)


def column(position):
    return _field(position, ConsumerBits.COLUMN, 15)


def warpgroup(position):
    return _field(position, ConsumerBits.WARPGROUP, 1)


def ring(position):
    return position >> ConsumerBits.RING


def wave(position):
    """The entry of the next work tile in the ring of work tiles."""
    return Stage(
        _field(position, ConsumerBits.WAVE, ConsumerBits.WAVES - 1), _field(position, ConsumerBits.WAVE_PHASE, 1)
    )


def next_wave(position):
    """The position after this entry has been read. The entry and its phase count as one number."""
    last = 2 * ConsumerBits.WAVES - 1
    is_last = _field(position, ConsumerBits.WAVE, last) == last
    return T.if_then_else(is_last, position - (last << ConsumerBits.WAVE), position + (1 << ConsumerBits.WAVE))
