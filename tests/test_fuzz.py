"""tests/fuzz.py finds faults, and reports nothing for correct ops."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
import rounded_runs
import torch
import trials
from card import release
from cases import STRIDES, Case
from trials import Call, Trial

import flash_qla

pytestmark = pytest.mark.long

TRIAL = Trial(
    "chunk",
    Case(lengths=(100, 0, 65), padding=3, H_k=1, H_v=2, K=8, V=12, dtype=torch.float32, gate="logsigmoid"),
)
DECODING = Trial(
    "decode",
    Case(
        lengths=(5, 0, 3),
        K=16,
        V=24,
        dtype=torch.float32,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    ),
)
POOL = Trial(
    "prefill",
    Case(lengths=(130, 65), H_k=2, H_v=4, K=16, V=24, dtype=torch.bfloat16, gate="hard_resets", state_v_first=True),
    state_dtype=torch.bfloat16,
)


def test_short_run_on_the_cpu():
    for number in range(20):
        fuzz.run_any(fuzz.draw(0, number, "cpu"), "cpu")


@pytest.mark.gpu
def test_draws_of_regions():
    """Of the convolution, the norm and the regions, which need no noise."""
    for number in range(9, 200, 10):
        fuzz.run_any(fuzz.draw(0, number, "cuda"), "cuda")


@pytest.mark.gpu
@pytest.mark.whole_card
def test_short_run_on_the_gpu():
    for number in range(200):
        trial = fuzz.draw(0, number, "cuda")
        if trial.op == "chunk":
            trials.run(trial, "cuda")
            release()


def test_rounding_of_small_numbers():
    """In fp16 it takes up to half of the smallest step, and at most the number; 0 stays 0."""
    step = 2.0**-24
    numbers = torch.tensor([0.0, 1e-320, 1e-9, 3.3 * step, 1e-4, 1.0], dtype=torch.float64)
    runs = rounded_runs.Noise(torch.float16, "cpu", 200, 0)(numbers.expand(200, -1))
    most = torch.tensor([0, 1e-320, 1e-9, step / 2, 2**-11 * 1e-4, 2**-11], dtype=torch.float64)
    errors = (runs[2:] - numbers).abs().max(0).values  # without the exact run, and that to the nearest
    assert ((errors <= most) & (errors >= 0.9 * most)).all()


def scaled(name, factor):
    return lambda outputs: outputs[name].mul_(factor)


def swapped_heads(name):
    return lambda outputs: outputs[name].copy_(outputs[name].flip(2))


def token(name, change):
    return lambda outputs: change(outputs[name][0, 70, -1:])


FAULTS = {
    "scaled output": scaled("o", 1.001),
    "scaled gradient": scaled("dq", 1.001),
    "scaled sum": scaled("dg", 0.999),
    "swapped heads": swapped_heads("o"),
    "swapped gates": swapped_heads("db"),
    "a token without its output": token("low-level o", torch.Tensor.zero_),
    "a token's gradient": token("dg", lambda x: x.mul_(1.1)),
    "a token's keys": token("autograd's dk", lambda x: x.mul_(1.01)),
    "a NaN": token("dv", lambda x: x.fill_(torch.nan)),
    "a state of another sequence": lambda outputs: outputs["final_state"].copy_(outputs["final_state"].flip(0)),
    "a state transposed": lambda outputs: outputs["h"][0, 1].copy_(outputs["h"][0, 1].roll(1, -1)),
    "padding": lambda outputs: outputs["o"][0, -1].fill_(1e-30),
    "cumulative gates": lambda outputs: outputs["g_cumsum"][0, 64:].add_(0.01),
}


FEW = 1  # batches of runs: a trial has more of them before it calls something wrong


def spoil(fault):
    def spoiled(outputs):
        outputs = {name: x.clone() for name, x in outputs.items()}
        fault(outputs)
        return outputs

    return spoiled


def test_what_the_faults_are_planted_in_is_right():
    for trial in (TRIAL, POOL):
        assert max(trials.run(trial, "cpu").values()) <= 1


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults_are_found(fault):
    with pytest.raises(AssertionError):
        trials.run(TRIAL, "cpu", spoil(fault), FEW)


@pytest.mark.parametrize("factor", (0.97, 1.03))
@pytest.mark.parametrize("name", ("o", "states of state_pool"))
def test_bars_of_16_bits_are_not_wide(name, factor):
    with pytest.raises(AssertionError, match=name):
        trials.run(POOL, "cpu", spoil(scaled(name, factor)), FEW)


def test_a_slot_that_is_not_its_own_is_found():
    with pytest.raises(AssertionError, match="rest of state_pool was written"):
        trials.run(POOL, "cpu", spoil(lambda outputs: outputs["rest of state_pool"][0].add_(1)))


def test_other_bits_in_a_second_run_are_found():
    calls = []

    def other(outputs):
        calls.append(None)
        outputs["o"][0, 3, 0, 0] *= 1 + len(calls) * 2.0**-20

    with pytest.raises(AssertionError, match="a second run"):
        trials.run(TRIAL, "cpu", spoil(other))


# Tables without elements, storage offsets, padding and NaN


def make(trial: Trial) -> Call:
    noises = [trials.Noise(torch.float32, "cpu", trials.RUNS, seed) for seed in range(2)]
    return {"chunk": trials.chunk, "prefill": trials.prefill}.get(trial.op, trials.decode)(trial, "cpu", noises)


def seeded(trial: Trial, condition, **fields) -> Trial:
    """The trial with the first seed whose trial and call are such ones."""
    for seed in range(200):
        candidate = dataclasses.replace(trial, case=dataclasses.replace(trial.case, seed=seed), **fields)
        if condition(candidate, make(candidate)):
            return candidate
    raise AssertionError("no seed makes such a call")


def replace_op(monkeypatch, name: str, change) -> None:
    """Makes the fuzzer call change(the op, arguments)."""
    right = getattr(flash_qla, name)
    monkeypatch.setattr(flash_qla, name, lambda **arguments: change(right, arguments))


@pytest.mark.parametrize("argument", ("beta", "dht", "initial_state", "g"))
def test_a_storage_offset_left_out_is_found(monkeypatch, argument):
    trial = dataclasses.replace(TRIAL, offsets=True)
    trials.run(trial, "cpu")

    def wrong(op, arguments):
        x = arguments[argument]
        return op(**arguments | {argument: x.as_strided(x.shape, x.stride(), 0)})

    replace_op(monkeypatch, "chunk_gated_delta_rule_bwd", wrong)
    with pytest.raises(AssertionError, match=r"on contiguous tensors, differs in|errors over their bars"):
        trials.run(trial, "cpu")


@pytest.mark.parametrize("argument", ("q", "k", "v", "do"))
@pytest.mark.parametrize("kind", STRIDES[1:])
def test_strides_left_out_are_found(monkeypatch, argument, kind):
    case = dataclasses.replace(TRIAL.case, B=2, T=70, lengths=None, padding=0, H_k=2, strides=kind, do_strides=kind)
    trial = dataclasses.replace(TRIAL, case=case)
    trials.run(trial, "cpu")

    def wrong(op, arguments):
        x = arguments[argument]
        contiguous = torch.empty(x.shape, device="meta").stride()
        return op(**arguments | {argument: x.as_strided(x.shape, contiguous)})

    replace_op(monkeypatch, "chunk_gated_delta_rule_bwd", wrong)
    with pytest.raises(AssertionError, match="on contiguous tensors, differs in"):
        trials.run(trial, "cpu")


def test_padding_that_writes_its_slot_is_found(monkeypatch):
    """A sequence of no tokens puts back what it has read when another one has written its state there."""

    def is_such(_, call):
        slots = call.arguments["state_indices"]
        return slots[1] in slots[[0, 2]] and (slots > call.arguments["null_index"]).all()

    trial = seeded(DECODING, is_such, slots="shared")
    trials.run(trial, "cpu")

    def wrong(op, arguments):
        slot = arguments["state_indices"][1]
        before = arguments["state_pool"][slot].clone()
        o = op(**arguments)
        arguments["state_pool"][slot] = before
        return o

    replace_op(monkeypatch, "decode_gated_delta_rule", wrong)
    with pytest.raises(AssertionError, match="states of state_pool"):
        trials.run(trial, "cpu")


def in_the_middle(trial: Trial, call: Call) -> bool:
    """The NaN is in the first sequence, which has a slot, after its first token."""
    token = trials.draw_token(trial)
    live = "state_indices" not in call.arguments or call.arguments["state_indices"].flatten()[0] > 0
    return token.n == 0 and token.position > 0 and live


@pytest.mark.parametrize("op", trials.OPS)
@pytest.mark.parametrize("name", trials.NAN_IN)
def test_a_nan_comes_out_where_it_went_in(op, name):
    trial = {"chunk": TRIAL, "prefill": POOL}.get(op, dataclasses.replace(DECODING, op=op))
    trial = seeded(trial, in_the_middle, nan=name)
    call, token = make(trial), trials.draw_token(trial)
    ((argument, x),) = trials.with_nan(trial, call.arguments, token).items()
    before = call.arguments[argument]
    assert x.isnan().sum() == 1 + before.isnan().sum()
    assert x.stride() == before.stride() and x.storage_offset() == before.storage_offset()
    heads = slice(2 * token.head, 2 * token.head + 2) if name in ("q", "k") else slice(token.head, token.head + 1)
    is_nan = call(**{argument: x})["o"][0].isnan().any(-1)  # [T, H_v]
    assert is_nan[token.t, heads].all()
    is_nan[token.t : trial.case.lengths[0], heads] = False
    assert not is_nan.any()
    trials.run(trial, "cpu")


SPREADS = {
    "to the token before": ("o", lambda x, token: x[0, token.t - 1]),
    "to another sequence": ("low-level o", lambda x, token: x[0, 150]),
    "to another head": ("o", lambda x, token: x[0, token.t, 1 - token.head]),
    "to another sequence's state": ("final_state", lambda x, token: x[1]),
    "to another sequence's gradient": ("dv", lambda x, token: x[0, 150]),
    "to another head's sum": ("dA_log", lambda x, token: x[1 - token.head : 2 - token.head]),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_nan_that_spreads_is_found(spread):
    name, part = SPREADS[spread]
    case = dataclasses.replace(TRIAL.case, use_gate_in_kernel=True)
    trial = seeded(dataclasses.replace(TRIAL, case=case), in_the_middle, nan="v")
    trials.run(trial, "cpu")

    def spreads(outputs):
        if outputs["o"].isnan().any():
            part(outputs[name], trials.draw_token(trial)).fill_(torch.nan)

    with pytest.raises(AssertionError, match=f"^{name} has other bits where nothing depends on the NaN"):
        trials.run(trial, "cpu", spoil(spreads))


def fuzz_in(folder, *options, change="pass"):
    """fuzz.py in a process of its own, in which `change` comes first, as it does in its jobs."""
    program = folder / "program.py"
    program.write_text(f"import fuzz, os\n{change}\nif __name__ == '__main__':\n    raise SystemExit(fuzz.main())\n")
    paths = os.pathsep.join([str(Path(fuzz.__file__).parent), str(Path(flash_qla.__file__).parents[1])])
    command = [sys.executable, program, "--device", "cpu", "--seconds", "600", *options]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_jobs_do_what_one_does(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--device", "cpu", "--seconds", "600", "--cases", "9"])
    assert fuzz.main() == 0
    one, two = capsys.readouterr().out, fuzz_in(tmp_path, "--cases", "9", "--jobs", "2")
    assert two.returncode == 0, two.stdout + two.stderr
    summaries = [re.sub(r"in \d+ s", "", x) for x in (one, two.stdout)]
    assert summaries[0].startswith("9 of 9 cases") and summaries[0] == summaries[1]


@pytest.mark.parametrize(
    "fault, message",
    (
        ("f(t) if t != fuzz.draw(3, 5, 'cpu') else 1 / 0", "ZeroDivisionError"),
        ("f(t) if t != fuzz.draw(3, 5, 'cpu') else os._exit(7)", "its process ended with 7"),
    ),
    ids=("error", "crash"),
)
def test_a_failure_in_a_job_stops_all(fault, message, tmp_path):
    change = f"fuzz.run, f = lambda t, device: {fault}, lambda t: {{'o': 0.5}}"
    result = fuzz_in(tmp_path, "--seed", "3", "--jobs", "2", change=change)
    assert result.returncode == 1, result.stderr
    assert message in result.stdout and str(fuzz.draw(3, 5, "cpu")) in result.stdout
    assert "python tests/fuzz.py --seed 3 --case 5 --device cpu" in result.stdout


# If the norm of a row, or of its terms, is beyond fp16's range, its numbers may be inf or nan, even within the range.
@pytest.mark.parametrize(
    "name, size, between, element, passes",
    (
        ("dk", 1e5, None, torch.inf, True),
        ("dk", 1e5, None, "wrong", False),
        ("dk", 1e3, None, torch.inf, False),
        ("dk", 1e3, 7e4, torch.nan, True),
        ("dk", 1e3, 7e4, "wrong", False),
        ("dk", 1e3, 6e4, torch.nan, False),
        ("dv", 1e5, None, torch.inf, False),
    ),
)
def test_beyond_the_range_of_fp16(name, size, between, element, passes):
    noise = trials.Noise(torch.float16, "cpu", trials.RUNS, 0)
    runs = torch.full((2 + trials.RUNS, 1, 3, 2, 64), size / 8, dtype=torch.float64)
    runs[1:] *= 1 + 1e-3 * torch.randn(runs[1:].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = runs[0].to(torch.float16)
    actual[0, 1, 0] = 1.1 * actual[0, 1, 0] if element == "wrong" else element
    on_the_way = None if between is None else torch.full((1, 3, 2), between, dtype=torch.float64)
    assert (trials.Bars(name, runs, noise, on_the_way).check(actual, torch.float32) <= 1) == passes
