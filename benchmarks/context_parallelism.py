"""Context parallelism over ranks: the forward and the training step on W GPUs.

    python benchmarks/context_parallelism.py --out FILE.json                             # one GPU
    torchrun --nproc-per-node 2 benchmarks/context_parallelism.py --out FILE.json        # the same sequences on two
    torchrun --nproc-per-node 2 benchmarks/context_parallelism.py --weak --out FILE.json # or as many tokens per rank
    python benchmarks/context_parallelism.py --parts 2,4,8,64 --out FILE.json            # on one GPU, a rank of each W
    python benchmarks/context_parallelism.py --report FILE.json

The runs add their cells to one file, context_parallelism_h200.json for the documents, and remove cells of other
commits. Inputs are the same for every number of ranks. Times are the slowest rank's. On GPUs they are device times,
with the host ahead, as within a model.

--parts runs the rank in the middle of W alone, on its share of the tokens, with W copies of its own maps in the place
of the gathered ones. With the time of the all-gathers this predicts the time on W ranks: a little less, because the
last rank folds twice as many maps. For a W that was not run, the time of a gather grows with W - 1 from that of the
most ranks that were.

--report prints speedups, differences of results from one GPU, and predictions for the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forward import sketch

AHEAD_CYCLES = 20_000_000  # 10 ms of a GPU, in which the host launches a call
BLOCKS = 64  # all tokens are drawn, and their results compared, in so many equal blocks; a rank has whole blocks
INPUTS = ("q", "k", "v", "g", "beta")
KEY = ("package", "ranks", "scaling", "layout", "parts", "heads", "head_dims", "sequences")


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
        tensors = (randn(H_k, K), randn(H_k, K), randn(H_v, V), g, randn(H_v).sigmoid(), randn(H_v, V))
        for i, (name, x) in enumerate(zip((*INPUTS, "do"), tensors, strict=True)):
            drawn[name].append(x if i in (3, 4) else x.bfloat16())
    return {name: torch.cat(pieces, 1) for name, pieces in drawn.items()}


def sketches(results: dict[str, torch.Tensor], blocks: list[int]) -> dict[str, dict[str, list[float]]]:
    """Tensor -> block -> sketch."""
    return {
        name: {str(n): sketch(piece) for n, piece in zip(blocks, x.tensor_split(len(blocks), 1), strict=True)}
        for name, x in results.items()
    }


def difference(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """The relative L2 difference of two tensors, from the sketches of their blocks."""
    x, y = ([number for block in sorted(z) for number in z[block]] for z in (actual, expected))
    return math.dist(x, y) / math.hypot(*y)


# The packages


def flash_qla_call(offsets, options, group=None):
    import flash_qla
    from flash_qla.cp import build_cp_context

    where = {"cu_seqlens": offsets}
    if group is not None:
        where = {"cp_context": build_cp_context(offsets, group, layout=options.layout)}
    return lambda *x: flash_qla.chunk_gated_delta_rule(*x, **where, use_qk_l2norm_in_kernel=True)[0]


def fla_call(offsets, options, group=None):
    os.environ.update({name: value for name, value in common.FLA_BACKWARD.items() if value is not None})
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    where = {"cu_seqlens": offsets.long()}
    if group is not None:
        from fla.ops.cp import build_cp_context

        context = build_cp_context(offsets.long(), group=group, layout=options.layout)
        where = {"cp_context": context, "cu_seqlens": context.cu_seqlens}
    return lambda *x: chunk_gated_delta_rule(*x, **where, use_qk_l2norm_in_kernel=True)[0]


PACKAGES = {"flash_qla": (flash_qla_call, "flash-qla-aot"), "fla": (fla_call, "fla-core")}


def rank_alone(world_size: int) -> SimpleNamespace:
    """A group whose rank in the middle this process is. Copies of its first maps stand in the place of all ranks'."""
    from flash_qla.cp import passes

    gathered: dict[torch.Size, torch.Tensor] = {}

    def gather(rows, context, for_backward=False):
        if rows.shape not in gathered:
            gathered[rows.shape] = rows.detach().repeat(world_size, *[1] * (rows.dim() - 1))
        return gathered[rows.shape]

    passes.start_gather = gather
    return SimpleNamespace(group_name="alone", rank=lambda: world_size // 2, size=lambda: world_size)


def gather_ms(heads: tuple[int, int], options, clock: Clock) -> float:
    """The all-gather of a pass, alone."""
    (K, V), parts = options.head_dims, 1 if options.layout == "contiguous" else 2
    maps = torch.zeros(parts, heads[1], V + K, K, device=options.device)
    gathered = maps.new_empty(dist.get_world_size() * parts, *maps.shape[1:])
    return statistics.median(median_ms(lambda: dist.all_gather_into_tensor(gathered, maps), options, clock))


def measure_cell(
    package: str, heads: tuple[int, int], sequences: str, options, clock: Clock, alone_of: int | None = None
) -> dict:
    """Measures one cell. Every rank calls the function; or one process alone, as one of `alone_of` ranks."""
    distributed = dist.is_initialized()
    group = rank_alone(alone_of) if alone_of else dist.group.WORLD if distributed else None
    rank, world_size = (group.rank(), group.size()) if group else (0, 1)
    lengths = [n * world_size if options.weak else n for n in common.parse_lengths(sequences)]
    tokens, blocks = sum(lengths), blocks_of(rank, world_size, options.layout if group else "contiguous")
    inputs = make_inputs(heads, tokens, blocks, options)
    do = inputs.pop("do")
    leaves = [x.requires_grad_() for x in inputs.values()]
    offsets = torch.tensor([0, *lengths], device=options.device).cumsum(0).int()
    call = PACKAGES[package][0](offsets, options, group)

    def forward():
        with torch.no_grad():
            return call(*leaves)

    def step():
        o = call(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    rank_results = {"forward": median_ms(forward, options, clock), "step": median_ms(step, options, clock)}
    rank_results = {name: statistics.median(times) for name, times in rank_results.items()}
    if clock.on_gpu:
        rank_results["peak_bytes"] = torch.cuda.max_memory_allocated()
    rank_results["sketches"] = sketches(dict(zip(("o", "dq", "dk", "dv", "dg", "db"), step(), strict=True)), blocks)
    ranks = [rank_results]
    if distributed:
        ranks = [None] * world_size
        dist.all_gather_object(ranks, rank_results)
    cell = {"package": package, "version": common.version_of(PACKAGES[package][1]), "heads": "{}x{}".format(*heads)}
    cell |= common.head_dims_field(options.head_dims)
    cell |= {"sequences": sequences, "scaling": "weak" if options.weak else "strong", "ranks": world_size}
    cell |= {"layout": options.layout if group else None, "tokens": tokens}
    cell |= {f"{name}_ms": max(x[name] for x in ranks) for name in ("forward", "step")}
    if alone_of:
        return cell | {"parts": True}
    if distributed:
        cell["gather_ms"] = gather_ms(heads, options, clock)
    cell |= {name: [x[name] for x in ranks] for name in ("peak_bytes",) if name in rank_results}
    merged = {}
    for x in ranks:
        for name, of_blocks in x["sketches"].items():
            merged.setdefault(name, {}).update(of_blocks)
    return cell | {"sketches": merged}


def with_differences(cells: list[dict]) -> list[dict]:
    """The cells with their differences from one GPU in place of sketches, where it has run."""
    one = {(x["package"], common.heads_of(x), x["sequences"]): x for x in cells if x["ranks"] == 1 and "sketches" in x}
    compared = []
    for cell in cells:
        base = one.get((cell["package"], common.heads_of(cell), cell["sequences"]))
        if base is not None and base is not cell and "sketches" in cell:
            of_cell = cell["sketches"]
            cell = {name: x for name, x in cell.items() if name != "sketches"}
            if cell["scaling"] == "strong":  # else the tokens are others
                cell["differences"] = {x: difference(y, base["sketches"][x]) for x, y in of_cell.items()}
        compared.append(cell)
    return compared


def predictions(cells: list[dict]) -> list[dict]:
    """What --parts predicts for the same tokens on W ranks: its cells, with the time of the gathers added."""

    def key(cell: dict) -> tuple:
        return common.heads_of(cell), cell["layout"]

    gathers: dict[tuple, dict[int, float]] = {}
    for cell in (x for x in cells if "gather_ms" in x and x["ranks"] > 1):
        gathers.setdefault(key(cell), {})[cell["ranks"]] = cell["gather_ms"]
    predicted = []
    for cell in (x for x in cells if x.get("parts") and x["scaling"] == "strong" and key(x) in gathers):
        W, measured = cell["ranks"], gathers[key(cell)]
        most = max(measured)
        gather = measured[W] if W in measured else measured[most] * (W - 1) / (most - 1)
        predicted.append(cell | {"forward_ms": cell["forward_ms"] + gather, "step_ms": cell["step_ms"] + 2 * gather})
    return predicted


def report(cells: list[dict]) -> None:
    def key(cell: dict) -> tuple:
        return cell["package"], common.heads_of(cell), cell["sequences"]

    for x in predictions(cells):
        name = f"{common.heads_of(x)} {x['sequences']} W={x['ranks']}"
        print(f"{name}  predicted: forward {x['forward_ms']:.3f} ms, step {x['step_ms']:.3f} ms")
    for x in (x for x in cells if x.get("parts")):
        name = f"{common.heads_of(x)} {x['sequences']} W={x['ranks']}"
        print(f"{name}  without exchange: forward {x['forward_ms']:.3f} ms, step {x['step_ms']:.3f} ms")
    cells = [cell for cell in cells if not cell.get("parts")]
    one = {key(cell): cell for cell in cells if cell["ranks"] == 1}
    for cell in cells:
        line, base = " ".join((*key(cell), cell["scaling"], f"W={cell['ranks']}")), one.get(key(cell))
        grown = cell["ranks"] if cell["scaling"] == "weak" else 1
        for field in ("forward_ms", "step_ms"):
            line += f"  {field} {cell[field]:9.3f}"
            if base and base is not cell:
                line += f", {base[field] / cell[field] * grown:5.2f} times one"
        if "differences" in cell:
            line += "  differences " + " ".join(f"{x} {y:.1e}" for x, y in cell["differences"].items())
        print(line)


def main(options) -> None:
    clock = Clock(options.device)
    if options.report:
        report([cell for path in options.report for cell in json.loads(Path(path).read_text())["cells"]])
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
                new = [measure_cell("flash_qla", heads, sequences, options, clock, W) for W in options.parts]
            else:
                new = [measure_cell(package, heads, sequences, options, clock) for package in packages]
            cells += new
            if rank == 0:
                report(new)
                if options.out:  # after each cell, because the next one may run out of time
                    common.add_results(options.out, cells, KEY)
                    all_cells = json.loads(Path(options.out).read_text())["cells"]
                    common.write_results(options.out, with_differences(all_cells))
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
    parser.add_argument(
        "--parts", type=lambda text: [*map(int, text.split(","))], default=[], help="numbers of ranks, for one process"
    )
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=3, help="calls before the samples")
    parser.add_argument("--report", nargs="+", metavar="JSON", help="of files that this has written")
    parser.add_argument("--out", help="JSON file for the results")
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    if options.device == "cuda" and not options.report and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu shows that it runs")
    main(options)
