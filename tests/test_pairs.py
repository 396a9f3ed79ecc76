"""Every op with every pair of values of every two of its options (tests/options.py), against the formula."""

import itertools
from pathlib import Path

import options
import pytest
import trials
from card import release
from subprocesses import run_python

GROUPS = [pytest.param(op, shape, id=f"{op}-{shape}") for op in trials.OPS for shape in options.shapes(op, "cpu")]


@pytest.mark.parametrize(("op", "shape"), GROUPS)
def test_pairs(op, shape, device):
    """All rows of a shape. The numbers of those that fail are seeds of their contents, too."""
    failures = []
    for number, row in enumerate(options.rows(op, device)):
        if row["shape"] == options.shapes(op, device)[shape]:
            trial = options.trial_of(op, row, number)
            try:
                trials.run(trial, device)
            except (AssertionError, RuntimeError) as error:
                failures.append(f"row {number}: {error}\n{trial}")
    if device == "cuda":
        release()
    assert not failures, "\n\n".join(failures)


CHECKED = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
import options, trials

for op in trials.OPS:
    for number, row in enumerate(options.rows(op, {device!r})):
        if row["shape"] == options.shapes(op, {device!r})["packed"]:
            trial = dataclasses.replace(options.trial_of(op, row, number), nan=None)
            try:
                trials.run(trial, {device!r})
            except Exception as error:
                raise AssertionError(f"row {{number}}: {{trial}}") from error
"""


def test_contents_are_right(device):
    """FLASH_QLA_CHECK=1 reports nothing. In a process of its own, which reads the switch at its start."""
    run_python(CHECKED.format(tests=str(Path(__file__).parent), device=device), FLASH_QLA_CHECK="1")


@pytest.mark.parametrize("of_device", ("cpu", "cuda"))
@pytest.mark.parametrize("op", trials.OPS)
def test_every_pair_is_there(op, of_device):
    """But for those that other options exclude."""
    values = options.options(op, of_device)
    covered = {
        tuple(sorted(pair))
        for row in options.rows(op, of_device)
        for pair in itertools.combinations(indices_of(values, row), 2)
    }
    missing = [
        pair
        for pair in options.pairs(values)
        if options.possible(op, of_device, pair) and tuple(sorted(indices_of(values, pair))) not in covered
    ]
    assert not missing or (op == "decode_packed" and {"flat", "padding"} == {x for pair in missing for x in pair})


def indices_of(values: dict, row: dict) -> list[tuple[str, int]]:
    return [(name, values[name].index(value)) for name, value in row.items()]
