"""Forward time of flash_qla and of FLA's Triton kernels on one GPU, same inputs, one process per package.

    python benchmarks/forward.py --out benchmarks/results/forward_h200.json
    python benchmarks/forward.py --heads 16x32,2x8 --sequences 1x8192,4096x8 --packages flash_qla

Inputs: packed bf16 sequences of head dimension 128, L2-normalised q and k, g = logsigmoid(randn) / 16 with a quarter of
the heads at exactly 0, beta = sigmoid(randn), an fp32 initial state; the final state is returned. Time: median over
samples, each the replay of a CUDA graph that holds several calls. Error: relative L2 against the fp64 recurrence on a
short batch, so that what is timed is known to be right. FLA (package fla-core) is optional; its dispatch to other
packages is switched off.
"""

from __future__ import annotations

import torch
from common import (
    FLA_TRITON,
    HEAD_DIM,
    SCALE,
    add_timing_arguments,
    argument_parser,
    by_cell,
    floor_ms,
    forward_errors,
    make_inputs,
    parse_heads,
    parse_lengths,
    run,
    spread,
    time_graph,
)

FLOP = 164e3  # matrix work per token and value head


def measure(package: str, options) -> list[dict]:
    if package == "flash_qla":
        from flash_qla import __version__, chunk_gated_delta_rule
    else:
        from fla import __version__
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    @torch.no_grad()
    def forward(inputs):
        return chunk_gated_delta_rule(**inputs, scale=SCALE, output_final_state=True)

    cells = []
    for H_k, H_v in parse_heads(options.heads):
        for text in options.sequences.split(","):
            lengths = parse_lengths(text)
            inputs = make_inputs(H_k, H_v, lengths)
            times = time_graph(lambda inputs=inputs: forward(inputs), options.samples, options.sample_ms)
            cell = {
                "package": package,
                "version": __version__,
                "heads": f"{H_k}x{H_v}",
                "sequences": text,
                **spread(times),
                "floor_ms": floor_ms(sum(lengths), FLOP * H_v, 4 * HEAD_DIM * (H_k + H_v) + 8 * H_v),
            }
            cells.append(cell)
            print(
                f"{package:>10} {cell['heads']:>6} {text:>12} {cell['ms']:8.4f} ms [{times[0]:.4f}, {times[-1]:.4f}]",
                flush=True,
            )
            del inputs
            torch.cuda.empty_cache()

    # Last: FLA tunes itself on the first problem of each head count, which shall not be a small one.
    for H_k, H_v in parse_heads(options.heads):
        check = make_inputs(H_k, H_v, [256] * 4, seed=1)
        errors = forward_errors(check | {"scale": SCALE}, *forward(check))
        print(
            f"{package:>10} {H_k:>3}x{H_v:<2} errors: o {errors['o']:.2e}, state {errors['final_state']:.2e}",
            flush=True,
        )
        for cell in cells:
            if cell["heads"] == f"{H_k}x{H_v}":
                cell["relative_error"] = errors
    return cells


def report(cells: list[dict]) -> None:
    for (heads, sequences), found in by_cell(cells).items():
        if "flash_qla" not in found:
            continue
        ours = found["flash_qla"]
        line = f"{heads:>6} {sequences:>12}  {ours['ms']:.4f} ms, {ours['floor_ms'] / ours['ms']:.0%} of the floor"
        if "fla" in found:
            line += f", {found['fla']['ms'] / ours['ms']:.2f}x FLA ({found['fla']['ms']:.4f} ms)"
        print(line)


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0])
    add_timing_arguments(parser, heads="16x32,2x8,16x64", sequences="1x8192,4096x8,1x32768,1024x8")
    run(parser, measure, report, FLA_TRITON)
