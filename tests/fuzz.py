"""Random calls of every op: `python tests/fuzz.py --seconds 60 --seed 0 [--cases 1000] [--jobs 4] [--device cuda]`.

It ends after so many seconds or cases; jobs are processes that share them, and the device. A seed and a number make a
trial, whatever the jobs: shapes at random, and a value of each option of tests/options.py. tests/trials.py says what a
trial compares. Every tenth trial compares the convolution or the norm with its formula, or gated_delta_net,
prefill_gated_delta_net or decode_gated_delta_net with its parts.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from collections import Counter

import options
import test_convolution
import test_decode_region
import test_decode_region_drafts
import test_norm
import test_region
import test_region_prefill
import torch
from options import Shape
from reference import CHUNK
from trials import OPS, Trial, run

from flash_qla.testing import forced_dispatch

CACHED_BYTES = 4 << 30  # bytes of the device's memory that are kept from case to case


@dataclasses.dataclass(frozen=True)
class RegionTrial:
    """A call of the convolution, the norm or the region, perhaps on pools."""

    op: str
    case: test_convolution.Case | test_norm.Case | test_region.Case | test_region_prefill.Case | test_decode_region.Case
    seed: int = 0

    def run(self, device: str) -> dict[str, float]:
        """The errors as parts of their bars."""
        if self.op == "norm":
            test_norm.check(self.case, test_norm.make(self.case, device))
            return {}
        if self.op == "region":
            test_region.check_bits_of_the_parts(self.case, device, self.seed)
            return {}
        if self.op == "region on pools":
            test_region_prefill.check(self.case, device, self.seed)
            return {}
        if self.op == "region of a token":
            test_decode_region.check(self.case, device, self.seed)
            return {}
        if self.op == "region of drafts":
            test_decode_region_drafts.check(self.case, device, self.seed)
            return {}
        ratios = test_convolution.ratios(self.case, device)
        assert all(ratio <= 1 for ratio in ratios.values()), ratios
        return {f"convolution's {name}": ratio for name, ratio in ratios.items()}


def draw_of_region(r: random.Random, device: str) -> RegionTrial:
    gpu = device == "cuda"
    lengths = r.choice((None, tuple(r.choice((0, 1, 2, 3, 64, 65, r.randint(4, 400))) for _ in range(r.randint(1, 9)))))
    shape = {"lengths": lengths, "padding": r.choice((0, 0, 5)) if lengths is not None else 0}
    shape |= {"B": r.randint(1, 3), "T": r.choice((1, 2, 3, 65, r.randint(4, 500)))}
    half, wide = (torch.bfloat16, torch.float16), (torch.float32, *(() if gpu else (torch.float64,)))
    regions = ("region", "region on pools", "region of a token", "region of drafts")
    W, op = r.randint(2, 4), r.choice(("convolution", "norm", *regions))
    columns = r.choice((W - 1, W))
    if op == "norm":
        dims = tuple(r.randint(1, 40) for _ in range(r.randint(0, 3)))
        V = r.choice((8, 64, 128, 128, 256, 512, r.randint(2, 512)))  # with V = 1 do is the difference of equal numbers
        kind = {"activation": r.choice(("silu", "sigmoid")), "norm_before_gate": r.random() < 0.5}
        return RegionTrial(op, test_norm.Case((*dims, V), r.choice((*half, *wide)), **kind))
    if op == "convolution":
        options = {"bias": r.random() < 0.5, "use_silu": r.random() < 0.7, "columns": columns}
        options |= {"dtype": r.choice((*half, *wide)), "state_dtype": r.choice((None, torch.float32))}
        if options["dtype"] == torch.float64:
            options["state_dtype"] = None
        return RegionTrial(op, test_convolution.Case(**shape, D=r.choice((8, 129, r.randint(1, 700))), W=W, **options))
    H_k, step = r.randint(1, 3), 8 if gpu else 1
    sizes = {"H_k": H_k, "H_v": H_k * r.randint(1, 3), "W": W, "columns": columns}
    sizes |= {"K": step * r.randint(1, 16), "V": step * r.randint(1, 16), "dtype": r.choice(half)}
    if op == "region of a token":
        slots = r.sample(range(test_decode_region.SLOTS), r.randint(1, test_decode_region.SLOTS))
        indices = tuple(-1 if r.random() < 0.1 else slot for slot in slots)
        one_kernel = {"W": 4, "columns": r.choice((3, 4))} if r.random() < 0.8 else {"T": r.randint(1, 3)}
        flags = {x: r.random() < 0.5 for x in ("by_key_heads", "columns_last", "with_bias", "with_dt_bias", "int64")}
        flags["state_dtype"] = r.choice((torch.float32, *half, torch.float8_e4m3fn, torch.float8_e5m2))
        if gpu and flags["state_dtype"].itemsize == 1:
            sizes["K"] = 16 * r.randint(1, 8)
        flags["options"] = (("allow_neg_eigval", r.random() < 0.5), ("norm_activation", r.choice(("silu", "sigmoid"))))
        return RegionTrial(op, test_decode_region.Case(indices, **sizes | one_kernel | flags), r.randrange(2**31))
    if op == "region of drafts":
        return RegionTrial(op, test_decode_region_drafts.draw(r, sizes), r.randrange(2**31))
    if op == "region on pools":
        case = test_region_prefill.draw(r, device)
        every = r.choice((0, case.every, r.randint(1, 100)))
        region = dataclasses.replace(case.region, **shape, **sizes)
        return RegionTrial(op, dataclasses.replace(case, region=region, every=every), r.randrange(2**31))
    flags = {f"with_{x}": r.random() < 0.5 for x in ("bias", "dt_bias", "states")}
    options = {"state_v_first": r.random() < 0.5, "allow_neg_eigval": r.random() < 0.5}
    options["norm_activation"] = r.choice(("silu", "sigmoid"))
    case = test_region.Case(**shape, **sizes, **flags, options=tuple(options.items()))
    return RegionTrial(op, case, r.randrange(2**31))


def draw(seed: int, number: int, device: str) -> Trial | RegionTrial:
    r = random.Random(f"{seed}/{number}")
    if number % 10 == 9:
        return draw_of_region(r, device)
    op = r.choices(OPS, (6, 2, 1, 1, 1))[0]
    gpu, decodes = device == "cuda", op.startswith("decode")

    def length():
        if decodes:
            return r.randint(0, 8)
        return r.choice((0, 1, r.randint(2, 62), 63, 64, 65, r.randint(66, 300), r.randint(66, 2000 if gpu else 300)))

    lengths = r.choice((None, tuple(length() for _ in range(r.choice((0, 1, 1, 2, 3, 6, 12))))))
    shape = Shape(r.randint(1, 3), length(), None) if lengths is None else options.packed(*lengths)
    longest, N = (shape.T, shape.B) if lengths is None else (max(lengths, default=0), len(lengths))
    most_heads = max(1, (16384 if gpu else 1024) // max(1, N * (longest + CHUNK)))
    H_k = r.randint(1, min(8, most_heads))
    heads = H_k, H_k * r.randint(1, max(1, min(8, most_heads // H_k)))
    narrow = (1, 2, 7, 8, 12, 16, 16, 16)  # key channels on a GPU, in eighths; all that decode_buffered takes
    keys = (*narrow, *((17, 24, 32) if op != "decode_buffered" else ()))
    dims = 8 * r.choice(keys), 8 * r.choice((1, 3, 8, 16, 16, 16, 24, 32, 64))
    if not gpu:
        dims = r.choice((1, 3, 8, 16, 33, 64, 96)), r.choice((1, 5, 8, 16, 33, 64, 96))
    row = None
    while row is None:  # until the options go together
        row = options.draw(r, op, device, {"shape": shape, "heads": heads, "dims": dims}, options.MORE)
    return options.trial_of(op, row, r.randrange(2**31))


# Many trials


@dataclasses.dataclass(frozen=True)
class Result:
    number: int
    op: str = ""
    ratios: dict | None = None  # None where the device has no such op yet
    failure: str | None = None


def run_any(trial: Trial | RegionTrial, device: str) -> dict[str, float]:
    return trial.run(device) if isinstance(trial, RegionTrial) else run(trial, device)


def run_when_there_is_memory(trial: Trial | RegionTrial, args: argparse.Namespace) -> dict[str, float]:
    for _ in range(30 if args.jobs > 1 else 0):  # while others may have it
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return run_any(trial, args.device)
        torch.cuda.empty_cache()
        time.sleep(1)
    return run_any(trial, args.device)


def results(args: argparse.Namespace, job: int = 0):
    """The results of a job's trials, up to the first failure, or all with --keep-going."""
    with forced_dispatch(kernels="portable") if args.kernels == "portable" else contextlib.nullcontext():
        yield from results_of_trials(args, job)


