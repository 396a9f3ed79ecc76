"""The gated RMS norm after the delta rule: forward, and a step (forward and torch.autograd.grad), beside FLA's layer.

    python benchmarks/norm.py --out FILE.json
    python benchmarks/norm.py --heads 16x32 --sequences 4096x8

o, dy and the weight (fp32) are contiguous, z is a slice of a projection with as many channels again; bf16. The floor is
the time in which the card copies the bytes: o and z in and y out, and for a backward o, z and dy in and do and dz out.
Tensors that fit the L2 cache may take less. The backward's time is that of a step less that of the forward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import common
import torch
from accuracy import relative_error
from reference import gated_rms_norm as formula


def norm_of(package: str, V: int):
    """A function of o, z and weight."""
    if package == "flash_qla":
        import flash_qla

        return flash_qla.gated_rms_norm
    from fla.modules import FusedRMSNormGated

    layer = FusedRMSNormGated(V, eps=1e-6, device=common.DEVICE, dtype=torch.float32)

    def call(o, z, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (o, z))

    return call


def make_tensors(tokens: int, heads: int, V: int) -> tuple[torch.Tensor, ...]:
    """o, z, weight and dy."""
    generator = torch.Generator(common.DEVICE).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=common.DEVICE, dtype=torch.bfloat16)

    z = randn(1, tokens, 2 * heads * V)[..., heads * V :].unflatten(-1, (heads, V))
    return randn(1, tokens, heads, V), z, randn(V).float(), randn(1, tokens, heads, V)


def measure(package: str, options: argparse.Namespace) -> Iterator[dict]:
    for _, heads in common.parse_heads(options.heads):
        for sequences in options.sequences.split(","):
            tokens, V = sum(common.parse_lengths(sequences)), options.head_dims[1]
            norm = norm_of(package, V)
            o, z, weight, dy = make_tensors(tokens, heads, V)
            leaves = [x.detach().requires_grad_() for x in (o, z, weight)]

            def step(norm=norm, leaves=leaves, dy=dy):
                y = norm(*leaves)
                return y.detach(), *torch.autograd.grad(y, leaves, dy)

            with torch.no_grad():
                forward = common.time_graph(lambda: norm(o, z, weight), options.samples, options.sample_ms)  # noqa: B023
            of_step = common.time_graph(step, options.samples, options.sample_ms)
            exact = [x.double().requires_grad_() for x in (o, z, weight)]
            y = formula(*exact)
            expected = y.detach(), *torch.autograd.grad(y, exact, dy.double())
            errors = dict(zip(("y", "do", "dz", "dweight"), map(relative_error, step(), expected), strict=True))
            copy_ms = 2 * o.numel() / common.ceilings()["bandwidth"] * 1e3  # of one tensor, one way
            yield {
                "package": package,
                "heads": heads,
                "sequences": sequences,
                "errors": errors,
                "forward_ms": statistics.median(forward),
                "forward_floor_ms": 3 * copy_ms,
                "step_ms": statistics.median(of_step),
                "step_floor_ms": 8 * copy_ms,
            }


def report(cells: list[dict]) -> None:
    for of in ("forward", "step"):
        print(f"{of}: heads, sequences, ms")
        common.print_comparison(cells, f"{of}_ms", lambda x: (x["heads"], x["sequences"]), floor=f"{of}_floor_ms")
    for x in cells:
        backward, floor = (1e3 * (x[f"step{of}_ms"] - x[f"forward{of}_ms"]) for of in ("", "_floor"))
        errors = ", ".join(f"{name} {error:.1e}" for name, error in x["errors"].items())
        print(f"{x['package']} {x['heads']} {x['sequences']}: backward {backward:.1f} us, a copy {floor:.1f}; {errors}")


def main() -> None:
    parser = common.argument_parser(__doc__.splitlines()[0])
    common.add_timing_arguments(parser, heads="2x8,16x32,16x64", sequences="1x8192,4096x8")
    common.run(parser, measure, report, common.FLA_TRITON)


if __name__ == "__main__":
    main()
