"""Force the decisions of the dispatch, for tests and experiments that compare the paths on a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Literal, TypedDict


class BackwardMode(TypedDict, total=False):
    """How the backward runs. The cost model decides the fields that are left out.

    Attributes
    ----------
    segment_chunks : int
        Chunks of 64 tokens per split. 0 splits no sequence. auto_cp=False of a call does the same, and wins over this
        field.
    cut_above : int
        Chunks of 64 tokens, only with segment_chunks or long_tile. A batch is long if a sequence has more, and the
        device splits no other batch. 0, the default, splits every sequence that is longer than a split.
    """

    segment_chunks: int
    cut_above: int


class ForwardMode(BackwardMode, total=False):
    """How the forward runs: the fields of BackwardMode, and these.

    Attributes
    ----------
    value_tile : int
        Rows of a head's state (channels of its values) per CTA, 64 or 128; with K > 128 only 128.
    fused : bool
        True: one kernel does all, for every call that it supports; over splits others compute their maps first. False:
        for no call. True excludes a value_tile of 64.
    long_tile : int
        Like value_tile, for long batches, with cu_seqlens but without max_seqlen. 0, the default, is value_tile.
    """

    value_tile: int
    fused: bool
    long_tile: int


@contextlib.contextmanager
def forced_dispatch(
    *,
    forward: ForwardMode | None = None,
    backward: BackwardMode | None = None,
    kernels: Literal["portable", "device"] | None = None,
) -> Iterator[None]:
    """Force the decisions of the dispatch within a `with` block.

        with flash_qla.testing.forced_dispatch(forward={"fused": False}, backward={"segment_chunks": 4}):
            o, state = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)

    Blocks nest. Each restores the previous modes at its end, after an exception too. A mode holds for all threads of
    the process, because autograd runs the backward of GPU tensors in a thread of its own; so use one thread at a time.
    Calls on the CPU do not change. The bits of a result may depend on the mode. flash_qla._C.forward_dispatch and
    backward_dispatch return which kernels a call then launches.

    Parameters
    ----------
    forward : ForwardMode, optional
        The mode of the forward. {} gives all decisions back to the cost model, None keeps the current mode.
    backward : BackwardMode, optional
        The mode of the backward; {} and None as for forward.
    kernels : "portable" or "device", optional
        "portable" makes a Hopper GPU run the kernels that every GPU from Ampere on has, which follow only
        segment_chunks and cut_above of a mode. Those that Hopper has others for are PTX there: driver 575 or newer
        compiles them, and caches them. "device" gives each GPU its own kernels again, None keeps the choice.

    Raises
    ------
    ValueError
        No call can have this mode, or kernels is another string.
    TypeError
        A field is unknown, or a value is not an integer.
    ImportError
        flash_qla._C is missing (another Python than the wheel's).
    """
    from flash_qla import _C

    if kernels not in (None, "portable", "device"):
        raise ValueError(
            f"flash_qla.testing.forced_dispatch: kernels is {kernels!r}, expected 'portable', 'device' or None"
        )
    overrides = (None if mode is None else _C.Override(**mode) for mode in (forward, backward))
    previous = _C.exchange_overrides(*overrides, None if kernels is None else kernels == "portable")
    try:
        yield
    finally:
        _C.exchange_overrides(*previous)
