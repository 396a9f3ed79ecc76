"""Force what the dispatch decides, to compare the ways in which a GPU can run a call: for tests and experts."""

import contextlib
from collections.abc import Iterator
from typing import TypedDict


class BackwardMode(TypedDict, total=False):
    """How the backward runs. The cost model decides the fields that are left out.

    Attributes:
        segment_chunks: chunks of 64 tokens a segment. 0 switches context parallelism off, as auto_cp=False does for a
            call, which wins over this field.
        cut_above: chunks, with segment_chunks only. If no sequence has more of them, the device cuts none. Left out, or
            0: every sequence longer than a segment is cut.
    """

    segment_chunks: int
    cut_above: int


class ForwardMode(BackwardMode, total=False):
    """How the forward runs: the fields of BackwardMode, and these.

    Attributes:
        value_tile: rows of a head's state (channels of its values) a CTA, 64 or 128.
        fused: whether one kernel does it all. True takes it for every call that it can serve, False for none. True goes
            with neither segments nor a value_tile of 64.
        whole_tile: rows a CTA, 64 or 128, with cut_above only: the tile where the device cuts no sequence. Left out, or
            0: value_tile.
    """

    value_tile: int
    fused: bool
    whole_tile: int


@contextlib.contextmanager
def forced_dispatch(*, forward: ForwardMode | None = None, backward: BackwardMode | None = None) -> Iterator[None]:
    """Force what the dispatch decides within a `with` block.

        with flash_qla.testing.forced_dispatch(forward={"fused": False}, backward={"segment_chunks": 4}):
            o, state = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)

    Blocks nest, and each restores at its end, also by an exception, what was in force before it. It holds for all
    threads of the process, because autograd runs the backward of GPU tensors in a thread of its own; so use it in one
    thread at a time. Calls on the CPU have one way to run, and do not change. The bits of a result may depend on the
    mode. flash_qla._C.forward_dispatch and backward_dispatch say what a call then launches.

    Args:
        forward: the mode of the forward; {} gives all decisions back to the cost model. None keeps what is in force.
        backward: the mode of the backward; {} and None as for forward.

    Raises:
        ValueError: a field has a value that no call can follow.
        TypeError: there is no such field, or a value is no integer.
        ImportError: flash_qla._C is missing (another Python than the wheel's).
    """
    from flash_qla import _C

    given = (None if mode is None else _C.Override(**mode) for mode in (forward, backward))
    previous = _C.exchange_overrides(*given)
    try:
        yield
    finally:
        _C.exchange_overrides(*previous)
