"""Let vLLM run its Gated DeltaNet layers through flash_qla.

    from flash_qla.integrations.vllm import restore, use_flash_qla

    use_flash_qla()                 # from here on, for every layer in the process
    restore()                       # vLLM's own functions again

vLLM runs layers in processes of its own. With FLASH_QLA_VLLM=1 in the environment, vLLM's plugins switch each of them
on, and set VLLM_GDN_DECODE_KERNEL=triton unless the variable has a value.

The functions replace those that the layers of Qwen3-Next, Qwen3.5 and OLMo-Hybrid call. They have the same names,
arguments and meaning, so their signatures are vLLM's. States are [slots, H_v, V, K]; a sequence whose slot is 0 or less
has no state. With VLLM_BATCH_INVARIANT=1 the bits of a prefill do not depend on the batch. From 0.28.0 on, vLLM's fused
kernel for drafts stays in use unless VLLM_GDN_DECODE_KERNEL=triton is in the environment.

On Hopper a step of a layer of Qwen3-Next and Qwen3.5 in bf16 is one call between its projections, or two, if the
release has a path for it: _vllm_layer.py says which steps. In the others nothing runs between the convolution of a
prefill and the chunk function: fused_post_conv_prep returns views and the inputs of the gates, which the chunk function
takes; the norm is vLLM's, because it writes in place. One line of the log says which functions are replaced, another
says why vLLM's own runs where it takes a call instead.

Written for vLLM 0.22.0 to 0.33.0. vLLM 0.33.0 has generated text on the functions of the delta rule on an H100:
eagerly, in CUDA graphs, with Inductor, with prefix caching, and with drafts; for OLMo-Hybrid in CUDA graphs. Other
releases, and causal_conv1d_fn, fused_post_conv_prep and the layer's path in all of them, have been compared by
signatures, and the functions run with the arguments that their layers pass.
"""

import torch

import flash_qla
from flash_qla.integrations import _vllm_layer
from flash_qla.integrations._engines import (
    Replacement,
    earlier,
    gates_of,
    heads_of,
    not_convolved,
    number_of_sequences,
    packed_decode,
    prefill_convolution,
    require,
)
from flash_qla_environment import is_not_off

_NULL_INDEX = _vllm_layer.NULL_INDEX


class _RawGates(torch.Tensor):
    """The `a` of a layer in the place of g, with A_log and dt_bias. q and k are then before the l2norm, beta is `b`.

    fused_post_conv_prep returns it, and this module's chunk functions take it apart. Between them a layer adds a
    dimension, and reads sizes. Anything else raises, so that no other kernel takes it for gates.
    """

    @classmethod
    def wrap(cls, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> "_RawGates":
        x = a.as_subclass(cls)
        x.A_log, x.dt_bias = A_log, dt_bias
        return x

    def unwrap(self) -> tuple[torch.Tensor, dict]:
        """a, and the other arguments of flash_qla's functions."""
        options = {"use_gate_in_kernel": True, "A_log": self.A_log, "dt_bias": self.dt_bias}
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor), options | {"use_beta_sigmoid_in_kernel": True}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        is_getter = function.__name__ == "__get__"
        is_size = is_getter and function.__self__.__name__ in ("shape", "dtype", "device", "ndim", "is_cuda")
        with torch._C.DisableTorchFunctionSubclass():
            if is_size or function in (torch.Tensor.dim, torch.Tensor.size):
                return function(*args, **(kwargs or {}))
            if function is torch.Tensor.unsqueeze:
                return cls.wrap(function(*args, **(kwargs or {})), args[0].A_log, args[0].dt_bias)
        raise NotImplementedError(
            f"{function.__name__} of the gates that flash_qla's fused_post_conv_prep returned: they are before their "
            "activation, and only flash_qla's prefill takes them"
        )


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    pad_slot_id=-1, null_block_id=0, block_idx_first_scheduled_token=None, block_idx_last_scheduled_token=None,
    initial_state_idx=None, num_computed_tokens=None, block_size_to_align=0, metadata=None, validate_data=False,
):  # fmt: skip
    """vLLM's convolution of a prefill, on windows in a pool. vLLM's own function runs other calls: those with windows
    of another width, as with drafts, and with tables of blocks.

    Args:
        x: [D, T], the tokens of all sequences.
        weight: [D, W].
        bias: [D], or None.
        conv_states: the pool, [slots, D, W - 1], any strides, written in place.
        query_start_loc: offsets of the sequences, [N + 1].
        cache_indices: slot of each sequence, [N] or more; of at most null_block_id: none.
        has_initial_state: [N] or more, bool: whether a sequence starts from its window, or from zeros.
        activation: "silu", "swish" or None.
        pad_slot_id, metadata, validate_data: ignored.
        block_idx_first_scheduled_token, block_idx_last_scheduled_token: None.
        initial_state_idx, num_computed_tokens, block_size_to_align: None, and 0.

    Returns:
        y, [D, T], in the dtype of x.

    Raises:
        NotImplementedError: an argument has another value, and vLLM is not there to take the call.
    """
    tables = (block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx, num_computed_tokens)
    reason = not_convolved(x, weight, bias, conv_states, query_start_loc, cache_indices, activation)
    if any(table is not None for table in tables):
        reason = "tables of blocks are given"
    if reason is not None:
        keywords = {name: table for name, table in zip(_BLOCKS, tables, strict=False) if table is not None}
        return _replacement.call_theirs(
            "causal_conv1d_fn", reason, x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state,
            activation, pad_slot_id, null_block_id, metadata=metadata, validate_data=validate_data,
            **keywords | ({"block_size_to_align": block_size_to_align} if keywords else {}),
        )  # fmt: skip
    return prefill_convolution(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, null_block_id
    )


