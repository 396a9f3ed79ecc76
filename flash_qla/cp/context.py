"""Which tokens of which sequences a rank holds."""

import bisect
import dataclasses
import itertools
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """A run of tokens that a rank holds.

    Its first sequence may begin in an earlier part, its last sequence may go on in a later one. Both may be the same.
    """

    slot: int  # its index among the parts of all ranks, in the order of the tokens
    begin: int  # its tokens in the rank's tensors: begin, ..., end - 1
    end: int
    first: int  # row of its first sequence, among the rank's sequences
    last: int  # row of its last sequence
    parts_before: int  # earlier parts that have tokens of its first sequence
    parts_after: int  # later parts that have tokens of its last sequence
    tokens_before: int  # tokens of its first sequence in the earlier parts


# FLA's fields for a part: the name with one part per rank, the name with two
_FIELDS_BY_PART = {
    "pre_num_ranks": "pre_num_ranks_by_part",
    "post_num_ranks": "post_num_ranks_by_part",
    "is_first_rank": "is_first_by_part",
    "is_last_rank": "is_last_by_part",
    "pre_num_conv_tokens": "pre_num_conv_tokens_by_part",
}


def check_offsets(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is of type {type(x).__name__}; pass a tensor [N + 1], int32 or int64, because the kernels read "
            "the offsets on the device"
        )
    if x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {x.dtype} of shape {list(x.shape)}, expected [N + 1], int32 or int64")


