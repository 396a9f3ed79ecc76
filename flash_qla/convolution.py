"""The causal depthwise convolution that stands before the Gated Delta Rule in a Gated DeltaNet layer.

A window is the state of the convolution: the last rows of a sequence. Tokens come before channels, so q, k and v of the
Gated Delta Rule are slices of y.
"""

from typing import Literal, TypeAlias

import torch

from flash_qla.ops import autograd
from flash_qla.ops.checks import explain

Activation: TypeAlias = Literal["silu", "swish"] | None


def _uses_silu(function: str, activation: Activation) -> bool:
    if activation not in ("silu", "swish", None):
        raise ValueError(f"{function}: activation is {activation!r}, expected 'silu', 'swish' or None")
    return activation is not None


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The causal depthwise convolution over whole sequences.

        x = torch.randn(2, 1000, 2048, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(2048, 4, dtype=torch.bfloat16, device="cuda")
        y, window = causal_conv1d(x, weight, output_final_state=True)
        z, window = causal_conv1d(more, weight, initial_state=window, output_final_state=True)

    Over each channel d of W taps, with rows before a sequence's first token from its window, or zeros:

        y[t, d] = act(bias[d] + sum over w of weight[d, w] x[t - (W - 1) + w, d])

    x is read where it is if its channels are neighbours; another layout is copied first. On the GPU, reads are vectors
    of 4 channels if D and the strides are multiples of 4 and x begins at a multiple of 4 channels, and otherwise
    channel by channel. Arithmetic is in float32 (float64 for float64 inputs). The bits of y[t] depend on its W rows
    alone. So a sequence in pieces, each from the window of the one before, has the bits of the whole one.
    torch.autocast casts x, and nothing else.

    y and final_state can be differentiated, once, with respect to x, weight, bias and initial_state. Each gradient has
    the dtype of its tensor. Those of weight and bias are summed in float32, always in the same order. Autograd saves
    the inputs for the backward, and nothing else.

    Parameters
    ----------
    x : Tensor
        [B, T, D], bfloat16, float16 or float32; float64 on the CPU alone.
    weight : Tensor
        [D, W], or [D, 1, W] as torch.nn.Conv1d has it, in the dtype of x or float32. W is 2, 3 or 4.
    bias : Tensor, optional
        [D], in the dtype of x or float32; zero by default.
    activation : "silu", "swish" or None, default "silu"
        "silu" (also "swish"), y * sigmoid(y); or None.

    States
    ------
    initial_state : Tensor, optional
        Window before the first token of each sequence, [N, D, W - 1], any strides, in the dtype of x or float32; zeros
        by default. [N, D, W] is taken too; its first column does not enter y. N is B, or the number of sequences in
        cu_seqlens.
    output_final_state : bool, default False
        Return the window after the last token of each sequence too. A sequence with fewer tokens than the window still
        has rows of its initial one.

    Packed sequences
    ----------------
    cu_seqlens : Tensor, optional
        Offsets of sequences packed along T, [N + 1], as those of chunk_gated_delta_rule. Tokens from the last offset on
        belong to no sequence: zeros in y and in the gradient of x.

    Returns
    -------
    y : Tensor
        [B, T, D], in the dtype of x, contiguous.
    final_state : Tensor or None
        As initial_state in shape and dtype, or [N, D, W - 1] in the dtype of x without one, contiguous; None unless
        output_final_state.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype or shape; or offsets are wrong and checked. The message names the
        argument, what was expected and what came.
    ValueError
        The activation is unknown.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        Gradients made with create_graph=True are differentiated again; or forward-mode differentiation.
    """
    use_silu = _uses_silu("causal_conv1d", activation)
    op = torch.ops.flash_qla.causal_conv1d
    try:
        y, final_state = autograd.call(op, x, weight, bias, use_silu, initial_state, output_final_state, cu_seqlens)
    except Exception:
        explain(causal_conv1d, locals())
        raise
    return y, final_state if output_final_state else None


def prefill_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    activation: Activation = "silu",
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    null_index: int = -1,
    initial_state_indices: torch.Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoint_indices: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> torch.Tensor:
    """causal_conv1d on windows in a pool, which it reads and writes in place.

        pool = torch.zeros(slots, D, 3, dtype=torch.bfloat16, device="cuda")
        y = prefill_causal_conv1d(x, weight, None, pool, state_indices, cu_seqlens=cu_seqlens)

    The function can also keep the windows at multiples of checkpoint_every tokens, for prefix caching. It has no
    derivative. It increments the version of the tensors that it writes. torch.autocast casts x, as for causal_conv1d.

    Parameters
    ----------
    x : Tensor
        [B, T, D], as in causal_conv1d.
    weight : Tensor
        [D, W] or [D, 1, W], as in causal_conv1d.
    bias : Tensor or None
        [D], as in causal_conv1d.
    state_pool : Tensor
        [slots, D, W - 1] or [slots, D, W], any strides, as a view [slots, W - 1, D] with two dimensions swapped has
        them; in the dtype of x or float32. It is written.
    state_indices : Tensor
        Slot of each sequence, [N], int32 or int64. An empty sequence does not change its slot, so the slot may be
        another sequence's. If an empty sequence starts from zeros, its slot becomes zeros.
    activation : "silu", "swish" or None, default "silu"
        As in causal_conv1d.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in causal_conv1d.

    States
    ------
    has_initial_state : Tensor, optional
        [N], bool: False if the sequence starts from zeros, whatever its slot holds. True for all sequences by default.
    initial_state_indices : Tensor, optional
        Slot that each sequence starts from, [N]; state_indices by default. The last window still goes to state_indices.
        A sequence without such a slot starts from zeros.
    null_index : int, default -1
        An index of at most this is no slot: the sequence starts from zeros, and no window is written.

    Kept states
    -----------
    checkpoint_every : int, default 0
        Keep the windows after this many tokens of each sequence, after twice as many, and so on. 0 keeps none.
    checkpoint_indices : Tensor, optional
        Slots of these windows, [N, blocks]. Windows beyond the last column are not kept.
    checkpoints : Tensor, optional
        Memory for these windows, instead of checkpoint_indices: [total, D, columns], with the columns of state_pool,
        any strides, in the dtype of x or float32. The order is that of prefill_gated_delta_rule. It is written.

    Returns
    -------
    y : Tensor
        [B, T, D], in the dtype of x, contiguous.

    Raises
    ------
    RuntimeError
        An argument has the wrong device, dtype or shape; or what is written overlaps itself or another argument. On the
        CPU or with FLASH_QLA_CHECK=1 also: an index is out of range, or one sequence writes a slot that another one
        writes or reads. The message names the argument, what was expected and what came, and nothing has been written.
        Unchecked, the GPU treats an index out of range as no slot, and the contents of a slot that is written twice are
        undefined.
    ValueError
        The activation is unknown.
    TypeError
        A list, an array or a NestedTensor came where a tensor is expected.
    NotImplementedError
        A gradient is asked for.
    """
    use_silu = _uses_silu("prefill_causal_conv1d", activation)
    try:
        return torch.ops.flash_qla.prefill_causal_conv1d(
            x, weight, bias, state_pool, state_indices, use_silu, cu_seqlens, has_initial_state, null_index,
            initial_state_indices, checkpoint_every, checkpoint_indices, checkpoints,
        )  # fmt: skip
    except Exception:
        explain(prefill_causal_conv1d, locals())
        raise
