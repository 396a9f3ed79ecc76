"""Context parallelism over ranks: the forward and the training step on W GPUs, where their time goes, and a prediction
for more GPUs.

    python benchmarks/context_parallelism.py --out FILE.json                             # one GPU
    torchrun --nproc-per-node 2 benchmarks/context_parallelism.py --out FILE.json        # the same sequences on two
    torchrun --nproc-per-node 2 benchmarks/context_parallelism.py --weak --out FILE.json # or as many tokens a rank
    python benchmarks/context_parallelism.py --parts 2,4,8,16,32,64 --out FILE.json      # one GPU as one of so many
    python benchmarks/context_parallelism.py --report FILE.json --hop-us 10 --gbs 300

The runs add their cells to one file, context_parallelism_h100.json for the documents, and remove cells of other
commits. --report prints speedups, differences of results from one GPU, and the prediction from the parts. Inputs are
the same for every number of ranks. Times are the slowest rank's. On GPUs they are device times, with the host ahead, as
within a model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forward import sketch

AHEAD_CYCLES = 20_000_000  # 10 ms of a GPU, in which the host launches a call
BLOCKS = 64  # all tokens are drawn, and their results compared, in so many equal blocks; a rank has whole blocks
INPUTS = ("q", "k", "v", "g", "beta")


class Clock:
    """A device's clock: marks are CUDA events on the current stream, or times on the CPU."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"

    def mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end) -> float:
        if not self.on_gpu:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)


def begin_together(clock: Clock) -> None:
    """Ranks start together, to within a small collective. The GPU first sleeps, so that the host is ahead."""
    if clock.on_gpu:
        torch.cuda._sleep(AHEAD_CYCLES)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cuda" if clock.on_gpu else "cpu"))


def median_ms(call, options, clock: Clock) -> list[float]:
    """Milliseconds of each sample, ascending."""
    for _ in range(options.warmup):
        call()
    times = []
    for _ in range(options.samples):
        begin_together(clock)
        start = clock.mark()
        call()
        times.append(clock.ms(start, clock.mark()))
    return sorted(times)


# Inputs and results


def blocks_of(rank: int, world_size: int, layout: str) -> list[int]:
    """The blocks of a rank, in the order of its tokens."""
    parts = [rank] if layout == "contiguous" else [rank, 2 * world_size - 1 - rank]
    size = BLOCKS // (world_size * len(parts))
    return [part * size + i for part in parts for i in range(size)]


