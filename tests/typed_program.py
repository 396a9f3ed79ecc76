"""A user's program, for type checkers: test_typing.py runs mypy and pyright on it, and imports it."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_qla
import flash_qla.ops.gated_delta_rule
from flash_qla import _C, chunk_gated_delta_rule_bwd, decode_gated_delta_rule, prefill_gated_delta_rule
from flash_qla.cp import CPContext, build_cp_context, exchange_halo
from flash_qla.integrations import fla, megatron, sglang, vllm
from flash_qla.integrations.transformers import Switched, restore, use_flash_qla
from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd as published_bwd
from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context as published_context


def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    assert_type(flash_qla.chunk_gated_delta_rule(x, x, x, x, x), tuple[Tensor, Tensor | None])
    o, _ = flash_qla.ops.gated_delta_rule.chunk_gated_delta_rule(x, x, x, x, x, state_dtype=torch.bfloat16)
    _, A, _, h, _ = flash_qla.chunk_gated_delta_rule_intermediates(x, x, x, x, x, output_h=True)
    *_, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(x, x, x, x, x, enable_fwd_cp_cache=True)
    chunk_gated_delta_rule_bwd(x, x, x, x, x, A, x, cp_cache=cp_cache)
    chunk_gated_delta_rule(x, x, x, x)  # type: ignore[call-arg]
    return o, A, h


def backward(x: Tensor, with_gate: bool) -> None:
    dq, dk, dv, db, dg, dh0 = chunk_gated_delta_rule_bwd(x, x, x, x, x, x, x, x, 1.0)
    for gradient in (dq, dk, dv, db, dg):
        assert_type(gradient, Tensor)
    assert_type(dh0, Tensor | None)
    *_, dA_log, ddt_bias = published_bwd(x, x, x, x, x, x, x, use_gate_in_kernel=True, A_log=x, g_raw=x)
    assert_type((dA_log, ddt_bias), tuple[Tensor, Tensor | None])
    gradients = chunk_gated_delta_rule_bwd(x, x, x, x, x, x, x, use_gate_in_kernel=with_gate)
    if len(gradients) == 8:
        assert_type(gradients[6], Tensor)


def serving(x: Tensor) -> None:
    assert_type(prefill_gated_delta_rule(x, x, x, x, x, x, x), Tensor)
    assert_type(decode_gated_delta_rule(x, x, x, x, x, x, None, x, x), Tensor)
    assert_type(flash_qla.decode_gated_delta_rule_buffered(x, x, x, x, x, x, x, x, x, x, x, x, x, None), Tensor)
    assert_type(flash_qla.decode_gated_delta_rule_packed(x, x, x, x, None, x, x, update_state=False), Tensor)


def ranks(x: Tensor, cu_seqlens: Tensor) -> CPContext:
    context = build_cp_context(cu_seqlens, conv1d_kernel_size=4)
    published = published_context(cu_seqlens, enable_inter=True, enable_intra=True)
    chunk_gated_delta_rule(x, x, x, x, x, cp_context=published, enable_fwd_cp_cache=True)
    fla.chunk_gated_delta_rule(x, x, x, x, x, cu_seqlens_cpu=x, chunk_size=64, cp_context=context)
    assert_type(exchange_halo(x, context), Tensor)
    chunk_gated_delta_rule(x, x, x, x, x, cp_context=context)
    build_cp_context([0, 4])  # type: ignore[arg-type]
    return context


def integrations(model: torch.nn.Module) -> None:
    with use_flash_qla(model) as switched:
        assert_type(switched, Switched)
        assert_type(switched.layers, dict[str, torch.nn.Module])
    switched.restore()
    restore(model)
    vllm.use_flash_qla()
    sglang.use_flash_qla()
    megatron.use_flash_qla()
    megatron.restore()


def forced(x: Tensor) -> None:
    with flash_qla.testing.forced_dispatch(forward={"fused": False, "value_tile": 64}, backward={"segment_chunks": 4}):
        forward(x)
    flash_qla.testing.forced_dispatch(backward={"segments": 4})  # type: ignore[arg-type]


def registry() -> None:
    dispatch = _C.forward_dispatch(1, 4096, 1, 2, 8)
    assert_type(dispatch.fused, bool)
    dispatch.segments = 2  # type: ignore[misc]
    match dispatch:
        case _C.ForwardDispatch(segment_chunks, cut_above):
            assert_type((segment_chunks, cut_above), tuple[int, int])
    assert_type(_C.kernels()[0].params, dict[str, str | int | bool])
    assert_type(flash_qla.__version__, str)
