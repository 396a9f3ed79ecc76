"""The causal depthwise convolution of a Gated DeltaNet layer by flash_qla and FLA on one GPU, a process per package.

    python benchmarks/convolution.py
    python benchmarks/convolution.py --heads 16x32 --sequences 1x8192 --packages flash_qla --out FILE.json

D = 2 H_k K + H_v V channels of width 4, in bf16, with a bias and SiLU. The sequences are rows of a batch if they are
equally long, else packed.

  forward    y
  windows    y and the final windows, from initial ones
  step       forward and torch.autograd.grad: the gradients of x, weight and bias
  backward   the time of step less that of forward, because a CUDA graph cannot begin between them

Times are medians over replays of CUDA graphs. The floor is the time of a copy of the bytes: the forward reads x and
writes y; the backward reads x and dy and writes dx. Errors are relative L2 of y on the first 512 tokens against
PyTorch's convolution in fp64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import common
import torch
from accuracy import relative_error

WIDTH = 4
BYTES = 2  # of an element


def functions(package: str) -> Callable:
    """function(x, weight, bias, initial_state, output_final_state, cu_seqlens) -> (y, final state)."""
    if package == "flash_qla":
        from flash_qla import causal_conv1d

        return lambda x, weight, bias, state, final, offsets: causal_conv1d(
            x, weight, bias, initial_state=state, output_final_state=final, cu_seqlens=offsets
        )
    from fla.modules.convolution import causal_conv1d as of_fla

    return lambda x, weight, bias, state, final, offsets: of_fla(
        x, weight, bias, initial_state=state, output_final_state=final, activation="silu", cu_seqlens=offsets
    )


def make_inputs(D: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, the windows [N, D, W] that both packages take, and cu_seqlens or None."""
    generator = torch.Generator(common.DEVICE).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=common.DEVICE, dtype=torch.bfloat16)

    batched = len(set(lengths)) == 1
    x = randn(len(lengths), lengths[0], D) if batched else randn(1, sum(lengths), D)
    offsets = None if batched else torch.tensor([0, *lengths], device=common.DEVICE).cumsum(0).int()
    return x, randn(D, WIDTH), randn(D), randn(len(lengths), D, WIDTH), offsets


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tokens: int) -> float:
    """Of the first sequence's first tokens, without an initial window."""
    first = x[:1, :tokens].double().mT
    expected = torch.nn.functional.conv1d(first, weight.double()[:, None], bias.double(), 1, WIDTH - 1, 1, x.shape[2])
    return relative_error(y[:1, :tokens], torch.nn.functional.silu(expected[..., :tokens]).mT)


def measure(package: str, options) -> Iterator[dict]:
    function = functions(package)
    K, V = options.head_dims
    for H_k, H_v in common.parse_heads(options.heads):
        for text in options.sequences.split(","):
            lengths, D = common.parse_lengths(text), 2 * H_k * K + H_v * V
            x, weight, bias, windows, offsets = make_inputs(D, lengths)
            dy = torch.randn_like(x)
            leaves = [y.clone().requires_grad_() for y in (x, weight, bias)]

            @torch.no_grad()
            def forward(inputs=(x, weight, bias), state=None, final=False, offsets=offsets):
                return function(*inputs, state, final, offsets)[0]

            def step(leaves=leaves, dy=dy, offsets=offsets):
                return torch.autograd.grad(function(*leaves, None, False, offsets)[0], leaves, dy)

            calls = {"forward": forward, "windows": lambda w=windows, f=forward: f(state=w, final=True), "step": step}
            us = {way: 1e3 * statistics.median(time(call, options)) for way, call in calls.items()}
            us["backward"] = max(us["step"] - us["forward"], 1e-3)
            copied = x.numel() * BYTES / common.ceilings()["bandwidth"] * 1e6
            floors = {"forward": 2 * copied, "windows": 2 * copied, "backward": 3 * copied, "step": 5 * copied}
            y = forward()
            cell = {"package": package, "heads": f"{H_k}x{H_v}", "D": D, "sequences": text, "us": us}
            cell |= {"floor_us": floors, "error": error(y, x, weight, bias, min(512, lengths[0]))}
            figures = ", ".join(f"{way} {us[way]:.1f} us ({floors[way] / us[way]:.0%} of a copy)" for way in us)
            print(f"{package:>10} {cell['heads']:>6} {text:>10}: {figures}, error {cell['error']:.1e}", flush=True)
            yield cell
            del x, dy, leaves, y, step, forward, calls  # before the next ones


def time(call: Callable, options) -> list[float]:
    return common.time_graph(call, options.samples, options.sample_ms)


def report(cells: list[dict]) -> None:
    """FLA's times over flash_qla's."""
    for way in ("forward", "windows", "backward", "step"):
        rows = [cell | {"way_us": cell["us"][way], "floor": cell["floor_us"][way]} for cell in cells]
        print(way)
        common.print_comparison(rows, "way_us", lambda cell: (cell["heads"], cell["sequences"]), "floor")


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0])
    common.add_timing_arguments(parser, heads="2x8,16x32,16x64", sequences="1x8192,4096x8", samples=7)
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report)