def results_of_trials(args: argparse.Namespace, job: int):
    last = math.inf if args.cases is None else args.cases
    for number in itertools.count(job, args.jobs) if args.case is None else (args.case,):
        if args.case is None and (number >= last or time.monotonic() > args.end):
            return
        trial = draw(args.seed, number, args.device)
        try:
            yield Result(number, trial.op, run_when_there_is_memory(trial, args))
        except Exception as error:
            missing = "not supported on the GPU yet" in str(error)
            yield Result(number, trial.op, None, None if missing else f"{trial}\n{type(error).__name__}: {error}")
            if not missing and not args.keep_going:
                return
        if args.device == "cuda" and torch.cuda.memory_reserved() > CACHED_BYTES:  # others need some, too
            torch.cuda.empty_cache()


def work(args: argparse.Namespace, job: int, sender) -> None:
    torch.set_num_threads(1)
    for result in results(args, job):
        sender.send(result)


def results_of_jobs(args: argparse.Namespace):
    """The same of all jobs, each a process, in the order of arrival."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes
    context = multiprocessing.get_context("spawn")
    running, processes = {}, []  # receiver -> process, number it is at
    try:
        for job in range(args.jobs):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=work, args=(args, job, sender), daemon=True))
            processes[-1].start()
            sender.close()
            running[receiver] = processes[-1], job
        while running:
            for receiver in multiprocessing.connection.wait(list(running)):
                process, number = running.pop(receiver)
                try:
                    result = receiver.recv()
                except EOFError:
                    process.join()
                    if process.exitcode:
                        trial = draw(args.seed, number, args.device)
                        yield Result(number, failure=f"{trial}\nits process ended with {process.exitcode}")
                    continue
                running[receiver] = process, result.number + args.jobs
                yield result
    finally:
        for process in processes:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, help="at most so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="after a failure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one only, as a failure says it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    kernels = "portable: on the GPU those that every GPU from Ampere on has"
    parser.add_argument("--kernels", choices=("device", "portable"), default="device", help=kernels)
    args = parser.parse_args()
    begin = time.monotonic()
    args.end = begin + args.seconds
    worst, count, missing, failures = {}, Counter(), Counter(), []
    for result in results(args) if args.jobs == 1 or args.case is not None else results_of_jobs(args):
        if result.failure is not None:
            again = f"python tests/fuzz.py --seed {args.seed} --case {result.number} --device {args.device}"
            again += " --kernels portable" if args.kernels == "portable" else ""
            print(result.failure, again, sep="\n", flush=True)
            failures.append(again)
            if args.keep_going:
                continue
            break
        (missing if result.ratios is None else count)[result.op] += 1
        for name, ratio in (result.ratios or {}).items():
            worst[name] = max(worst.get(name, (0.0, 0)), (ratio, result.number))
    seconds = time.monotonic() - begin
    if failures and not args.keep_going:
        return 1
    of = "" if args.cases is None or args.case is not None else f" of {args.cases}"
    failed = f" and {len(failures)} that failed" if failures else ""
    print(f"{count.total()}{of} cases in {seconds:.0f} s right{failed}: {dict(sorted(count.items()))}")
    if missing:
        print(f"not run, as {args.device} has no such op yet: {dict(sorted(missing.items()))}")
    for name, (ratio, number) in sorted(worst.items()):
        print(f"{name:30} at most {ratio:.2f} of its bar, in case {number}")
    return min(len(failures), 1)


if __name__ == "__main__":
    sys.exit(main())
