"""The functions of flash-linear-attention (FLA) on flash_qla: in FLA's place, or inside FLA.

chunk_gated_delta_rule and build_cp_context have FLA's arguments, in FLA's order. They need no FLA:

    from flash_qla.integrations.fla import chunk_gated_delta_rule

With FLA installed its GatedDeltaNet layers use flash_qla too:

    from flash_qla.integrations.fla import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # as it was

FLA's fla.ops.gated_delta_rule.chunk_gated_delta_rule already selects an installed flash_qla, but only on a Hopper GPU,
in bf16 and fp16, for K = V = 128, and if g and beta are computed before the call. FLA runs all other calls in its own
kernels. Its layers make such calls: as of 0.6.0 they leave both activations to the function ("in the kernel").

use_flash_qla registers FLA's backend for flash_qla with other conditions:

- K may be any multiple of 8 up to 128, V any multiple of 8 up to 512;
- flash_qla's kernels compute the activations, and gradients reach A_log, dt_bias and the inputs of the activations;
- flash_qla takes cp_context;
- GPUs other than Hopper's run FLA's kernels. FLA's own backend would run flash_qla on Blackwell.

FLA_FLASH_QLA=0 in the environment switches flash_qla off inside FLA. Written for fla-core 0.6.0.
"""

import warnings

import torch

import flash_qla
from flash_qla.cp import CPContext, build_cp_context as _build_cp_context

# Arguments that FLA takes by keyword only, and that flash_qla has under the same names
_KEYWORDS = frozenset({"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "head_first"})


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: CPContext | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's chunk_gated_delta_rule: flash_qla.chunk_gated_delta_rule with FLA's arguments, in FLA's order.

        o, state = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu())

    The ranges of flash_qla hold for shapes and dtypes.

    Args:
        cu_seqlens_cpu, chunk_indices: without effect: the kernels read cu_seqlens on the device.
        **kwargs: use_gate_in_kernel, A_log and dt_bias, as those of flash_qla.chunk_gated_delta_rule, but without
            use_gate_in_kernel A_log and dt_bias have no effect, as in FLA; chunk_size, 64; head_first, False;
            transpose_state_layout, the older name of state_v_first.

        The other arguments are those of flash_qla.chunk_gated_delta_rule.

    Returns:
        o, final_state: as flash_qla.chunk_gated_delta_rule.

    Raises:
        ValueError: state_v_first and transpose_state_layout are both given.
        TypeError: a keyword is unknown, or chunk_size or head_first has another value.
        RuntimeError, NotImplementedError: as flash_qla.chunk_gated_delta_rule.
    """
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                "chunk_gated_delta_rule: expected one of state_v_first and transpose_state_layout, got both"
            )
        warnings.warn("transpose_state_layout is the older name of state_v_first", DeprecationWarning, stacklevel=2)
        state_v_first = bool(kwargs.pop("transpose_state_layout"))
    unknown = kwargs.keys() - _KEYWORDS
    if unknown:
        raise TypeError(f"chunk_gated_delta_rule() got an unexpected keyword argument {min(unknown)!r}")
    if not kwargs.get("use_gate_in_kernel"):
        kwargs |= {"A_log": None, "dt_bias": None}
    return flash_qla.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        **{name: x for name, x in kwargs.items() if x is not None},
    )


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: "torch.distributed.ProcessGroup",
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    **kwargs: object,
) -> CPContext:
    """FLA's build_cp_context: flash_qla.cp.build_cp_context with FLA's arguments, in FLA's order.

    Args:
        use_tf32x3_affine_chain: only True, as in FLA. The maps of ranks are folded in float64 here.
        **kwargs: none.

        The other arguments are those of flash_qla.cp.build_cp_context.

    Raises:
        ValueError: use_tf32x3_affine_chain is False; or as flash_qla.cp.build_cp_context.
        TypeError: a keyword is unknown; or as flash_qla.cp.build_cp_context.
    """
    for name in kwargs:
        raise TypeError(f"build_cp_context() got an unexpected keyword argument {name!r}")
    if use_tf32x3_affine_chain is not True:
        raise ValueError(f"build_cp_context: use_tf32x3_affine_chain is {use_tf32x3_affine_chain}, expected True")
    return _build_cp_context(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu, layout)


def use_flash_qla() -> None:
    """Have FLA's chunk_gated_delta_rule, and so its layers, run calls with activations, other head dimensions than 128
    and context parallelism on flash_qla.

    FLA's public registry gets this module's backend instead of FLA's own for flash_qla, for the whole process. FLA's
    kernels run the other calls, as before: K above 128, which is the default of FLA's GatedDeltaNet layer, V above 512,
    head dimensions that are not multiples of 8, dtypes other than bf16 and fp16, and GPUs other than Hopper's.

    Raises:
        ImportError: FLA is not installed, or has no backend for flash_qla.
    """
    from fla.backends import register

    from flash_qla.integrations._fla_backend import Backend

    register("gated_delta_rule")(Backend)


def restore() -> None:
    """Give FLA its own backend for flash_qla again."""
    from fla.backends import register
    from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

    register("gated_delta_rule")(FlashQLABackend)