def fused_post_conv_prep(
    conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm=True, output_g_exp=False
):
    """vLLM's split of a convolution's result before a prefill, without a kernel: q, k and v are views of it, and the
    prefill's kernels compute l2norm and activations. Only this module's prefill takes the result.

    Args:
        conv_output: [T, 2 H_k K + H_v V], any strides.
        a, b: [T, H_v], inputs of the gate and of the step size.
        A_log, dt_bias: parameters of the gate, [H_v].
        num_k_heads, head_k_dim, head_v_dim: H_k, K and V.
        apply_l2norm: only True.
        output_g_exp: only False.

    Returns:
        q, k, v: [T, heads, channels].
        g, beta: a and b; a use of g outside of this module raises.

    Raises:
        NotImplementedError: an argument has another value, and vLLM is not there to take the call.
    """
    if apply_l2norm is not True or output_g_exp is not False:
        reason = f"apply_l2norm is {apply_l2norm} and output_g_exp {output_g_exp}"
        return _replacement.call_theirs(
            "fused_post_conv_prep", reason, conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim,
            apply_l2norm, output_g_exp,
        )  # fmt: skip
    return *heads_of(conv_output, num_k_heads, head_k_dim, head_v_dim), _RawGates.wrap(a, A_log, dt_bias), b


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None,
):  # fmt: skip
    """vLLM's prefill on states that vLLM has gathered.

    Args:
        q, k, v, g, beta, scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.chunk_gated_delta_rule.
        initial_state: [N, H_v, V, K], any floating dtype.
        chunk_indices, chunk_offsets: ignored; they follow from cu_seqlens.
        core_attn_out: memory for o, contiguous, at least B T H_v V elements.

    Returns:
        o: [B, T, H_v, V], in the dtype of q; a view of core_attn_out if that is given.
        final_state: [N, H_v, V, K], float32; None unless output_final_state.
    """
    out = None if core_attn_out is None else core_attn_out.view(-1)[: v.numel()].view(v.shape)
    return _prefill(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, _is_batch_invariant(),
        scale=scale, out=out,
    )  # fmt: skip


def _is_batch_invariant() -> bool:
    """Whether vLLM promises bits that do not depend on the batch."""
    return is_not_off("VLLM_BATCH_INVARIANT")


