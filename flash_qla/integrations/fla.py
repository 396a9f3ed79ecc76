"""The functions of flash-linear-attention (FLA) on flash_qla: in FLA's place, or inside FLA.

chunk_gated_delta_rule, fused_recurrent_gated_delta_rule and build_cp_context have FLA's arguments, in FLA's order. They
need no FLA:

    from flash_qla.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

With FLA installed its GatedDeltaNet layers use flash_qla too:

    from flash_qla.integrations.fla import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # FLA's own backend again

FLA's fla.ops.gated_delta_rule.chunk_gated_delta_rule already selects an installed flash_qla, but only on a Hopper GPU,
in bf16 and fp16, for K = V = 128, and if g and beta are computed before the call. FLA runs all other calls in its own
kernels. Its layers make such calls: as of 0.6.0 they leave both activations to the function ("in the kernel").

use_flash_qla registers FLA's backend for flash_qla with other conditions:

- K may be any multiple of 8 up to 256, V any multiple of 8 up to 512: the defaults of FLA's GatedDeltaNet layer;
- flash_qla's kernels compute the activations, and gradients reach A_log, dt_bias and the inputs of the activations;
- flash_qla takes cp_context;
- flash_qla also takes fused_recurrent_gated_delta_rule, which FLA's layers call without gradients for 64 tokens or
  fewer, and which FLA dispatches to no backend;
- GPUs other than Hopper's run FLA's kernels, unless FLASH_QLA_ANY_GPU=1. FLA's own backend would run flash_qla on
  Blackwell.

It also replaces the forward of FLA's GatedDeltaNet layer. Where its parts are three ShortConvolution of 2 to 4 taps and
a FusedRMSNormGated, without hooks and in bf16 or fp16, all between the projections runs in flash_qla, without
concatenating the projections. One token of each sequence after a cache's is one op, which writes the cache's windows
and state in place. Other layers (LoRA or quantization on a part, another norm), and calls that continue a cache with
more tokens or decode without one, keep FLA's parts around flash_qla's delta rule. One line of the log says which parts
run, and why: logging.getLogger("fla.flash_qla").

FLA_FLASH_QLA=0 in the environment switches flash_qla off inside FLA. Written for fla-core 0.6.0.
"""

import sys
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

