"""Let vLLM run its Gated DeltaNet layers through flash_qla.

    from flash_qla.integrations.vllm import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # as it was

vLLM runs layers in processes of its own. There a function of yours that calls use_flash_qla reaches them as a plugin,
an entry point of the group vllm.general_plugins.

The functions here have the names, arguments and meaning of those that the layers of Qwen3-Next, Qwen3.5 and OLMo-Hybrid
call. States are [slots, H_v, V, K]; a sequence whose slot is 0 or less is nobody's. Two kernels of vLLM's stay in use:
the fused one for drafts, unless VLLM_GDN_DECODE_KERNEL=triton is in the environment, and the one that decodes for
OLMo-Hybrid, whose gates and betas come ready.

Written for vLLM 0.33.0. None of it has been run on a GPU yet.
"""

from typing import Literal

import torch

import flash_qla
from flash_qla.integrations._engines import Replacement, number_of_sequences, packed_decode, require


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's prefill on states that it has gathered.

    Args:
        q, k, v, g, beta, scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.chunk_gated_delta_rule.
        initial_state: [N, H_v, V, K], any floating dtype.
        chunk_indices, chunk_offsets: not read; they follow from cu_seqlens.
        core_attn_out: where o goes, contiguous, B T H_v V elements or more.

    Returns:
        o: [B, T, H_v, V], in the dtype of q; a view of core_attn_out where that is given.
        final_state: [N, H_v, V, K], float32; None unless output_final_state.
    """
    o, final_state = flash_qla.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )
    if core_attn_out is not None:
        o = core_attn_out.view(-1)[: o.numel()].view(o.shape).copy_(o)
    return o, final_state


def fi_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Literal["auto"] | bool = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, as vLLM calls FlashInfer for it, which is its default on Hopper; with checkpoints for prefix caching.

    Args:
        q, k, v, g, beta, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel: as above.
        initial_state: [N, H_v, V, K], any floating dtype.
        state_checkpoints: where the states behind every checkpoint_every_n_tokens tokens of each sequence go, [total,
            H_v, V, K], any floating dtype, in the order of the sequences. It is written.
        checkpoint_cu_starts: not read; it follows from cu_seqlens and checkpoint_every_n_tokens.
        checkpoint_every_n_tokens: a multiple of 64; 0 for none.
        use_cp: whether a sequence may be split into segments that run side by side; with checkpoints it is not read.

    Returns:
        o: [B, T, H_v, V], in the dtype of q.
        final_state: [N, H_v, V, K], float32; None unless output_final_state.
    """
    if not checkpoint_every_n_tokens:
        return flash_qla.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            state_v_first=True,
            auto_cp=use_cp is not False,
        )
    states = initial_state.to(torch.float32, copy=True)
    o = flash_qla.prefill_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        states,
        torch.arange(states.shape[0], dtype=torch.int32, device=states.device),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        checkpoint_every=checkpoint_every_n_tokens,
        checkpoints=state_checkpoints,
    )
    return o, states if output_final_state else None


fused_recurrent_gated_delta_rule_packed_decode = packed_decode(__name__, null_index=0)


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's decoding from q, k and v, and its verification of drafts.

    Args:
        q, k, v, A_log, dt_bias, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.decode_gated_delta_rule.
        a, b: [T, H_v], with cu_seqlens; or [B, T, H_v].
        initial_state: the pool, [slots, H_v, V, K], written in place.
        ssm_state_indices: [N], or more rows: the slot of each sequence, where the state behind its last token goes
            back; vLLM gives one token of each then. Or [N, S]: the state behind token t goes to slot [n, t].
        num_accepted_tokens: [N] or more: sequence n starts from slot [n, num_accepted_tokens[n] - 1]; the first one by
            default.
        beta, threshold: of the softplus; only 1 and 20.
        inplace_final_state: only True. is_kda: only False.

    Returns:
        o, [B, T, H_v, V], in the dtype of q, zero for nobody; and initial_state.

    Raises:
        NotImplementedError: an argument has another value than those; or initial_state or ssm_state_indices is None.
    """
    require(
        "fused_sigmoid_gating_delta_rule_update",
        beta=(beta, 1.0),
        threshold=(threshold, 20.0),
        initial_state=(initial_state, torch.Tensor),
        inplace_final_state=(inplace_final_state, True),
        ssm_state_indices=(ssm_state_indices, torch.Tensor),
        is_kda=(is_kda, False),
    )
    N = number_of_sequences(q, cu_seqlens)
    slots = ssm_state_indices[:N]
    o = flash_qla.decode_gated_delta_rule(
        q,
        k,
        v,
        a.view(v.shape[:3]),
        b.view(v.shape[:3]),
        A_log,
        dt_bias,
        initial_state,
        slots,
        scale=scale,
        null_index=0,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:N],
        write_indices=slots if slots.dim() == 2 else None,
    )
    return o, initial_state


_LAYERS = "vllm.model_executor.layers.mamba.gdn"
_replacement = Replacement(
    "vLLM 0.33.0",
    {
        f"{_LAYERS}.qwen_gdn_linear_attn": {
            "fla_chunk_gated_delta_rule": chunk_gated_delta_rule,
            "fi_chunk_gated_delta_rule": fi_chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule_packed_decode": fused_recurrent_gated_delta_rule_packed_decode,
            "fused_sigmoid_gating_delta_rule_update": fused_sigmoid_gating_delta_rule_update,
        },
        f"{_LAYERS}.olmo_gdn_linear_attn": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    },
)


def use_flash_qla() -> None:
    """Have vLLM's Gated DeltaNet layers call the functions of this module, in this process.

    Raises:
        ImportError: vLLM cannot be imported.
        RuntimeError: this vLLM has not these functions, or they have other arguments. Nothing has been changed then.
    """
    _replacement.use()


def restore() -> None:
    """Give vLLM's layers their own functions again."""
    _replacement.restore()
