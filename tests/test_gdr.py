"""Accuracy of every output and gradient, and time, over a set of the tests' cases, from the command line:

    python tests/test_gdr.py --set develop            a few quick ones over heads, lengths and options
    python tests/test_gdr.py --set varlen             ragged, empty and tiny sequences
    python tests/test_gdr.py --set profile            heads and lengths of the benchmarks; mainly to be timed
    python tests/test_gdr.py --set product            heads x lengths x states x l2norm x layouts; not timed

One line per case: relative L2 errors, milliseconds of a forward and of a training step through autograd, those of FLA
if it is installed, and the fields of Case (tests/cases.py) that are not its defaults. On the GPU times are medians over
replays of CUDA graphs. An error over its bar in tests/accuracy.py is printed as a miss, and makes the exit status 1.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import accuracy
import cases
import pytest
import torch
from cases import ALL_GRADIENTS_OF, Case
from subprocesses import start_python

import flash_qla

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import common

ACTIVATIONS = {**cases.ALL_INSIDE, "g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}


def heads(num_heads: int, groups: tuple[int, ...]) -> list[dict]:
    """H_k and H_v for the groups of value heads that divide num_heads."""
    sizes = [size for size in groups if num_heads % size == 0] or [1]
    return [{"H_k": num_heads // size, "H_v": num_heads, "gate": "logsigmoid"} for size in sizes]


def develop(gpu: bool, num_heads: int | None) -> Iterator[Case]:
    short, middle, long = (64, 1000, 4096) if gpu else (1, 64, 130)
    for h in heads(num_heads or (32 if gpu else 4), (1, 2, 4)):
        yield Case(T=short, **h)
        yield Case(T=middle, **h, dtype=torch.float16)
        yield Case(B=2, T=middle + 1, **h | {"gate": "softplus"}, state_v_first=True, **L2NORM)
    yield Case(T=long, **h, initial_state=None)


def varlen(gpu: bool, num_heads: int | None) -> Iterator[Case]:
    packed = [(700, 1, 64, 1300, 65, 128, 333), (0, 100, 0, 0, 64, 0), (0, 0), cases.TINY, (1,) * 100]
    packed = [*packed, (4095, 3000, 64, 0, 1000)] if gpu else [tuple(min(n, 100) for n in x) for x in packed]
    (h,) = heads(num_heads or (32 if gpu else 2), (2,))
    yield from (Case(lengths=lengths, **h) for lengths in packed)
    yield Case(lengths=packed[0], padding=70, **h, state_v_first=True, cu_dtype=torch.int64, **L2NORM)


def product(gpu: bool, num_heads: int | None) -> Iterator[Case]:
    all_heads, lengths = heads(num_heads or (32 if gpu else 2), (1, 2, 4)), (1, 64, 130, 700) if gpu else (1, 70)
    states = ({"initial_state": None}, {}, {"initial_state": torch.bfloat16, "state_v_first": True})
    for h, T, state, l2norm in itertools.product(all_heads, lengths, states, ({}, L2NORM)):
        batch = Case(B=2, T=T, **h, **state, **l2norm)
        packed = dataclasses.replace(batch, B=1, T=0, lengths=(T, 0, T // 2 + 1))
        yield from (batch, dataclasses.replace(batch, strides="gaps"), packed)


def profile(gpu: bool, num_heads: int | None) -> Iterator[Case]:
    pairs = heads(num_heads or 4, (2, 3, 4))
    if gpu and not num_heads:
        pairs = heads(32, (2,)) + heads(64, (4,)) + heads(16, (4,))
    for h, text in itertools.product(pairs, ("1x8192", "1x32768", "4096x8", "ragged32")):
        lengths = tuple(n if gpu else -(-n // 64) for n in common.parse_lengths(text))
        yield Case(lengths=lengths, **h, strides="slices")  # as models pass q, k and v


SETS = {"develop": develop, "varlen": varlen, "product": product, "profile": profile}


def run(inputs: dict, gradients: dict) -> dict:
    """Every output of the public function, the intermediates, and the gradients through autograd."""
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    g_cumsum, A, _, h, _ = cases.run_forward(inputs)
    outputs = {"o": o, "final_state": final_state, "h": h, "A": A, "g_cumsum": g_cumsum}
    return outputs | cases.run_autograd(inputs, **gradients)


def times(operator: Callable, inputs: dict, gradients: dict) -> list[float]:
    """Milliseconds of a forward and of a step."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in ALL_GRADIENTS_OF if inputs.get(name) is not None}

    def step():
        outputs = operator(**inputs | leaves, output_final_state=True)
        torch.autograd.grad(outputs, [*leaves.values()], [*gradients.values()])

    calls = torch.no_grad()(lambda: operator(**inputs, output_final_state=True)), step
    if inputs["q"].is_cuda:
        return [statistics.median(common.time_graph(call, samples=5, sample_ms=2.0)) for call in calls]
    return [1e3 * statistics.median(timeit.repeat(call, number=1, repeat=3)) for call in calls]


