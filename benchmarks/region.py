"""The region of a Gated DeltaNet layer between its projections, whole and by part, by flash_qla and FLA on one GPU.

    python benchmarks/region.py --out FILE.json
    python benchmarks/region.py --heads 16x32 --sequences 4096x8 --parts region --packages flash_qla

  convolution   width 4, SiLU, over D = 2 H_k K + H_v V channels
  rule          chunk_gated_delta_rule on slices of the convolution's result, all activations and the l2norm inside
  norm          RMS norm of each head with the gate of z
  region        all three: of flash_qla gated_delta_net, of FLA one function after the other

Sequences are packed. mixed, z, a and b are slices of one bf16 projection; parameters are fp32, but the convolution's
weight. Two calls of each part are timed, as medians over replays of CUDA graphs:

  forward       without gradients
  step          forward and torch.autograd.grad with respect to all tensors

The floor, of the convolution and the norm, is the time of a copy of the bytes that a call has to move. Errors are
relative L2 of the region's y on the first tokens against the recurrence in fp64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import common
import torch
from accuracy import relative_error

PARTS = ("convolution", "rule", "norm", "region")
LAYER = ("mixed", "z", "a", "b", "conv_weight", "norm_weight", "A_log", "dt_bias")
CHECKED = 300  # tokens
EPS = 1e-6


class FlashQLA:
    def __init__(self, H_k: int, K: int, V: int, offsets: torch.Tensor, longest: int):
        import flash_qla

        self.flash_qla = flash_qla
        self.heads = {"num_k_heads": H_k, "head_k_dim": K}
        self.lengths = {"cu_seqlens": offsets, "max_seqlen": longest}

    def convolution(self, mixed, conv_weight):
        return self.flash_qla.causal_conv1d(mixed, conv_weight, cu_seqlens=self.lengths["cu_seqlens"])[0]

    def rule(self, x, a, b, A_log, dt_bias):
        inside = common.INSIDE | {"use_qk_l2norm_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        return self.flash_qla.chunk_gated_delta_rule_packed(x, a, b, **self.heads, **inside, **self.lengths)[0]

    def norm(self, o, z, norm_weight):
        return self.flash_qla.gated_rms_norm(o, z, norm_weight, eps=EPS)

    def region(self, mixed, z, a, b, conv_weight, norm_weight, A_log, dt_bias):
        tensors = (mixed, z, a, b, conv_weight, None, norm_weight, A_log, dt_bias)
        return self.flash_qla.gated_delta_net(*tensors, **self.heads, **self.lengths, norm_eps=EPS)[0]


class FLA:
    def __init__(self, H_k: int, K: int, V: int, offsets: torch.Tensor, longest: int):
        from fla.modules import FusedRMSNormGated
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        self.H_k, self.K, self.V, self.offsets = H_k, K, V, offsets
        self.causal_conv1d, self.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule
        self.layer = FusedRMSNormGated(V, eps=EPS, device=common.DEVICE, dtype=torch.float32)

    def convolution(self, mixed, conv_weight):
        return self.causal_conv1d(mixed, conv_weight, activation="silu", cu_seqlens=self.offsets)[0]

    def rule(self, x, a, b, A_log, dt_bias):
        keys = self.H_k * self.K
        q, k, v = x.split([keys, keys, x.shape[-1] - 2 * keys], -1)
        q, k = (y.unflatten(-1, (self.H_k, self.K)).contiguous() for y in (q, k))
        inside = common.INSIDE | {"use_qk_l2norm_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        v = v.unflatten(-1, (-1, self.V)).contiguous()
        return self.chunk_gated_delta_rule(q, k, v, a, b, cu_seqlens=self.offsets, **inside)[0]

    def norm(self, o, z, norm_weight):
        return torch.func.functional_call(self.layer, {"weight": norm_weight}, (o, z))

    def region(self, mixed, z, a, b, conv_weight, norm_weight, A_log, dt_bias):
        o = self.rule(self.convolution(mixed, conv_weight), a, b, A_log, dt_bias)
        return self.norm(o, z, norm_weight)


PACKAGES = {"flash_qla": FlashQLA, "fla": FLA}
# Part -> the tensors that it takes
TENSORS = {
    "convolution": ("mixed", "conv_weight"),
    "rule": ("x", "a", "b", "A_log", "dt_bias"),
    "norm": ("o", "z", "norm_weight"),
    "region": LAYER,
}


def make_layer(H_k: int, H_v: int, K: int, V: int, tokens: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer; x and o are of the size of what the first two parts return."""
    generator = torch.Generator(common.DEVICE).manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device=common.DEVICE).to(dtype)

    D, float32 = 2 * H_k * K + H_v * V, torch.float32
    mixed, z, a, b = randn(1, tokens, D + H_v * V + 2 * H_v).split([D, H_v * V, H_v, H_v], -1)
    return {
        "mixed": mixed,
        "z": z.unflatten(-1, (H_v, V)),
        "a": a,
        "b": b,
        "conv_weight": randn(D, 4) / 2,
        "norm_weight": 1 + randn(V, dtype=float32) / 10,
        "A_log": (1 + 15 * torch.rand(H_v, generator=generator, device=common.DEVICE)).log(),
        "dt_bias": randn(H_v, dtype=float32) - 4,
        "x": randn(1, tokens, D),
        "o": randn(1, tokens, H_v, V),
    }