import flash_qla
from flash_qla.cp import CPContext, build_cp_context as _build_cp_context
from flash_qla.ops.checks import explain, unexpected_keyword

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

    Parameters
    ----------
    q, k : Tensor
        Queries and keys, [B, T, H_k, K], as in flash_qla.chunk_gated_delta_rule.
    v : Tensor
        Values, [B, T, H_v, V], as in flash_qla.chunk_gated_delta_rule.
    g, beta : Tensor
        Log decay and step size, [B, T, H_v], as in flash_qla.chunk_gated_delta_rule.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in flash_qla.chunk_gated_delta_rule.
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, as in flash_qla.chunk_gated_delta_rule.
    output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel : bool, default False
        As in flash_qla.chunk_gated_delta_rule.
    allow_neg_eigval, state_v_first : bool, default False
        As in flash_qla.chunk_gated_delta_rule.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in flash_qla.chunk_gated_delta_rule.
    cu_seqlens_cpu : Tensor, optional
        cu_seqlens on the CPU, which give max_seqlen unless a compiler traces the call.
    chunk_indices : Tensor, optional
        Without effect.
    cp_context : CPContext, optional
        As in flash_qla.chunk_gated_delta_rule.
    **kwargs : object
        use_gate_in_kernel, A_log and dt_bias, as in flash_qla.chunk_gated_delta_rule. But as in FLA, A_log and dt_bias
        have no effect without use_gate_in_kernel. Also chunk_size, only 64; head_first, only False;
        transpose_state_layout, the older name of state_v_first.

    Returns
    -------
    o : Tensor
        As in flash_qla.chunk_gated_delta_rule.
    final_state : Tensor or None
        As in flash_qla.chunk_gated_delta_rule.

    Raises
    ------
    ValueError
        state_v_first and transpose_state_layout are both given.
    TypeError
        A keyword is unknown, or chunk_size or head_first has another value.
    RuntimeError, NotImplementedError
        As flash_qla.chunk_gated_delta_rule.
    """
    state_v_first = _layout(chunk_gated_delta_rule, state_v_first, kwargs, _KEYWORDS)
    kwargs["cu_seqlens_cpu"] = cu_seqlens_cpu
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


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's fused_recurrent_gated_delta_rule: flash_qla.decode_gated_delta_rule with FLA's arguments, in FLA's order.

        o, state = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    For decoding: one or a few tokens. chunk_gated_delta_rule is faster for many. Like FLA's function it has no
    derivative. The ranges of flash_qla hold for shapes and dtypes.

    Parameters
    ----------
    q, k : Tensor
        Queries and keys, [B, T, H_k, K], as in flash_qla.chunk_gated_delta_rule.
    v : Tensor
        Values, [B, T, H_v, V], as in flash_qla.chunk_gated_delta_rule.
    g : Tensor, optional
        Log decay, [B, T, H_v], any floating dtype; with use_gate_in_kernel the input of the gate. None: no decay.
    gk, gv : None, optional
        Only None. Decays of single channels need another kernel.
    beta : Tensor, optional
        Step size, [B, T, H_v], any floating dtype; with use_beta_sigmoid_in_kernel the input of the sigmoid. None:
        ones.

    Other Parameters
    ----------------
    scale : float, optional
        Factor on the output, as in flash_qla.chunk_gated_delta_rule.
    initial_state : Tensor, optional
        [N, H_v, K, V], or [N, H_v, V, K] with state_v_first, any floating dtype. It is not written.
    output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel : bool, default False
        As in flash_qla.chunk_gated_delta_rule.
    A_log, dt_bias : Tensor, optional
        [H_v], as in flash_qla.chunk_gated_delta_rule. But as in FLA they have no effect without use_gate_in_kernel.
    use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first : bool, default False
        As in flash_qla.chunk_gated_delta_rule.
    cu_seqlens : Tensor, optional
        Offsets of packed sequences, [N + 1], as in flash_qla.chunk_gated_delta_rule.
    **kwargs : object
        transpose_state_layout, the older name of state_v_first.

    Returns
    -------
    o : Tensor
        [B, T, H_v, V], in the dtype of q.
    final_state : Tensor or None
        In the shape of initial_state, float32, or float64 for float64 inputs; None unless output_final_state.

    Raises
    ------
    NotImplementedError
        gk or gv is given, or a gradient is asked for.
    ValueError
        use_gate_in_kernel is True without g or A_log; state_v_first and transpose_state_layout are both given.
    TypeError
        A keyword is unknown.
    RuntimeError
        As flash_qla.decode_gated_delta_rule.
    """
    function = "fused_recurrent_gated_delta_rule"
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            raise NotImplementedError(f"{function}: {name} is a tensor, expected None: flash_qla decays whole heads")
    state_v_first = _layout(fused_recurrent_gated_delta_rule, state_v_first, kwargs)
    if use_gate_in_kernel and (g is None or A_log is None):
        missing = "g" if g is None else "A_log"
        raise ValueError(f"{function}: {missing} is None, expected a tensor with use_gate_in_kernel")
    try:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        gates = v.shape[:3]
        K, V, N = q.shape[-1], v.shape[-1], q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        one_token = q.shape[1] == 1 and cu_seqlens is None
        final_state, states_after, in_place = None, None, output_final_state
        if initial_state is None:
            states = final_state = q.new_zeros(N, v.shape[2], *((V, K) if state_v_first else (K, V)), dtype=dtype)
        elif output_final_state and not one_token:
            states = final_state = initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:  # the kernel reads one tensor and, if requested, writes another
            states = initial_state.to(dtype).contiguous()
            in_place = False
            if output_final_state:
                final_state = torch.empty_like(states)
                states_after = final_state[:, None]
        o = flash_qla.decode_gated_delta_rule(
            q, k, v,
            v.new_zeros(gates, dtype=dtype) if g is None else g,
            v.new_ones(gates, dtype=dtype) if beta is None else beta,
            A_log if use_gate_in_kernel else None,
            dt_bias if use_gate_in_kernel else None,
            states,
            scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            intermediate_states=states_after,
            update_state=in_place,
            state_v_first=state_v_first,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip
    except Exception:
        explain(fused_recurrent_gated_delta_rule, locals())
        raise
    return o, final_state if output_final_state else None


def _layout(function: Callable, state_v_first: bool, kwargs: dict, keywords: frozenset = frozenset()) -> bool:
    """state_v_first, perhaps by its older name, which is then removed from kwargs.

    Raises:
        ValueError: both names are given.
        TypeError: kwargs has others than `keywords`.
    """
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(f"{function.__name__}: expected one of state_v_first and transpose_state_layout, got both")
        warnings.warn("transpose_state_layout is the older name of state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = bool(kwargs.pop("transpose_state_layout"))
    unknown = set(kwargs) - keywords  # torch.compile up to 2.11 does not trace kwargs.keys() - keywords
    if unknown:
        raise unexpected_keyword(function, min(unknown), keywords)
    return state_v_first


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

    Parameters
    ----------
    cu_seqlens : Tensor
        Offsets of all sequences, [N + 1], as in flash_qla.cp.build_cp_context.
    group : ProcessGroup
        The ranks.
    conv1d_kernel_size : int, optional
        As in flash_qla.cp.build_cp_context.
    cu_seqlens_cpu : Tensor, optional
        cu_seqlens on the CPU.
    use_tf32x3_affine_chain : bool, default True
        Only True, as in FLA. The maps of ranks are folded in float64 here.
    layout : str, default "contiguous"
        "contiguous" or "zigzag", as in flash_qla.cp.build_cp_context.
    **kwargs : object
        None are known.

    Returns
    -------
    context : CPContext
        For the arguments named cp_context.

    Raises
    ------
    ValueError
        use_tf32x3_affine_chain is False; or as flash_qla.cp.build_cp_context.
    TypeError
        A keyword is unknown; or as flash_qla.cp.build_cp_context.
    """
    for name in kwargs:
        raise unexpected_keyword(build_cp_context, name)
    if use_tf32x3_affine_chain is not True:
        raise ValueError(f"build_cp_context: use_tf32x3_affine_chain is {use_tf32x3_affine_chain}, expected True")
    return _build_cp_context(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu, layout)


def use_flash_qla() -> None:
    """Have FLA's chunk_gated_delta_rule, and so FLA's layers, call flash_qla also with activations, with head
    dimensions other than 128, and with context parallelism. FLA's fused_recurrent_gated_delta_rule, which decodes,
    calls flash_qla, too. GatedDeltaNet layers also run flash_qla's convolution and norm, as the module says.

    FLA's public registry gets this module's backend instead of FLA's own for flash_qla, for the whole process. FLA does
    not ask the registry for fused_recurrent_gated_delta_rule, so FLA's modules get a function that asks it. FLA's
    kernels run the other calls, as before: K above 256, V above 512, head dimensions that are not multiples of 8,
    dtypes other than bf16 and fp16, and, without FLASH_QLA_ANY_GPU=1, GPUs other than Hopper's.

    Raises
    ------
    ImportError
        FLA is not installed, or has no backend for flash_qla.
    """
    from flash_qla.integrations import _fla_backend

    _fla_backend.use()
    layer = _layer()
    if layer is not None:
        layer.use()


def restore() -> None:
    """Give FLA its own backend for flash_qla again."""
    from flash_qla.integrations import _fla_backend

    _fla_backend.restore()
    layer = _layer()
    if layer is not None:
        layer.restore()


def _layer() -> ModuleType | None:
    """The module that replaces the layer's forward; None without FLA's layers, which are another package than its
    functions, and which FLA imports if it is installed."""
    if "fla.layers.gated_deltanet" not in sys.modules:
        return None
    from flash_qla.integrations import _fla_layer

    return _fla_layer
