"""Context parallelism with the arguments of the published FlashQLA (flash-qla 0.1.3 on PyPI).

Its contexts speak of two levels. "inter" spreads sequences over the ranks of a process group: flash_qla.cp does that.
"intra" splits sequences on one card: auto_cp does that here, in every call, and decides on the device.
"""

import dataclasses
from typing import NamedTuple

import torch

from flash_qla._layout import CHUNK
from flash_qla.cp import context as cp


class CPCache(NamedTuple):
    """What the low-level forward of a rank keeps for the low-level backward."""

    g: torch.Tensor  # the g of the forward call
    initial_state: torch.Tensor | None  # states before the rank's own tokens, as earlier ranks leave them


@dataclasses.dataclass(eq=False)
class FlashQLACPContext:
    """The published FlashQLA's context: the sequences of a call, and how they go on in other ranks.

    build_cp_context computes the fields, whose names are the published ones. With is_inter they are those of
    flash_qla.cp.CPContext; otherwise only cu_seqlens counts. The tables of segments that the published context has
    besides do not exist here, because the device builds its own in every call.
    """

    is_inter: bool = False  # the tokens are this rank's part of sequences
    is_intra: bool = False  # long sequences may be split on the card
    cu_seqlens: torch.Tensor | None = None  # the rank's own sequences, [N + 1]
    group: "torch.distributed.ProcessGroup | None" = None
    cu_seqlens_cpu: torch.Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None

    def copy_for_backward(self) -> "FlashQLACPContext":
        """A copy with the same tensors."""
        return dataclasses.replace(self)

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences; 0 without cu_seqlens."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1


def build_cp_context(
    cu_seqlens: torch.Tensor | None = None,
    *,
    enable_inter: bool = False,
    enable_intra: bool = False,
    group: "torch.distributed.ProcessGroup | None" = None,
    num_v_heads: int | None = None,
    chunk_size: int | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    is_train: bool = False,
    force_intra_cp: bool = False,
) -> FlashQLACPContext:
    """The published FlashQLA's build_cp_context.

        context = build_cp_context(cu_seqlens, enable_inter=True, enable_intra=True, group=group)
        o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)

    Parameters
    ----------
    cu_seqlens : Tensor, optional
        Offsets of all sequences in the packed tokens, [N + 1], int32 or int64. With enable_inter they are required; see
        flash_qla.cp.build_cp_context.
    enable_inter : bool, default False
        Spread the sequences over the ranks of `group`.
    enable_intra : bool, default False
        Let calls split long sequences on the card, as auto_cp=True does in a call without a context. The auto_cp of a
        call with this context does not count.
    group : ProcessGroup, optional
        The ranks; the default group if None. Only with enable_inter.
    chunk_size : int, optional
        64 or None.
    conv1d_kernel_size : int, optional
        As in flash_qla.cp.build_cp_context. Only with enable_inter.
    cu_seqlens_cpu : Tensor, optional
        As in flash_qla.cp.build_cp_context. Only with enable_inter.
    num_v_heads : int, optional
        Without effect, as g and is_train. The published package decides from them how to split sequences; here each
        call decides from its own shapes, and the device from its own gates.
    g : Tensor, optional
        Without effect.
    is_train : bool, default False
        Without effect.
    force_intra_cp : bool, default False
        Only False with enable_intra.

    Returns
    -------
    context : FlashQLACPContext
        For the arguments named cp_context.

    Raises
    ------
    ValueError
        chunk_size is another number; or as flash_qla.cp.build_cp_context.
    TypeError
        cu_seqlens is not a tensor.
    NotImplementedError
        force_intra_cp is True with enable_intra.
    """
    if chunk_size not in (None, CHUNK):
        raise ValueError(
            f"chunk_size is {chunk_size}, expected {CHUNK}, the only one that the kernels are compiled for"
        )
    if force_intra_cp and enable_intra:
        refuse_forced("build_cp_context")
    if not enable_inter:
        if cu_seqlens is not None:
            cp.check_offsets("cu_seqlens", cu_seqlens)
        return FlashQLACPContext(is_intra=enable_intra, cu_seqlens=cu_seqlens)
    context = cp.build_cp_context(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu)
    fields = {x.name for x in dataclasses.fields(FlashQLACPContext)} - {"is_inter", "is_intra"}
    return FlashQLACPContext(True, enable_intra, **{name: getattr(context, name) for name in fields})


def ranks_of(cp_context, cu_seqlens, auto_cp):
    """The context if it has ranks, else None; and the cu_seqlens and auto_cp of the call.

    Contexts other than the published FlashQLA's have ranks, and leave the other two as they are.
    """
    if cp_context is None or not hasattr(cp_context, "is_inter"):
        return cp_context, cu_seqlens, auto_cp
    if cp_context.is_inter:
        return cp_context, cu_seqlens, cp_context.is_intra
    return None, cu_seqlens if cp_context.cu_seqlens is None else cp_context.cu_seqlens, cp_context.is_intra


def check_cache(cp_cache: object, cp_context: object) -> None:
    """Refuse a cp_cache that is not the last result of the forward call.

    Raises:
        TypeError: cp_cache is missing with a context of ranks, or present without one.
    """
    if isinstance(cp_cache, CPCache) if cp_context is not None else cp_cache is None:
        return
    raise TypeError(
        f"chunk_gated_delta_rule_bwd: cp_cache is of type {type(cp_cache).__name__}, expected the last result of "
        "chunk_gated_delta_rule_fwd: with a cp_context of several ranks it holds the states that the earlier ranks "
        "leave, without one it is None"
    )


def refuse_forced(function: str) -> None:
    raise NotImplementedError(
        f"{function}: force_intra_cp is True, expected False: the device decides whether sequences are split. "
        "flash_qla.testing.forced_dispatch forces the dispatch in tests"
    )
