"""Measured time of a pass on every path that the host can choose, and the prediction of csrc/gpu/cost_model.cpp.

    python benchmarks/dispatch.py --out FILE.json
    python benchmarks/dispatch.py --backward

Each batch has a line with the model's choice, then the op in one kernel and in two with both value tiles, each over
whole sequences and over segments of several lengths. With keys of more than 128 channels there is one value tile, and
no one kernel. A choice may leave the decision to the device: N > M cuts after N chunks if a sequence has more than M.

For its choice the model knows the longest length of a batch. With --unknown it knows only the average, from which it
predicts an expectation. For the other modes it predicts equal sequences, which shows how good its constants are. Inputs
and timing are those of forward.py, with gates "bench". The backward, timed as in backward.py, has no modes except
segments.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator

import common
import torch
from backward import flash_qla_backward
from forward import HEADS

SEQUENCES = (
    "1x64,1x256,1x512,1x2048,1x8192,1x32768,16384+16384,28672+4096,16384+2048x8,8192x4,4096x8,1024x8,256x4,128x64,"
    "ragged8,ragged32"
)
NARROW_TILE, WIDE_TILE = 64, 128  # value rows
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # parts of a sequence
FIELDS = ("value_tile", "long_tile", "segment_chunks", "cut_above", "fused", "predicted_us")
BACKWARD_FIELDS = ("segment_chunks", "cut_above", "predicted_us")
MAX_TILES_PER_SM = 3  # work tiles; each one is one more wave


def segmentations(H_v: int, V: int, lengths: list[int], sm_count: int, value_tile: int) -> Iterator[int]:
    chunks = math.ceil(sum(lengths) / common.CHUNK / len(lengths))
    segments = {0: len(lengths)} | {
        math.ceil(chunks / parts): len(lengths) * parts for parts in PARTS if parts <= (chunks + 1) // 2
    }
    for segment_chunks, count in segments.items():
        tiles = count * H_v * math.ceil(V / value_tile)
        if segment_chunks == 0 or tiles <= (1 if value_tile == NARROW_TILE else MAX_TILES_PER_SM) * sm_count:
            yield segment_chunks


class Forward:
    fields = FIELDS

    @staticmethod
    def modes(H_v: int, head_dims: tuple[int, int], lengths: list[int], sm_count: int) -> Iterator[dict]:
        """Modes of forced_dispatch."""
        K, V = head_dims
        if K <= 128:
            yield {"fused": True, "segment_chunks": 0}
        for value_tile in (NARROW_TILE, WIDE_TILE) if K <= 128 else (WIDE_TILE,):
            for segment_chunks in segmentations(H_v, V, lengths, sm_count, value_tile):
                mode = {"value_tile": value_tile, "segment_chunks": segment_chunks}
                yield mode | {"fused": False}
                if K <= 128 and value_tile == WIDE_TILE and segment_chunks > 0:
                    yield mode | {"fused": True}

    @staticmethod
    def call(H_k: int, H_v: int, lengths: list[int], head_dims: tuple[int, int], max_seqlen_option: dict[str, int]):
        arguments = common.make_inputs(H_k, H_v, lengths, head_dims) | {"output_final_state": True, **max_seqlen_option}
        return lambda: torch.ops.flash_qla.chunk_gated_delta_rule(**arguments)

    def __init__(self):
        from flash_qla import _C, testing

        self.dispatch = _C.forward_dispatch
        self.forced = lambda mode: testing.forced_dispatch(forward=mode)


class Backward:
    fields = BACKWARD_FIELDS

    @staticmethod
    def modes(H_v: int, head_dims: tuple[int, int], lengths: list[int], sm_count: int) -> Iterator[dict]:
        for segment_chunks in segmentations(H_v, head_dims[1], lengths, sm_count, WIDE_TILE):
            yield {"segment_chunks": segment_chunks}

    @staticmethod
    def call(H_k: int, H_v: int, lengths: list[int], head_dims: tuple[int, int], max_seqlen_option: dict[str, int]):
        inputs, output_gradients = common.make_inputs(H_k, H_v, lengths, head_dims, gradients=True)
        return flash_qla_backward(inputs | max_seqlen_option, output_gradients)

    def __init__(self):
        from flash_qla import _C, testing

        self.dispatch = _C.backward_dispatch
        self.forced = lambda mode: testing.forced_dispatch(backward=mode)


def figures_of_card() -> dict[str, int]:
    """Options of the dispatch questions: SMs, clock and memory rate of this GPU."""
    from flash_qla import _C

    gpu = _C.gpus()[torch.cuda.current_device()]
    return {name: getattr(gpu, name) for name in ("sm_count", "sm_mhz", "memory_gb_s")}


@torch.no_grad()
def measure(package: str, options) -> Iterator[dict]:
    direction = Backward() if options.backward else Forward()
    card = figures_of_card()
    K, V = options.head_dims
    for H_k, H_v in common.parse_heads(options.heads):
        for text in options.sequences.split(","):
            lengths = common.parse_lengths(text)
            max_seqlen_option = {} if options.unknown else {"max_seqlen": max(lengths)}
            call = direction.call(H_k, H_v, lengths, options.head_dims, max_seqlen_option)
            T, N = sum(lengths), len(lengths)
            equal = len(set(lengths)) == 1
            for mode in ({}, *direction.modes(H_v, options.head_dims, lengths, card["sm_count"])):
                with direction.forced(mode):
                    times = common.time_graph(call, options.samples, options.sample_ms)
                    if mode and equal:
                        record = direction.dispatch(N, T // N, N, H_k, H_v, **card, varlen=False, K=K, V=V)
                    else:
                        record = direction.dispatch(1, T, N, H_k, H_v, **card, K=K, V=V, **max_seqlen_option)
                yield {
                    "heads": f"{H_k}x{H_v}",
                    "sequences": text,
                    **common.head_dims_field(options.head_dims),
                    **common.qkv_field(),
                    "chosen": not mode,
                    **{name: getattr(record, name) for name in direction.fields},
                    **common.spread(times),
                }


def name(cell: dict) -> str:
    above = f">{cell['cut_above']}" if cell["cut_above"] else ""
    if "fused" not in cell:
        return f"{cell['segment_chunks'] or '-'}{above}"
    tiles = dict.fromkeys((cell["value_tile"], cell["long_tile"]))
    tile = "fused" if cell["fused"] else "-".join(map(str, tiles))
    return f"{tile}/{cell['segment_chunks'] or '-'}{above}"


def report(cells: list[dict]) -> None:
    """Prints a line for each batch, then the errors of predictions and choices."""
    batches: dict[tuple[str, str], list[dict]] = {}
    for cell in cells:
        batches.setdefault((common.heads_of(cell), cell["sequences"]), []).append(cell)
    print(f"{'heads':>6} {'sequences':>12}  {'chosen':>11} {'us':>7} {'predicted':>9}  {'fastest':>8} {'us':>7}")
    lost, off = [], []
    for (heads, sequences), measured in batches.items():
        [chosen] = [cell for cell in measured if cell["chosen"]]
        # The same mode measured twice differs by chance.
        times = {name(cell): min(x["ms"] for x in measured if name(x) == name(cell)) * 1e3 for cell in measured}
        fastest = min(times, key=times.get)
        us = times[name(chosen)]
        lost.append(math.log(us / times[fastest]))
        print(
            f"{heads:>6} {sequences:>12}  {name(chosen):>11} {us:7.1f} {chosen['predicted_us']:9.1f}  {fastest:>8} "
            f"{times[fastest]:7.1f}"
        )
        if len(set(common.parse_lengths(sequences))) == 1:
            off += [math.log(cell["predicted_us"] / (cell["ms"] * 1e3)) for cell in measured if not cell["chosen"]]
    print(f"\nchosen over fastest: {math.exp(statistics.fmean(lost)):.3f}, at most {math.exp(max(lost)):.2f}")
    if off:
        rms = math.sqrt(statistics.mean(x * x for x in off))
        print(f"predicted over measured, equal sequences: {rms:.1%} rms over {len(off)}")


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    common.add_timing_arguments(parser, HEADS, SEQUENCES, samples=5)
    parser.set_defaults(sample_ms=3.0)
    parser.add_argument("--backward", action="store_true", help="the backward's modes")
    parser.add_argument("--unknown", action="store_true", help="call without max_seqlen")
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report)
