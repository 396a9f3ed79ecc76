"""Accuracy of every output and gradient against the recurrence, and time, over a set of problems:

    python tests/test_gdr.py --set develop            a few quick ones over heads, lengths and options
    python tests/test_gdr.py --set varlen             ragged, empty and tiny sequences
    python tests/test_gdr.py --set profile            heads and lengths of the benchmarks; mainly to be timed
    python tests/test_gdr.py --set product            heads x lengths x states x l2norm x layouts; not timed

    --num-heads N                       N value heads, in groups of what the set has as far as that divides N
    --head-dims KxV                     channels of a key and of a value, such as 96x192; 128x128 by default
    --activations                       g and beta come raw, in bf16, and are activated inside
    --ref-dtype float32|float64         dtype of the recurrence that results are compared with; float64 by default
    --device cuda|cpu                   the GPU if there is one; problems on the CPU are small ones of the same kinds
    --timing, --no-timing               the sets but product are timed, on the GPU beside FLA where that is installed

One line a problem: relative L2 errors, then milliseconds of a forward, and of a training step through autograd, then
FLA's, and how many times ours they are. On the GPU those are medians over replays of CUDA graphs. Bars are the tests',
see accuracy.py; each output over its own is printed as a miss, and any miss makes the exit status 1.

pytest runs all of it on the CPU, and the first two sets on the GPU, with other head dimensions and activations too. The
file is long because it is a command and its own tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import accuracy
import pytest
import reference
import torch
from cases import (
    ACTIVATION_GRADIENT_OF,
    ALL_GRADIENTS_OF,
    GRADIENT_OF,
    TINY,
    Case,
    activated,
    make_gradients,
    make_inputs,
    of_formula,
)
from subprocesses import start_python

import flash_qla

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import common  # noqa: E402

SETS = ("develop", "varlen", "profile", "product")
TENSORS = ("o", "final_state", "h", "A", "g_cumsum", *GRADIENT_OF.values())
ALL_TENSORS = (*TENSORS, *ACTIVATION_GRADIENT_OF.values())  # with activations
NAME_WIDTH = 60
ACTIVATIONS = {**common.INSIDE, "g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    make: Callable[[], tuple[dict, dict]]  # arguments of chunk_gated_delta_rule, and the gradients do and dht
    same_as: Case | None = None  # problems of which this is equal have the same numbers, if in another memory layout
    for_fla: bool = True

    @staticmethod
    def of(case: Case, device: str) -> Problem:
        return Problem(
            name_of(case),
            lambda: (make_inputs(case, device), make_gradients(case, device)),
            same_as=dataclasses.replace(case, strides="contiguous", do_strides="contiguous"),
            # FLA does not promise to take sequences of no tokens, nor tokens of no sequence.
            for_fla=not case.padding and (case.T > 0 if case.lengths is None else 0 not in case.lengths),
        )

    @staticmethod
    def large(case: Case) -> Problem:
        """A problem of the case's shapes, with inputs drawn on the GPU as in the benchmarks."""

        def make():
            head_dims = case.K, case.V
            inputs, gradients = common.make_inputs(case.H_k, case.H_v, case.lengths, head_dims, gradients=True)
            if case.use_gate_in_kernel:
                inputs |= common.raw_tensors(sum(case.lengths), case.H_v) | common.INSIDE
            return inputs, gradients

        return Problem(name_of(case), make)


def name_of(case: Case) -> str:
    """Heads and their dimensions, lengths and the options of a problem of these sets."""
    cell = {"heads": f"{case.H_k}x{case.H_v}", **common.head_dims_field((case.K, case.V))}
    lengths = f"{case.B}x{case.T}" if case.lengths is None else "+".join(map(str, case.lengths))
    if len(lengths) > 20:
        lengths = f"{sum(case.lengths)} tokens in {len(case.lengths)}"
    options = {
        "fp16": case.dtype == torch.float16,
        "no state": case.initial_state is None,
        "bf16 state": case.initial_state == torch.bfloat16,
        "V first": case.state_v_first,
        "l2norm": case.use_qk_l2norm_in_kernel,
        "padded": case.padding,
        "strided": case.strides != "contiguous",
        "activations": case.use_gate_in_kernel,
    }
    return ", ".join([f"{common.heads_of(cell)} {lengths}", *(name for name, holds in options.items() if holds)])