@dataclasses.dataclass(eq=False)
class CPContext:
    """The tokens that a rank holds of all sequences, and how these sequences go on in other ranks.

    build_cp_context computes the fields; their names are those of FLA's FLACPContext. A part is a run of tokens. With
    layout "contiguous" a rank has one part, described by the fields from pre_num_ranks to pre_num_conv_tokens. With
    "zigzag" it has two parts, one after the other in its tensors, described by the fields that end in _by_part. The
    fields of the other layout are None.

    Raises
    ------
    ValueError
        cu_seqlens_cpu is None, or offsets have another shape or dtype.
    TypeError
        Offsets are not a tensor.
    """

    group: "torch.distributed.ProcessGroup | None"
    cu_seqlens: torch.Tensor  # [N + 1] int32: the rank's own sequences; a sequence in both parts counts twice
    cu_seqlens_cpu: torch.Tensor  # the same on the CPU
    layout: str = "contiguous"
    conv1d_kernel_size: int | None = None
    part_len: int | None = None  # tokens per part, with zigzag
    front_num_seqs: int | None = None  # sequences of the first part, with zigzag
    pre_num_ranks: int | None = None  # earlier parts that have tokens of its first sequence
    post_num_ranks: int | None = None  # later parts that have tokens of its last sequence
    is_first_rank: bool | None = None  # whether its first sequence begins in it
    is_last_rank: bool | None = None  # whether its last sequence ends in it
    pre_num_conv_tokens: int | None = None  # tokens of its first sequence in the earlier parts
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None
    # Not FLA's:
    sequences: tuple[int, ...] | None = None  # the index of each of the rank's sequences among all
    num_tokens: int | None = None  # the rank's tokens, with padding after the last offset; None: without padding

    def __post_init__(self):
        rank, self._world_size = 0, 1
        if self.group is not None:
            from torch.distributed import _functional_collectives  # noqa: F401  registers fakes, for torch.compile

            rank, self._world_size, self._group_name = self.group.rank(), self.group.size(), self.group.group_name
        if self.cu_seqlens_cpu is None:
            raise ValueError(
                "cp_context has no cu_seqlens_cpu, expected the offsets of the rank's sequences on the CPU"
            )
        for name in ("cu_seqlens", "cu_seqlens_cpu"):
            check_offsets(name, getattr(self, name))
        offsets = self.cu_seqlens_cpu.tolist()
        self._tokens = offsets[-1] if self.num_tokens is None else self.num_tokens
        if self.layout == "contiguous":
            slots, rows = (rank,), (0, len(offsets) - 1)
        else:
            slots, rows = (rank, 2 * self._world_size - 1 - rank), (0, self.front_num_seqs, len(offsets) - 1)
        self._parts = tuple(
            Part(
                slot=slot,
                begin=offsets[first],
                end=offsets[end],
                first=first,
                last=end - 1,
                parts_before=self._part_field("pre_num_ranks", i),
                parts_after=self._part_field("post_num_ranks", i),
                tokens_before=self._part_field("pre_num_conv_tokens", i),
            )
            for i, (slot, (first, end)) in enumerate(zip(slots, itertools.pairwise(rows), strict=True))
        )
        self._part_len = self._tokens // len(slots)

    def _part_field(self, name: str, i: int):
        return getattr(self, name) if self.layout == "contiguous" else getattr(self, _FIELDS_BY_PART[name])[i]

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences that the rank has tokens of."""
        return len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        """Whether there is a process group."""
        return self.group is not None


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: "torch.distributed.ProcessGroup | None" = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    layout: str = "contiguous",
    num_tokens: int | None = None,
) -> CPContext:
    """Compute which tokens of all sequences this rank holds, of a group of W ranks.

    The call waits for the device unless cu_seqlens_cpu is given. Calls with the context never wait.

        context = build_cp_context(cu_seqlens, conv1d_kernel_size=4)
        q, k, v, g, beta = ...  # the tokens of this rank, [1, T / W, ...]
        o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)

    Parameters
    ----------
    cu_seqlens : Tensor
        Offsets of all sequences in the packed tokens, [N + 1], int32 or int64, from 0, not decreasing. No rank has an
        empty sequence.
    group : ProcessGroup, optional
        The ranks; the default group if None.
    conv1d_kernel_size : int, optional
        Width, in tokens, of the causal convolution before the Gated Delta Rule, for exchange_halo.
    cu_seqlens_cpu : Tensor, optional
        cu_seqlens on the CPU.
    layout : str, default 'contiguous'
        "contiguous": rank r has part r of W equal parts. "zigzag": rank r has parts r and 2 W - 1 - r of 2 W equal
        parts, one after the other.
    num_tokens : int, optional
        T, the number of all tokens of all ranks: a multiple of W, with zigzag of 2 W. By default it is the last offset.
        Tokens from the last offset on belong to no sequence: their outputs and gradients are zero, and a rank may have
        nothing but such tokens.

    Returns
    -------
    context : CPContext
        For the arguments named cp_context. Its `cu_seqlens` are the offsets of the rank's own sequences, on the device
        of cu_seqlens. Its `sequences` are the indices of these sequences among all.

    Raises
    ------
    ValueError
        layout is another word; cu_seqlens is not as above; the tokens do not divide; or there is no group.
    TypeError
        cu_seqlens or cu_seqlens_cpu is not a tensor.
    """
    check_offsets("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        check_offsets("cu_seqlens_cpu", cu_seqlens_cpu)
    group = torch.distributed.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group is None, expected a process group, as there is no default group")
    rank, world_size = group.rank(), group.size()
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout is {layout!r}, expected 'contiguous' or 'zigzag'")
    slots = (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)
    count = len(slots) * world_size
    offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    if not offsets or offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens is {offsets}, expected offsets that begin with 0 and do not decrease")
    total = offsets[-1] if num_tokens is None else num_tokens
    if total <= 0 or total % count != 0 or total < offsets[-1]:
        got = f"cu_seqlens ends with {total} tokens" if num_tokens is None else f"num_tokens is {total}"
        hint = "; with padding pass num_tokens" if num_tokens is None else f", at least {offsets[-1]}"
        raise ValueError(f"{got}, expected a positive multiple of {count}, {layout}{hint}")
    part_len = total // count

    local_offsets, sequences, part_fields = [0], [], []
    for i, slot in enumerate(slots):
        begin, end = slot * part_len, min((slot + 1) * part_len, offsets[-1])
        first, last = bisect.bisect_right(offsets, begin) - 1, bisect.bisect_left(offsets, end) - 1
        rows = [n for n in range(first, last + 1) if offsets[n] < offsets[n + 1]]
        local_offsets += [i * part_len + min(offsets[n + 1], end) - begin for n in rows]
        sequences += rows
        parts_before = parts_after = tokens_before = 0
        if rows:
            parts_before, parts_after = slot - offsets[first] // part_len, (offsets[last + 1] - 1) // part_len - slot
            tokens_before = begin - offsets[first]
        part_fields.append((parts_before, parts_after, parts_before == 0, parts_after == 0, tokens_before))
        if i == 0:
            front_num_seqs = len(rows)
    local_offsets = torch.tensor(local_offsets, dtype=torch.int32, device="cpu")
    if layout == "contiguous":
        fields = dict(zip(_FIELDS_BY_PART, part_fields[0], strict=True))
    else:
        fields = dict(zip(_FIELDS_BY_PART.values(), zip(*part_fields, strict=True), strict=True))
        fields |= {"part_len": part_len, "front_num_seqs": front_num_seqs}
    return CPContext(
        group=group,
        cu_seqlens=local_offsets.to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=local_offsets,
        layout=layout,
        conv1d_kernel_size=conv1d_kernel_size,
        sequences=tuple(sequences),
        num_tokens=part_len * len(slots),
        **fields,
    )


def as_ours(context) -> CPContext:
    """The context, also if it is FLA's FLACPContext, which has the same fields."""
    if isinstance(context, CPContext):
        return context
    if not hasattr(context, "cu_seqlens_cpu"):
        raise TypeError(f"cp_context is of type {type(context).__name__}, expected a CPContext, or FLA's FLACPContext")
    fields = [field.name for field in dataclasses.fields(CPContext)]
    return CPContext(**{name: getattr(context, name) for name in fields if hasattr(context, name)})


def check_tokens(name: str, x: torch.Tensor, context: CPContext) -> None:
    if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != context._tokens:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, expected [1, {context._tokens}, ...], the tokens that cp_context gives "
            "this rank; build_cp_context takes num_tokens if padding follows the last offset"
        )