def floors(part: str, D: int, values: int, tokens: int) -> dict[str, float]:
    """Microseconds of a copy of the bytes of each call; none of the parts that multiply matrices."""
    tensors = {"convolution": (2 * D, 3 * D), "norm": (3 * values, 5 * values)}
    if part not in tensors:
        return {}
    forward, backward = (2e6 * tokens * x / common.ceilings()["bandwidth"] for x in tensors[part])
    return {"forward_floor": forward, "step_floor": forward + backward}


@torch.no_grad()
def error(y: torch.Tensor, layer: dict[str, torch.Tensor], H_k: int, K: int, tokens: int) -> float:
    from test_region import formula

    first = {x: layer[x][:, :tokens].double() for x in ("mixed", "z", "a", "b")}
    others = {x: layer[x].double() for x in LAYER[4:]}
    expected, *_ = formula(**first, **others, conv_bias=None, num_k_heads=H_k, head_k_dim=K, norm_eps=EPS)
    return relative_error(y[:, :tokens], expected)


def time(call: Callable, options) -> float:
    """Microseconds."""
    return 1e3 * statistics.median(common.time_graph(call, options.samples, options.sample_ms))


def measure(package: str, options) -> Iterator[dict]:
    K, V = options.head_dims
    for H_k, H_v in common.parse_heads(options.heads):
        for text in options.sequences.split(","):
            lengths = common.parse_lengths(text)
            tokens, D = sum(lengths), 2 * H_k * K + H_v * V
            offsets = torch.tensor([0, *lengths], device=common.DEVICE).cumsum(0).int()
            layer = make_layer(H_k, H_v, K, V, tokens)
            functions = PACKAGES[package](H_k, K, V, offsets, max(lengths))
            for part in options.parts.split(","):
                function, tensors = getattr(functions, part), [layer[x] for x in TENSORS[part]]
                leaves = [x.detach().requires_grad_() for x in tensors]
                dy = torch.randn_like(layer["x" if part == "convolution" else "o"])

                @torch.no_grad()
                def forward(function=function, tensors=tensors):
                    return function(*tensors)

                def step(function=function, leaves=leaves, dy=dy):
                    return torch.autograd.grad(function(*leaves), leaves, dy)

                cell = {"package": package, "heads": f"{H_k}x{H_v}", "sequences": text, "part": part}
                cell |= {"forward_us": time(forward, options), "step_us": time(step, options)}
                cell |= floors(part, D, H_v * V, tokens)
                if part == "region":
                    cell["relative_error"] = error(forward(), layer, H_k, K, min(CHECKED, lengths[0]))
                yield cell


def report(cells: list[dict]) -> None:
    for of in ("forward", "step"):
        print(f"{of}: part, heads, sequences, us")
        for part in PARTS:
            part_cells = [cell for cell in cells if cell["part"] == part]
            floor = f"{of}_floor" if part_cells and f"{of}_floor" in part_cells[0] else ""
            common.print_comparison(
                part_cells, f"{of}_us", lambda x: (x["part"], x["heads"], x["sequences"]), floor=floor
            )
    for x in (x for x in cells if "relative_error" in x):
        print(*(x[name] for name in ("package", "heads", "sequences")), f"error {x['relative_error']:.1e}")


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0])
    common.add_timing_arguments(parser, heads="2x8,4x16,16x32,16x64", sequences="1x8192,1x32768,4096x8", samples=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report, common.FLA_BACKWARD)
