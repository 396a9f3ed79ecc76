"""A token of each sequence through the region of a Gated DeltaNet layer, by flash_qla and FLA on one GPU.

    python benchmarks/decode_region.py --out FILE.json
    python benchmarks/decode_region.py --heads 16x32 --batches 1,64 --packages flash_qla
    python benchmarks/decode_region.py --tokens 4 --packages flash_qla

  region   of flash_qla: decode_gated_delta_net, one kernel
  parts    one function after the other: convolution on a pool of windows, delta rule on a pool of states, norm
  rule     of flash_qla: the delta rule alone

FLA's parts are its convolution update and norm, with its recurrent function in between; that one takes no slots, so
each sequence has a state of its own. Windows and tokens are in bf16, states in fp32. A sample is the replay of a CUDA
graph, whose calls take one pool, as the calls of one layer do: states of few sequences stay in the L2 cache. Medians
over samples, in microseconds a call. The floor is the time of a copy of the bytes of states, windows and tokens.

With --tokens each sequence has so many drafts, and the state after each goes to a slot of its own, as in vLLM. Then
`parts` are not measured, because the convolution of the package takes no drafts.
"""

from __future__ import annotations

import argparse
import math
import operator
import statistics
from collections.abc import Callable, Iterator

import common
import torch

WIDTH = 4


class Case:
    def __init__(self, H_k: int, H_v: int, batch: int, tokens_each: int, head_dims: tuple[int, int]):
        generator = torch.Generator(common.DEVICE).manual_seed(batch)
        self.K, self.V = K, V = head_dims
        self.H_k, self.H_v, D, slots = H_k, H_v, 2 * H_k * K + H_v * V, 2 * batch * tokens_each + 1

        def randn(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, generator=generator, device=common.DEVICE).to(dtype)

        tokens = randn(batch, tokens_each, D + H_v * V + 2 * H_v)
        self.mixed, z, self.b, self.a = tokens.split([D, H_v * V, H_v, H_v], -1)
        self.z = z.unflatten(-1, (H_v, V))
        self.conv_weight, self.norm_weight = randn(D, WIDTH), randn(V, dtype=torch.float32)
        self.A_log, self.dt_bias = randn(H_v, dtype=torch.float32), randn(H_v, dtype=torch.float32)
        columns = WIDTH - 2 + tokens_each
        self.windows, self.states = randn(slots, D, columns), randn(slots, H_v, V, K, dtype=torch.float32)
        self.slots = torch.randperm(slots, generator=generator, device=common.DEVICE)[: batch * tokens_each].int()
        self.drafts = {}
        if tokens_each > 1:
            self.slots = self.slots.view(batch, tokens_each)
            accepted = torch.ones(batch, dtype=torch.int32, device=common.DEVICE)
            self.drafts = {"num_accepted_tokens": accepted, "write_indices": self.slots}
        state, window, token = 4 * math.prod(self.states.shape[1:]), 2 * D * columns, 2 * (D + 2 * H_v * V)
        self.bytes = batch * ((1 + tokens_each) * state + 2 * window + tokens_each * token)


def flash_qla_calls(case: Case) -> dict[str, Callable]:
    import flash_qla

    weights = (case.conv_weight, None)
    gates = (case.A_log, case.dt_bias)

    def rule(x):
        return flash_qla.decode_gated_delta_rule_packed(
            x, case.a, case.b, *gates, case.states, case.slots, **case.drafts
        )

    def parts():
        x = flash_qla.prefill_causal_conv1d(case.mixed, *weights, case.windows, case.slots)
        return flash_qla.gated_rms_norm(rule(x), case.z, case.norm_weight)

    def region():
        return flash_qla.decode_gated_delta_net(
            *(case.mixed, case.z, case.a, case.b, *weights, case.norm_weight, *gates),
            *(case.windows, case.states, case.slots),
            **case.drafts,
        )

    of_parts = {} if case.drafts else {"parts": parts}
    return {"region": region, **of_parts, "rule": lambda: rule(case.mixed)}


def fla_calls(case: Case) -> dict[str, Callable]:
    from fla.modules import FusedRMSNormGated
    from fla.modules.convolution import causal_conv1d_update
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    batch, keys = len(case.slots), case.H_k * case.K
    windows = torch.zeros(batch, case.mixed.shape[-1], WIDTH, device=common.DEVICE, dtype=torch.bfloat16)
    states = case.states[:batch].mT.contiguous()
    norm = FusedRMSNormGated(case.V, device=common.DEVICE, dtype=torch.float32)

    @torch.no_grad()
    def parts():
        x = causal_conv1d_update(case.mixed, windows, weight=case.conv_weight, activation="silu")[0]
        q, k, v = x.split([keys, keys, case.H_v * case.V], -1)
        q, k = (y.unflatten(-1, (case.H_k, case.K)).contiguous() for y in (q, k))
        o, _ = fused_recurrent_gated_delta_rule(
            *(q, k, v.unflatten(-1, (case.H_v, case.V)).contiguous()),
            g=case.a,
            beta=case.b,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=case.A_log,
            dt_bias=case.dt_bias,
        )
        return norm(o, case.z)

    return {"parts": parts}


CALLS = {"flash_qla": flash_qla_calls, "fla": fla_calls}


def measure(package: str, options) -> Iterator[dict]:
    for H_k, H_v in common.parse_heads(options.heads):
        for batch in map(int, options.batches.split(",")):
            case = Case(H_k, H_v, batch, options.tokens, options.head_dims)
            for name, call in CALLS[package](case).items():
                us = 1e3 * statistics.median(common.time_graph(call, options.samples, options.sample_ms))
                cell = {"package": package, "function": name, "heads": f"{H_k}x{H_v}", "batch": batch, "us": us}
                cell["tokens"] = options.tokens
                yield cell | {"floor": 1e6 * case.bytes / common.ceilings()["bandwidth"]}


def report(cells: list[dict]) -> None:
    for name in ("region", "parts", "rule"):
        function_cells = [cell for cell in cells if cell["function"] == name]
        key = operator.itemgetter("function", "heads", "batch", "tokens")
        common.print_comparison(function_cells, "us", key, floor="floor")


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--heads", default="2x8,16x32", help="query/key x value heads")
    parser.add_argument("--batches", default="1,8,64,256", help="numbers of sequences")
    parser.add_argument("--tokens", type=int, default=1, help="of each sequence")
    common.add_head_dims_argument(parser)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=4.0, help="length of a sample")
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report)