def _prefill(
    q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, batch_invariant,
    scale=None, out=None, checkpoint_every=0, checkpoints=None,
):  # fmt: skip
    """o, and the final states in float32 or None. The initial states are not changed."""
    gate_options = {}
    if isinstance(g, _RawGates):
        g, gate_options = g.unwrap()
        use_qk_l2norm_in_kernel = True
    if out is None and not checkpoint_every and not batch_invariant:
        return flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
            state_v_first=True, **gate_options,
        )  # fmt: skip
    N = number_of_sequences(q, cu_seqlens)
    if initial_state is None:
        states = q.new_zeros(N, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
    else:
        states = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    # Checkpoints of fewer bits would round the state of a batch-invariant prefill, at tokens that the batch decides.
    checkpoint_buffer = checkpoints.float() if batch_invariant and checkpoints is not None else checkpoints
    o = flash_qla.prefill_gated_delta_rule(
        q, k, v, g, beta, states, torch.arange(N, dtype=torch.int32, device=q.device), scale, cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, checkpoint_every=checkpoint_every,
        checkpoints=checkpoint_buffer, batch_invariant=batch_invariant, out=out, **gate_options,
    )  # fmt: skip
    if checkpoint_buffer is not checkpoints:
        checkpoints.copy_(checkpoint_buffer)
    return o, states if output_final_state else None


def fi_chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, use_qk_l2norm_in_kernel=True,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto",
):  # fmt: skip
    """vLLM's prefill by FlashInfer, its default on Hopper, with checkpoints for prefix caching.

    Args:
        q, k, v, g, beta, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.chunk_gated_delta_rule.
        initial_state: [N, H_v, V, K], any floating dtype.
        state_checkpoints: memory for the states after every checkpoint_every_n_tokens tokens of each sequence, [total,
            H_v, V, K], any floating dtype, in the order of the sequences.
        checkpoint_cu_starts: ignored; it follows from cu_seqlens and checkpoint_every_n_tokens.
        checkpoint_every_n_tokens: 0 for no checkpoints.
        use_cp: False: split no sequence into segments that run side by side, as batch_invariant of
            flash_qla.prefill_gated_delta_rule.

    Returns:
        o: [B, T, H_v, V], in the dtype of q.
        final_state: [N, H_v, V, K], float32; None unless output_final_state.
    """
    return _prefill(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel,
        use_cp is False or _is_batch_invariant(), checkpoint_every=checkpoint_every_n_tokens,
        checkpoints=state_checkpoints,
    )  # fmt: skip