def fla_times(inputs: dict, gradients: dict) -> list[float]:
    """FLA's with its own kernels; NaN where it raises, as for sequences without tokens."""
    os.environ |= {name: value for name, value in common.FLA_BACKWARD.items() if value is not None}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    try:
        return times(lambda auto_cp, **others: chunk_gated_delta_rule(**others), inputs, gradients)
    except Exception as error:  # of any kind
        print(f"  FLA failed: {type(error).__name__}: {error}")
        return [float("nan")] * 2


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--num-heads", type=int, metavar="N", help="value heads, in the groups that divide N")
    common.add_head_dims_argument(parser)
    parser.add_argument("--activations", action="store_true", help="pre-activation gates and betas, in bf16")
    parser.add_argument("--ref-dtype", choices=("float32", "float64"), default="float64", help="of the recurrence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="cpu: small cases")
    parser.add_argument("--timing", action=argparse.BooleanOptionalAction, help="by default of all sets but product")
    parser.add_argument("--no-fla", action="store_true", help="FLA, whose kernels compile for minutes, is not timed")
    options = parser.parse_args(arguments)
    device, timing = options.device, options.timing if options.timing is not None else options.set != "product"
    if options.num_heads is not None and options.num_heads < 1:
        parser.error(f"--num-heads is {options.num_heads}, expected at least 1")
    if device == "cuda" and not gpu:
        parser.error("--device cuda: torch sees no CUDA device")
    fla = timing and not options.no_fla and device == "cuda" and importlib.util.find_spec("fla") is not None

    more = ACTIVATIONS if options.activations else {}
    tensors = ["o", "final_state", "h", "A", "g_cumsum", *(ALL_GRADIENTS_OF if more else cases.GRADIENT_OF).values()]
    titles = [*tensors, *["fwd_ms", "step_ms"] * timing, *["FLA_fwd", "FLA_step"] * fla]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"flash_qla {flash_qla.__version__}, torch {torch.__version__}, {name}, against {options.ref_dtype}")
    print("".join(f"{title:>12}" for title in titles))
    count, bad, (K, V) = 0, 0, options.head_dims
    for case in SETS[options.set](device == "cuda", options.num_heads):
        case = dataclasses.replace(case, K=K, V=V, **more)
        inputs, gradients = cases.make_inputs(case, device), cases.make_gradients(case, device)
        expected = cases.expected_of_both(inputs, gradients, getattr(torch, options.ref_dtype))
        errors, misses = accuracy.compare(run(inputs, gradients), *expected, dtype=case.dtype, case=case)
        milliseconds = times(flash_qla.chunk_gated_delta_rule, inputs, gradients) if timing else []
        milliseconds += fla_times(inputs, gradients) if fla else []
        cells = [f"{errors[name]:.1e}" if name in errors else "-" for name in tensors]
        print("".join(f"{cell:>12}" for cell in (*cells, *(f"{x:.3f}" for x in milliseconds))), f" {case}", flush=True)
        print(*(f"  MISS {miss}\n" for miss in misses), sep="", end="", flush=True)
        count, bad = count + 1, bad + bool(misses)
    print(f"{count} cases, {bad} with misses")
    return 1 if bad else 0


CPU = "--device cpu --num-heads"
RUNS = f"varlen {CPU} 1", f"profile {CPU} 2 --activations", f"develop {CPU} 2 --head-dims 96x192 --no-timing"
GPU_RUNS = (
    "develop --no-fla",
    "varlen --num-heads 16 --head-dims 128x256 --no-timing",
    "develop --activations --no-timing",
)


@pytest.mark.parametrize(
    "arguments",
    [*RUNS, f"product {CPU} 1 --ref-dtype float32", *(pytest.param(x, marks=pytest.mark.gpu) for x in GPU_RUNS)],
)
def test_sets(arguments, capsys):
    status = main(["--set", *arguments.split()])
    _, titles, *lines, last = capsys.readouterr().out.splitlines()
    assert status == 0 and last == f"{len(lines)} cases, 0 with misses", lines
    assert all(len(line[: len(titles)].split()) == len(titles.split()) for line in lines), lines


BREAK_DV = """
import runpy, sys, torch, flash_qla
def broken(*args):
    dq, dk, dv, *others = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default(*args)
    return dq, dk, 1.02 * dv, *others
flash_qla.ops.autograd._BACKWARD.op = broken
sys.argv, sys.path[:0] = {command}, [{tests!r}]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_a_miss_is_the_exit_status():
    """Of the command, with one gradient off by 2 %."""
    command = [__file__, *f"--set develop {CPU} 2 --no-timing".split()]
    code = BREAK_DV.format(command=command, tests=str(Path(__file__).parent))
    wrong = start_python(code)
    printed, _ = wrong.communicate()
    misses = [line for line in printed.splitlines() if "MISS" in line]
    assert wrong.returncode == 1 and misses, printed
    assert all(line.startswith("  MISS dv: relative L2 error 2.0") for line in misses), printed


if __name__ == "__main__":
    sys.exit(main())