def heads(num_heads: int, groups: tuple[int, ...]) -> list[dict]:
    """H_k and H_v for groups of so many value heads as divide num_heads."""
    return [{"H_k": num_heads // g, "H_v": num_heads} for g in groups if num_heads % g == 0] or [
        {"H_k": num_heads, "H_v": num_heads}
    ]


def develop(device: str, num_heads: int | None) -> Iterator[Case]:
    short, middle, long = (64, 1000, 4096) if device == "cuda" else (1, 64, 130)
    for h in heads(num_heads or (32 if device == "cuda" else 4), (1, 2, 4)):
        yield Case(T=short, **h)
        yield Case(T=middle, **h, gate="logsigmoid", dtype=torch.float16)
        yield Case(B=2, T=middle + 1, **h, state_v_first=True, **L2NORM)
    yield Case(T=long, **h, gate="logsigmoid", initial_state=None)


def varlen(device: str, num_heads: int | None) -> Iterator[Case]:
    all_lengths = [
        (700, 1, 64, 1300, 65, 128, 333),
        (0, 100, 0, 0, 64, 0),
        (0, 0),
        TINY,
        (1,) * 100,
    ]
    if device == "cuda":
        all_lengths.append((4095, 3000, 64, 0, 1000))
    else:
        all_lengths = [tuple(min(n, 100) for n in lengths) for lengths in all_lengths]
    for h in heads(num_heads or (32 if device == "cuda" else 2), (2,)):
        for lengths in all_lengths:
            yield Case(lengths=lengths, **h, gate="logsigmoid")
        yield Case(lengths=all_lengths[0], padding=70, **h, state_v_first=True, cu_dtype=torch.int64, **L2NORM)


def product(device: str, num_heads: int | None) -> Iterator[Case]:
    lengths = (1, 64, 130, 700) if device == "cuda" else (1, 70)
    states = (
        {"initial_state": None},
        {"initial_state": torch.float32},
        {"initial_state": torch.bfloat16, "state_v_first": True},
    )
    for h, T, state, l2norm in itertools.product(
        heads(num_heads or (32 if device == "cuda" else 2), (1, 2, 4)), lengths, states, ({}, L2NORM)
    ):
        batch = Case(B=2, T=T, **h, **state, **l2norm, gate="logsigmoid")
        yield batch
        yield dataclasses.replace(batch, strides="gaps")
        yield dataclasses.replace(batch, B=1, T=0, lengths=(T, 0, T // 2 + 1))


def profile(device: str, num_heads: int | None) -> Iterator[Case]:
    if num_heads:
        pairs = heads(num_heads, (2, 3, 4))
    elif device == "cuda":
        pairs = [{"H_k": H_k, "H_v": H_v} for H_k, H_v in ((16, 32), (16, 64), (4, 16))]
    else:
        pairs = heads(4, (2, 4))
    for h, text in itertools.product(pairs, ("1x8192", "1x32768", "4096x8", "ragged32")):
        lengths = common.parse_lengths(text)
        if device == "cpu":
            lengths = [-(-n // 64) for n in lengths]
        yield Case(lengths=tuple(lengths), **h, gate="logsigmoid")


def problems(
    name: str,
    device: str,
    num_heads: int | None,
    head_dims: tuple[int, int] = common.HEAD_DIMS,
    activations: bool = False,
) -> list[Problem]:
    found = {"develop": develop, "varlen": varlen, "profile": profile, "product": product}[name](device, num_heads)
    K, V = head_dims
    changes = {"K": K, "V": V, **(ACTIVATIONS if activations else {})}
    cases = [dataclasses.replace(case, **changes) for case in found]
    if name == "profile" and device == "cuda":
        return [Problem.large(case) for case in cases]
    return [Problem.of(case, device) for case in cases]


class Step:
    """A training step: o, the final state and the gradients of all that is given, by name."""

    def __init__(self, operator, inputs: dict, gradients: dict):
        self.operator, self.inputs, self.gradients = operator, inputs, gradients
        given = [name for name in ALL_GRADIENTS_OF if inputs.get(name) is not None]
        self.leaves = {name: inputs[name].detach().requires_grad_() for name in given}

    def __call__(self) -> dict:
        outputs = self.operator(**{**self.inputs, **self.leaves}, output_final_state=True)
        found = torch.autograd.grad(outputs, list(self.leaves.values()), list(self.gradients.values()))
        names = ("o", "final_state", *(ALL_GRADIENTS_OF[name] for name in self.leaves))
        return dict(zip(names, (*(x.detach() for x in outputs), *found), strict=True))


def actual_outputs(inputs: dict, gradients: dict) -> dict:
    """Every output of the public function and of the low-level functions."""
    outputs = Step(flash_qla.chunk_gated_delta_rule, inputs, gradients)()
    g_cumsum, A, _, h, _ = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, output_h=True)
    return {**outputs, "h": h, "A": A, "g_cumsum": g_cumsum}


@torch.no_grad()
def expected_outputs(inputs: dict, gradients: dict, dtype: torch.dtype) -> tuple[dict, dict]:
    """The same by the recurrence, and the sizes of those that may cancel."""
    arguments = of_formula(inputs) | {"dtype": dtype}
    outputs = reference.gated_delta_rule(**arguments)
    derivatives = reference.gated_delta_rule_bwd(**arguments, **gradients)
    cu_seqlens, l2norm = inputs["cu_seqlens"], inputs.get("use_qk_l2norm_in_kernel", False)
    ready = activated(inputs)
    expected = {
        **{name: getattr(outputs, name) for name in ("o", "final_state", "h")},
        "A": reference.chunk_inverse(inputs["k"], ready["beta"], cu_seqlens, l2norm, dtype),
        "g_cumsum": reference.chunk_cumsum(ready["g"], cu_seqlens, dtype),
        **{name: getattr(derivatives, name) for name in ALL_GRADIENTS_OF.values()},
    }
    return expected, derivatives.sizes


def compare(name: str, actual: dict, expected: dict, sizes: dict, dtype: torch.dtype) -> tuple[dict, list[str]]:
    """Relative L2 errors by tensor, and what is over its bar."""
    errors, misses = {}, []
    for tensor, x in actual.items():
        wanted, size = expected[tensor], sizes.get(tensor)
        try:
            accuracy.check(tensor, x, wanted, dtype=dtype, case=name, size=size, g_cumsum=expected["g_cumsum"])
        except AssertionError as miss:
            misses.append(str(miss))
        if x.shape != wanted.shape:
            errors[tensor] = float("nan")
        else:
            errors[tensor] = accuracy.relative_error(x, wanted, size) if x.numel() else 0.0
    return errors, misses


def milliseconds(call: Callable, device: str) -> float:
    if device == "cuda":
        return statistics.median(common.time_graph(call, samples=5, sample_ms=2.0))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def times(operator, inputs: dict, gradients: dict, device: str) -> list[float]:
    """Milliseconds of a forward and of a step."""
    with torch.no_grad():
        forward = milliseconds(lambda: operator(**inputs, output_final_state=True), device)
    return [forward, milliseconds(Step(operator, inputs, gradients), device)]


def fla_operator(device: str):
    """FLA's function with its own kernels, or None."""
    if device != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    for variable, value in common.FLA_BACKWARD.items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def operator(auto_cp=True, **inputs):
        return chunk_gated_delta_rule(**inputs)

    return operator


def line(name: str, cells: list[str]) -> str:
    return f"{name[:NAME_WIDTH]:{NAME_WIDTH}}" + "".join(f"{cell:>9}" for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--num-heads", type=int, metavar="N")
    common.add_head_dims_argument(parser)
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--ref-dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timing", action=argparse.BooleanOptionalAction)
    options = parser.parse_args(arguments)
    if options.num_heads is not None and options.num_heads < 1:
        parser.error(f"--num-heads is {options.num_heads}, expected at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    device, timing = options.device, options.timing if options.timing is not None else options.set != "product"
    fla = fla_operator(device) if timing else None

    tensors = ALL_TENSORS if options.activations else TENSORS
    columns = [*("state" if tensor == "final_state" else tensor.removesuffix("_cumsum") for tensor in tensors)]
    columns += ["fwd", "step"] * timing + ["FLA:fwd", "FLA:step", "x:fwd", "x:step"] * (fla is not None)
    print(f"flash_qla {flash_qla.__version__}, torch {torch.__version__}, ", end="")
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", f", against {options.ref_dtype}", sep="")
    print(line(f"{options.set}: relative L2 error" + ", ms" * timing, columns))

    count, bad, known = 0, 0, (None, None)
    for problem in problems(options.set, device, options.num_heads, options.head_dims, options.activations):
        inputs, gradients = problem.make()
        if problem.same_as is None or known[0] != problem.same_as:
            known = (problem.same_as, expected_outputs(inputs, gradients, getattr(torch, options.ref_dtype)))
        errors, misses = compare(problem.name, actual_outputs(inputs, gradients), *known[1], inputs["q"].dtype)
        cells = [f"{errors[tensor]:.1e}" if tensor in errors else "-" for tensor in tensors]
        if timing:
            ours = times(flash_qla.chunk_gated_delta_rule, inputs, gradients, device)
            cells += [f"{ms:.3f}" for ms in ours]
        if fla is not None:
            cells += fla_cells(fla, problem, inputs, gradients, ours)
        print(line(problem.name, cells), flush=True)
        for miss in misses:
            print(f"  MISS {miss}", flush=True)
        count, bad = count + 1, bad + bool(misses)
    print(f"{count} problems, {bad} with misses")
    return 1 if bad else 0


def fla_cells(fla, problem: Problem, inputs: dict, gradients: dict, ours: list[float]) -> list[str]:
    """Its two times, and how many times ours they are."""
    if not problem.for_fla:
        return ["-"] * 4
    try:
        theirs = times(fla, inputs, gradients, "cuda")
    except Exception as error:  # FLA's promises are its own
        print(f"  FLA failed: {type(error).__name__}: {error}")
        return ["-"] * 4
    return [f"{ms:.3f}" for ms in theirs] + [f"{a / b:.2f}" for a, b in zip(theirs, ours, strict=True)]


ON_CPU = ["--device", "cpu", "--num-heads"]


def on_gpu(*arguments: str):
    return pytest.param(arguments, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "varlen", *ON_CPU, "1"],
        ["--set", "profile", *ON_CPU, "2"],
        ["--set", "product", *ON_CPU, "1"],
        ["--set", "develop", *ON_CPU, "2", "--head-dims", "96x192", "--activations"],
        ["--set", "varlen", *ON_CPU, "1", "--head-dims", "24x40", "--no-timing"],
        ["--set", "profile", *ON_CPU, "1", "--activations", "--no-timing"],
        on_gpu("--set", "develop"),
        on_gpu("--set", "varlen", "--no-timing"),
        on_gpu("--set", "develop", "--head-dims", "64x64", "--no-timing"),
        on_gpu("--set", "develop", "--head-dims", "96x192", "--activations", "--no-timing"),
        on_gpu("--set", "varlen", "--head-dims", "128x256", "--no-timing"),
        on_gpu("--set", "varlen", "--activations", "--no-timing"),
    ],
    ids=" ".join,
)
def test_sets(arguments, capsys):
    status = main(arguments)
    printed = capsys.readouterr().out
    print(printed)
    assert status == 0 and "MISS" not in printed
    assert printed.splitlines()[-1] == f"{len(lines_of(printed))} problems, 0 with misses"


def lines_of(printed: str) -> list[str]:
    """Those of the problems, all of which have as many columns as the second line has titles."""
    _, titles, *lines, _ = (line for line in printed.splitlines() if not line.startswith("  "))
    columns = len(titles[NAME_WIDTH:].split())
    assert columns >= len(TENSORS)
    assert all(len(line[NAME_WIDTH:].split()) == columns for line in lines)
    return lines


BREAK_DV = """
inner = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default
def broken(*args):
    dq, dk, dv, *others = inner(*args)
    return dq, dk, 1.02 * dv, *others
flash_qla.ops.autograd._BACKWARD.op = broken
"""


def test_exit_status():
    """The exit status of the command line, without an error and with one gradient off by 2%."""
    arguments = ["--set", "develop", *ON_CPU, "2"]
    wrong = start_python(
        f"import runpy, sys, torch, flash_qla\n{BREAK_DV}\n"
        f"sys.argv = {[__file__, *arguments, '--no-timing']!r}; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')",
        FLASH_QLA_PYTHON_AUTOGRAD="1",  # where the fault is
    )
    command = [sys.executable, __file__, *arguments, "--ref-dtype", "float32"]
    right = subprocess.run(command, capture_output=True, text=True)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "against float32" in right.stdout
    assert right.stdout.splitlines()[-1] == f"{len(lines_of(right.stdout))} problems, 0 with misses"

    printed, _ = wrong.communicate()
    assert wrong.returncode == 1, printed
    misses = [line for line in printed.splitlines() if "MISS" in line]
    assert misses and all(line.startswith("  MISS dv: relative L2 error 2.0") for line in misses), printed


@pytest.mark.parametrize("tensor", ALL_TENSORS)
@accuracy.not_measured()
def test_each_tensor_may_miss(tensor):
    case = Case(T=66, H_k=1, H_v=2, V=192, gate="logsigmoid", **ACTIVATIONS)
    inputs, gradients = Problem.of(case, "cpu").make()
    actual = actual_outputs(inputs, gradients)
    expected, sizes = expected_outputs(inputs, gradients, torch.float64)
    assert set(actual) == set(ALL_TENSORS) and compare("a test", actual, expected, sizes, torch.bfloat16)[1] == []
    errors, misses = compare("a test", {**actual, tensor: 1.02 * actual[tensor]}, expected, sizes, torch.bfloat16)
    assert len(misses) == 1 and misses[0].startswith(f"{tensor}: ")
    assert max(errors, key=errors.get) == tensor


@pytest.mark.parametrize("activations", ({}, ACTIVATIONS), ids=("ready", "activations"))
def test_large_problem(activations, monkeypatch):
    """A problem of the GPU's profile, small and on the CPU."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    problem = Problem.large(Case(lengths=(70, 0, 3), H_k=1, H_v=2, K=24, V=40, **activations))
    inputs, gradients = problem.make()
    assert inputs["initial_state"].shape == (3, 2, 24, 40) and problem.name.startswith("1x2 of 24x40 70+0+3")
    actual = actual_outputs(inputs, gradients)
    assert set(actual) == set(ALL_TENSORS if activations else TENSORS)
    assert compare("a test", actual, *expected_outputs(inputs, gradients, torch.float64), torch.bfloat16)[1] == []


def test_options_of_all_problems():
    for name, device in itertools.product(SETS, ("cpu", "cuda")):
        found = problems(name, device, 2, (96, 192), activations=True)
        assert all(" of 96x192 " in problem.name and problem.name.endswith(", activations") for problem in found)


def test_heads():
    pairs = [(h["H_k"], h["H_v"]) for h in heads(48, (2, 3, 4))]
    assert pairs == [(24, 48), (16, 48), (12, 48)]
    assert heads(7, (2, 4)) == [{"H_k": 7, "H_v": 7}]
    assert all("6x6" in p.name or "3x6" in p.name for p in problems("develop", "cpu", 6))


if __name__ == "__main__":
    sys.exit(main())