fused_recurrent_gated_delta_rule_packed_decode = packed_decode(__name__, _NULL_INDEX)


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None, inplace_final_state=True,
    cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False, is_kda=False,
):  # fmt: skip
    """vLLM's decoding from q, k and v, and its verification of drafts.

    Args:
        q, k, v, A_log, dt_bias, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of
            flash_qla.decode_gated_delta_rule.
        a, b: [T, H_v] with cu_seqlens, or [B, T, H_v]; of more rows the first ones.
        initial_state: the pool, [slots, H_v, V, K], written in place.
        ssm_state_indices: [N] or more: slot of each sequence; a sequence then has one token. Or [N, S] or more rows,
            for drafts: the state after token t of sequence n goes to slot [n, t].
        num_accepted_tokens: [N] or more: sequence n starts from slot [n, num_accepted_tokens[n] - 1]; from [n, 0] by
            default.
        beta, threshold: parameters of the softplus; only 1 and 20.
        inplace_final_state: only True.
        is_kda: only False.

    Returns:
        o: [B, T, H_v, V], in the dtype of q; zero for a sequence without a slot.
        initial_state: the argument.

    Raises:
        NotImplementedError: an argument has another value; or initial_state or ssm_state_indices is None.
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
    gates = (gates_of(a, v), gates_of(b, v), A_log, dt_bias)
    tables = (scale, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel)
    return _decode(q, k, v, gates, initial_state, *tables)


def fused_recurrent_gated_delta_rule(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    """vLLM's decoding with activated gates, of OLMo-Hybrid, and its verification of drafts.

    Args:
        q, k, v, scale, cu_seqlens, use_qk_l2norm_in_kernel: as those of flash_qla.decode_gated_delta_rule.
        g: the log decay, [B, T, H_v]; of more tokens the first ones.
        beta: as g.
        initial_state, ssm_state_indices, num_accepted_tokens: as those of fused_sigmoid_gating_delta_rule_update.
        inplace_final_state: only True.

    Returns:
        o: [B, T, H_v, V], in the dtype of q; zero for a sequence without a slot.
        initial_state: the argument.

    Raises:
        NotImplementedError: an argument has another value; or beta, initial_state or ssm_state_indices is None.
    """
    require(
        "fused_recurrent_gated_delta_rule",
        beta=(beta, torch.Tensor),
        initial_state=(initial_state, torch.Tensor),
        inplace_final_state=(inplace_final_state, True),
        ssm_state_indices=(ssm_state_indices, torch.Tensor),
    )
    gates = (gates_of(g, v), gates_of(beta, v), None, None)
    tables = (scale, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel)
    return _decode(q, k, v, gates, initial_state, *tables)


def _decode(q, k, v, gates, pool, scale, cu_seqlens, indices, num_accepted_tokens, use_qk_l2norm_in_kernel):
    """o and the pool. `gates` are a, b, A_log and dt_bias."""
    N = number_of_sequences(q, cu_seqlens)
    slots = indices[:N]
    # One token of each sequence: the kernel, and so the bits, of packed decoding.
    has_one_token = cu_seqlens is not None and slots.dim() == 1 and q.shape[1] == N
    if has_one_token:
        a, b, *parameters = gates
        q, k, v, a, b = (x.transpose(0, 1) for x in (q, k, v, a, b))
        gates, cu_seqlens = (a, b, *parameters), None
    o = flash_qla.decode_gated_delta_rule(
        q, k, v, *gates, pool, slots, scale, _NULL_INDEX, use_qk_l2norm_in_kernel, cu_seqlens,
        num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:N],
        write_indices=slots if slots.dim() == 2 else None,
    )  # fmt: skip
    return o.transpose(0, 1) if has_one_token else o, pool


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate, norm_weight,
    out=None, scale=128**-0.5, norm_eps=1e-5, output_gate_activation="silu",
):  # fmt: skip
    """vLLM's verification of drafts with the norm, after the convolution.

    Args:
        mixed_qkv: [T, 2 H_k K + H_v V], the result of the convolution.
        a, b: [T, H_v], inputs of the gate and of the step size.
        A_log, dt_bias: parameters of the gate, [H_v].
        state_indices: [N, S]: the state after token t of sequence n goes to slot [n, t].
        cu_seqlens: offsets of the sequences, [N + 1].
        num_accepted_tokens: [N]: sequence n starts from slot [n, num_accepted_tokens[n] - 1].
        state: the pool, [slots, H_v, V, K], written in place.
        output_gate: [T, H_v, V], the input of the norm's gate.
        norm_weight: [V].
        out: memory for the result, like output_gate.
        scale: factor of the queries.
        norm_eps, output_gate_activation: of the norm: "silu" or "sigmoid".

    Returns:
        out, or a new tensor in its place.
    """
    out = torch.empty_like(output_gate) if out is None else out
    flash_qla.decode_gated_delta_net(
        *(x[None] for x in (mixed_qkv, output_gate, a, b)), None, None, norm_weight, A_log, dt_bias, None, state,
        state_indices, scale=scale, null_index=_NULL_INDEX, norm_eps=norm_eps, norm_activation=output_gate_activation,
        cu_seqlens=cu_seqlens, num_accepted_tokens=num_accepted_tokens, write_indices=state_indices, out=out[None],
    )  # fmt: skip
    return out


_LAYERS = "vllm.model_executor.layers.mamba.gdn"
_BLOCKS = (
    *("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx"),
    *("num_computed_tokens", "block_size_to_align"),
)
_CONVOLUTION = (earlier(causal_conv1d_fn, *_BLOCKS), causal_conv1d_fn)  # 0.33.0 and releases before it
_CHECKPOINTS = ("state_checkpoints", "checkpoint_cu_starts", "checkpoint_every_n_tokens", "use_cp")
_replacement = Replacement(
    "vLLM 0.22.0 to 0.33.0",
    {
        f"{_LAYERS}.qwen_gdn_linear_attn": {
            "fla_chunk_gated_delta_rule": (chunk_gated_delta_rule,),
            "fi_chunk_gated_delta_rule": (
                fi_chunk_gated_delta_rule,
                earlier(fi_chunk_gated_delta_rule, *_CHECKPOINTS),  # releases before 0.33.0
            ),
            "fused_recurrent_gated_delta_rule_packed_decode": (fused_recurrent_gated_delta_rule_packed_decode,),
            "fused_sigmoid_gating_delta_rule_update": (fused_sigmoid_gating_delta_rule_update,),
            "causal_conv1d_fn": _CONVOLUTION,
            "fused_post_conv_prep": (fused_post_conv_prep,),
        },
        f"{_LAYERS}.olmo_gdn_linear_attn": {
            "chunk_gated_delta_rule": (chunk_gated_delta_rule,),
            "fused_recurrent_gated_delta_rule": (fused_recurrent_gated_delta_rule,),
            "causal_conv1d_fn": _CONVOLUTION,
        },
    },
    methods={
        f"{_LAYERS}.qwen_gdn_linear_attn": {
            "QwenGatedDeltaNetAttention.__init__": _vllm_layer.with_region,
            "QwenGatedDeltaNetAttention._forward_core_fused_norm_packed": _vllm_layer.forward_core,
        }
    },
    package="vllm",
    run=("0.33.0",),
)


def use_flash_qla() -> None:
    """Have vLLM's Gated DeltaNet layers call the functions of this module, in this process.

    Layers that are made from here on also run all between their projections as one call, where they can.

    Raises
    ------
    ImportError
        vLLM cannot be imported.
    RuntimeError
        vLLM lacks one of the functions, or has it with other arguments. Then nothing is changed.
    """
    _replacement.use()


def restore() -> None:
    """Give vLLM's layers their own functions again."""
    _vllm_layer.restore()
    _replacement.restore()