def make_inputs(heads: tuple[int, int], tokens: int, blocks: list[int], options) -> dict[str, torch.Tensor]:
    """The rank's q, k, v, g, beta and do; gates as "bench" of common.make_inputs."""
    (H_k, H_v), (K, V), drawn = heads, options.head_dims, defaultdict(list)
    length = tokens // BLOCKS
    exact = torch.randperm(H_v, generator=torch.Generator().manual_seed(0))[: H_v // 4].to(options.device)
    for block in blocks:
        generator = torch.Generator(options.device).manual_seed(block)

        def randn(*shape, generator=generator):
            return torch.randn(1, length, *shape, generator=generator, device=options.device)

        g = F.logsigmoid(randn(H_v)) / 16
        g[..., exact] = 0
        found = (randn(H_k, K), randn(H_k, K), randn(H_v, V), g, randn(H_v).sigmoid(), randn(H_v, V))
        for i, (name, x) in enumerate(zip((*INPUTS, "do"), found, strict=True)):
            drawn[name].append(x if i in (3, 4) else x.bfloat16())
    return {name: torch.cat(pieces, 1) for name, pieces in drawn.items()}


def sketches(results: dict[str, torch.Tensor], blocks: list[int]) -> dict[str, dict[str, list[float]]]:
    """Tensor -> block -> sketch."""
    return {
        name: {str(n): sketch(piece) for n, piece in zip(blocks, x.tensor_split(len(blocks), 1), strict=True)}
        for name, x in results.items()
    }


def difference(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """The relative L2 difference of two tensors, from the sketches of their blocks."""
    x, y = ([number for block in sorted(z) for number in z[block]] for z in (found, expected))
    return math.dist(x, y) / math.hypot(*y)


# The packages


def flash_qla_call(offsets, options):
    import flash_qla
    from flash_qla.cp import build_cp_context

    where = {"cu_seqlens": offsets}
    if dist.is_initialized():
        where = {"cp_context": build_cp_context(offsets, dist.group.WORLD, layout=options.layout)}
    return lambda *x: flash_qla.chunk_gated_delta_rule(*x, **where, use_qk_l2norm_in_kernel=True)[0]


def fla_call(offsets, options):
    os.environ.update({name: value for name, value in common.FLA_BACKWARD.items() if value is not None})
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    where = {"cu_seqlens": offsets.long()}
    if dist.is_initialized():
        from fla.ops.cp import build_cp_context

        context = build_cp_context(offsets.long(), group=dist.group.WORLD, layout=options.layout)
        where = {"cp_context": context, "cu_seqlens": context.cu_seqlens}
    return lambda *x: chunk_gated_delta_rule(*x, **where, use_qk_l2norm_in_kernel=True)[0]


PACKAGES = {"flash_qla": (flash_qla_call, "flash-qla-aot"), "fla": (fla_call, "fla-core")}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(PACKAGES[package][1])
    except importlib.metadata.PackageNotFoundError:
        return None


# Where the time goes


# Functions of flash_qla/cp/passes.py, and their names here
PHASES = {
    "_begin_forward": "begin",
    "_finish_forward": "finish",
    "_begin_backward": "reverse begin",
    "_replay_backward": "replay",
    "_finish_backward": "reverse finish",
    "start_gather": "start",
    "wait": "wait",
    "fold": "fold",
}


class Phases:
    """Times the phases of context parallelism in the calls of its `with` block. Work between the start of the
    collective and the wait for it does not count as the collective's."""

    def __init__(self, clock: Clock):
        from flash_qla.cp import passes

        self.module, self.clock, self.marks = passes, clock, []
        self.functions = {name: getattr(passes, name) for name in PHASES}

    def __enter__(self):
        for name, function in self.functions.items():
            setattr(self.module, name, self.marked(name, function))
        return self

    def __exit__(self, *_):
        for name, function in self.functions.items():
            setattr(self.module, name, function)

    def marked(self, name, function):
        def call(*args, **kwargs):
            start = self.clock.mark()
            made = function(*args, **kwargs)
            self.marks.append((PHASES[name], start, self.clock.mark()))
            return made

        return call

    def ms(self) -> dict[str, float]:
        """Phase -> milliseconds in a step. "collective" begins at its start if the wait follows at once, else at the
        wait."""
        found, started, prefix = defaultdict(float), None, ""
        for i, (name, start, end) in enumerate(self.marks):
            if name in ("begin", "reverse begin"):
                prefix = name.removesuffix("begin")
            if name == "start":
                started = start
            elif name == "wait":
                at_once = self.marks[i - 1][0] == "start"
                found[f"{prefix}collective"] += self.clock.ms(started if at_once else start, end)
            else:
                found[prefix + name if name == "fold" else name] += self.clock.ms(start, end)
        return dict(found)


def phases(call, options, clock: Clock) -> dict[str, float]:
    samples = []
    for _ in range(options.samples):
        begin_together(clock)
        with Phases(clock) as watched:
            call()
        samples.append(watched.ms())
    return {name: statistics.median(x.get(name, 0.0) for x in samples) for name in samples[0]}


def measure_cell(package: str, heads: tuple[int, int], sequences: str, options, clock: Clock) -> dict:
    """Measures one cell. Every rank calls the function."""
    distributed = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    lengths = [n * world_size if options.weak else n for n in common.parse_lengths(sequences)]
    tokens, blocks = sum(lengths), blocks_of(rank, world_size, options.layout if distributed else "contiguous")
    inputs = make_inputs(heads, tokens, blocks, options)
    do = inputs.pop("do")
    leaves = [x.requires_grad_() for x in inputs.values()]
    offsets = torch.tensor([0, *lengths], device=options.device).cumsum(0).int()
    call = PACKAGES[package][0](offsets, options)

    def forward():
        with torch.no_grad():
            return call(*leaves)

    def step():
        o = call(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    own = {"forward": median_ms(forward, options, clock), "step": median_ms(step, options, clock)}
    own = {name: statistics.median(times) for name, times in own.items()}
    if distributed and package == "flash_qla":
        own["phases"] = phases(step, options, clock)
    if clock.on_gpu:
        own["peak_bytes"] = torch.cuda.max_memory_allocated()
    own["sketches"] = sketches(dict(zip(("o", "dq", "dk", "dv", "dg", "db"), step(), strict=True)), blocks)
    ranks = [own]
    if distributed:
        ranks = [None] * world_size
        dist.all_gather_object(ranks, own)
    cell = {"package": package, "version": version_of(package), "heads": "{}x{}".format(*heads)}
    cell |= common.head_dims_field(options.head_dims)
    cell |= {"sequences": sequences, "scaling": "weak" if options.weak else "strong", "ranks": world_size}
    cell |= {"layout": options.layout if distributed else None, "tokens": tokens}
    cell |= {f"{name}_ms": max(x[name] for x in ranks) for name in ("forward", "step")}
    cell |= {name: [x[name] for x in ranks] for name in ("phases", "peak_bytes") if name in own}
    merged = {}
    for x in ranks:
        for name, of_blocks in x["sketches"].items():
            merged.setdefault(name, {}).update(of_blocks)
    return cell | {"sketches": merged}


def measure_parts(heads: tuple[int, int], sequences: str, world_size: int, options, clock: Clock) -> dict:
    """Times on one GPU with the tokens of a middle rank of `world_size`: from a pass's beginning to the end of its
    first half, of replay (backward), and of the pass; then the fold of all other ranks' maps, and of two maps."""
    from flash_qla.cp.maps import fold

    ops, V = torch.ops.flash_qla, options.head_dims[1]
    tokens = sum(common.parse_lengths(sequences))
    inputs = make_inputs(heads, tokens // world_size * BLOCKS, [0], options)
    own, do = [inputs[name] for name in INPUTS], inputs["do"]
    l2norm = {"use_qk_l2norm_in_kernel": True}

    def begin():
        return ops.gated_delta_rule_forward_begin(*own, [0], **l2norm)

    maps, *_ = begin()
    reverse_own = [*own[:3], None, own[4], do]
    state = {"initial_state": maps[:, :, :V].contiguous(), "state_v_first": True, **l2norm}
    reverse_options = {"g_raw": own[3], **l2norm}

    def reverse_begin():
        return ops.gated_delta_rule_backward_begin(*reverse_own, [0], **reverse_options)

    def whole():
        _, *made = begin()
        ops.gated_delta_rule_forward_finish(*own, *made, **state)

    def reverse_replay():
        _, workspace, *made = reverse_begin()
        ops.gated_delta_rule_backward_replay(*reverse_own, workspace, **state | reverse_options)
        return workspace, *made

    def reverse_whole():
        made = reverse_replay()
        ops.gated_delta_rule_backward_finish(*reverse_own, *made, dht=state["initial_state"], **state | reverse_options)

    all_maps = maps.expand(max(world_size - 1, 2), -1, -1, -1).contiguous()
    calls = {"begin": begin, "whole": whole}
    calls |= {"reverse begin": reverse_begin, "reverse replay": reverse_replay, "reverse whole": reverse_whole}
    calls["fold"] = lambda: fold(all_maps[: world_size - 1], world_size - 1, V)
    calls["product"] = lambda: fold(all_maps[:2], 2, V)
    cell = {"package": "flash_qla", "version": version_of("flash_qla"), "heads": "{}x{}".format(*heads)}
    cell |= common.head_dims_field(options.head_dims) | {"sequences": sequences, "parts_of": world_size}
    cell["map_bytes"] = maps.numel() * maps.element_size()
    return cell | {"ms": {name: statistics.median(median_ms(call, options, clock)) for name, call in calls.items()}}


# Prediction


def predicted_ms(parts: dict, hop_us: float, gbs: float) -> dict[str, float]:
    """A rank's forward and step, and the time between the halves of a pass, from a cell of measure_parts.

    "between" is an all-gather around a ring, and the fold of all maps. "tree" is a scan over the ranks in log2 W
    rounds, each of which exchanges a map and composes two. The backward replays its states meanwhile.
    """
    W, ms = parts["parts_of"], parts["ms"]
    hop = hop_us / 1e3 + parts["map_bytes"] / gbs / 1e6
    between = (W - 1) * hop + ms["fold"]
    tree = (W - 1).bit_length() * (hop + ms["product"])
    found = {"between": between, "tree": tree}
    for wait, by in ((between, ""), (tree, " by tree")):
        found[f"forward{by}"] = ms["whole"] + wait
        hidden = ms["reverse replay"] - ms["reverse begin"]
        found[f"step{by}"] = found[f"forward{by}"] + ms["reverse whole"] + max(0, wait - hidden)
    return found


def report(cells: list[dict], options) -> None:
    key = lambda cell: (cell["package"], common.heads_of(cell), cell["sequences"])  # noqa: E731
    one = {key(cell): cell for cell in cells if cell.get("ranks") == 1}
    for cell in cells:
        base, name = one.get(key(cell)), "{:>9} {:>8} {:>12}".format(*key(cell))
        if cell.get("ranks", 1) > 1:
            line = f"{name} W={cell['ranks']:<4} {cell['scaling']:>6}"
            for what in ("forward", "step"):
                line += f"  {what} {cell[f'{what}_ms']:9.3f} ms"
                if base:
                    times = (
                        base[f"{what}_ms"] / cell[f"{what}_ms"] * (cell["ranks"] if cell["scaling"] == "weak" else 1)
                    )
                    line += f", {times:5.2f} times one"
            if base and cell["scaling"] == "strong" and "sketches" in base:
                found = {x: difference(y, base["sketches"][x]) for x, y in cell["sketches"].items()}
                line += "  differences " + " ".join(f"{x} {y:.1e}" for x, y in found.items())
            print(line)
            for i, of_rank in enumerate(cell.get("phases", [])):
                print(f"{'':>31} rank {i}: " + ", ".join(f"{x} {y:.3f}" for x, y in of_rank.items()) + " ms")
        elif "parts_of" in cell:
            W, found = cell["parts_of"], predicted_ms(cell, options.hop_us, options.gbs)
            line = f"{name} W={W:<4} predicted"
            for what in ("forward", "step"):
                line += f"  {what} {found[what]:9.3f} ms ({found[what + ' by tree']:.3f} by a tree)"
                if base:
                    line += f", {base[f'{what}_ms'] / found[what]:6.2f} times one"
            print(f"{line}  between the halves {found['between']:.3f} ({found['tree']:.3f})")
        else:
            print(f"{name} W=1            forward {cell['forward_ms']:9.3f} ms  step {cell['step_ms']:9.3f} ms")


def write(path: Path, cells: list[dict]) -> None:
    """Cells of the same commit that were measured before stay in the file, unless they were measured again."""

    def key(cell: dict) -> tuple:
        return tuple(cell.get(name) for name in ("package", "ranks", "scaling", "layout", "parts_of")) + where(cell)

    before = json.loads(path.read_text()) if path.exists() else {"environment": {}, "cells": []}
    same = before["environment"].get("commit") == common.environment()["commit"]
    kept = {key(cell): cell for cell in before["cells"]} if same else {}
    common.write_results(path, list((kept | {key(cell): cell for cell in cells}).values()))


def where(cell: dict) -> tuple[str, str]:
    return common.heads_of(cell), cell["sequences"]


def main(options) -> None:
    clock = Clock(options.device)
    if options.report:
        report([cell for path in options.report for cell in json.loads(Path(path).read_text())["cells"]], options)
        return
    rank, distributed = 0, "WORLD_SIZE" in os.environ
    if distributed:
        if clock.on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if clock.on_gpu else "gloo")
        rank = dist.get_rank()
    packages = [x for x in options.packages.split(",") if x != "fla" or importlib.util.find_spec("fla")]
    cells = []
    for heads in common.parse_heads(options.heads):
        for sequences in options.sequences.split(","):
            if options.parts:
                new = [measure_parts(heads, sequences, W, options, clock) for W in map(int, options.parts.split(","))]
            else:
                new = [measure_cell(package, heads, sequences, options, clock) for package in packages]
            cells += new
            if rank == 0:
                report(new, options)
                if options.out:  # after each cell, because the next one may run out of time
                    write(Path(options.out), cells)
    if distributed:
        dist.destroy_process_group()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--packages", default="flash_qla,fla", help="fla is left out where it is not installed")
    parser.add_argument("--heads", default="2x8,16x32", help="query/key x value heads")
    common.add_head_dims_argument(parser)
    parser.add_argument("--sequences", default="1x131072,1x524288", help=common.parse_lengths.__doc__)
    parser.add_argument("--weak", action="store_true", help="lengths are those of a rank")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=3, help="calls before the samples")
    parser.add_argument("--parts", metavar="W,...", help="on one GPU: what a rank of so many has to do")
    parser.add_argument("--report", nargs="+", metavar="JSON", help="of files that this has written")
    parser.add_argument("--hop-us", type=float, default=10.0, help="latency from rank to rank, for --report")
    parser.add_argument("--gbs", type=float, default=300.0, help="gigabytes a second from rank to rank, for --report")
    parser.add_argument("--out", help="JSON file for the results")
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    if options.device == "cuda" and not options.report and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu shows that it runs")
    main(options)
