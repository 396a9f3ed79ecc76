"""examples/cuda_graphs.py: a server's prefill graphs, one per token budget, on changing sequences and states. On the
CPU the steps run eagerly, which shows all but the capture. Graphs of all ops are in test_gpu_execution.py."""

import accuracy
import pytest
import torch
from cases import Case, equal, make_inputs, reference_of
from cpp_example import ROOT, load_example

TOKENS = ("q", "k", "v", "g", "beta")
BUDGETS = (64, 400)
N = 6

example = load_example(ROOT / "examples/cuda_graphs.py")


def case_of(lengths: tuple[int, ...], seed: int = 0) -> Case:
    return Case(lengths=lengths, H_k=1, H_v=2, keys="raw", use_qk_l2norm_in_kernel=True, gate="logsigmoid", seed=seed)


def make_graphs(device):
    inputs = make_inputs(case_of((1,)), device)
    states = torch.zeros(N, *inputs["initial_state"].shape[1:], device=device)
    return example.PrefillGraphs(example.gated_delta_rule, BUDGETS, [inputs[name] for name in TOKENS], states)


def prefill(graphs, inputs: dict, lengths) -> dict:
    """The rows of padding hold NaN. The states of absent sequences are random."""
    for buffer in graphs.tokens:
        buffer.fill_(float("nan"))
    graphs.states.normal_()
    before = graphs.states.clone()
    o, states = graphs.prefill([inputs[name] for name in TOKENS], lengths, inputs["initial_state"])
    assert torch.equal(graphs.states[len(lengths) :], before[len(lengths) :])
    before[: len(lengths)] = inputs["initial_state"]
    budget = graphs.budget_of(lengths)
    assert budget == (64 if sum(lengths) <= 64 else 400)
    padded = [x[:, :budget].clone() for x in graphs.tokens]
    eager_o, eager_states = example.gated_delta_rule(*padded, graphs.cu_seqlens.clone(), before)
    assert not eager_o[:, sum(lengths) :].any()
    actual = {"o": o, "final_state": states}
    assert equal(actual, {"o": eager_o[:, : sum(lengths)], "final_state": eager_states[: len(lengths)]})
    return actual


BATCHES = (
    (300, 65, 0, 7),
    (64,),
    (20, 1, 20, 3, 0, 20),
    (65,),
    (),
    (400,),
    (0, 0, 0),
    (63, 65, 128, 1, 100, 43),
    (300, 65, 0, 7),
)


def test_replays(device):
    """Each batch of other sequences, numbers and states, against an eager call of the graph's shapes, bit by bit, and
    against the fp64 recurrence of the batch alone."""
    graphs = make_graphs(device)
    for seed, lengths in enumerate(BATCHES):
        inputs = make_inputs(case_of(lengths, seed), device)
        actual = prefill(graphs, inputs, lengths)
        expected = reference_of(inputs)
        for output, x in actual.items():
            case = f"prefill graph, lengths={lengths}"
            accuracy.check(output, x, getattr(expected, output), dtype=torch.bfloat16, case=case)


def test_a_prompt_in_pieces(device):
    """The states that one replay leaves are what the next starts from, in place."""
    inputs = make_inputs(case_of((430, 100)), device)
    graphs = make_graphs(device)
    expected = reference_of(inputs)
    states, pieces = inputs["initial_state"], []
    for first, second in (((0, 380), (430, 440)), ((380, 400), (440, 470)), ((400, 430), (470, 530))):
        tokens = [torch.cat([inputs[name][:, slice(*rows)] for rows in (first, second)], 1) for name in TOKENS]
        lengths = [end - start for start, end in (first, second)]
        o, states = graphs.prefill(tokens, lengths, states)
        assert states.data_ptr() == graphs.states.data_ptr()
        pieces.append(o.clone().split(lengths, 1))
    o = torch.cat([piece for pieces_of_one in zip(*pieces, strict=True) for piece in pieces_of_one], 1)
    accuracy.check("o", o, expected.o, dtype=torch.bfloat16, case="prompt in pieces")
    accuracy.check("final_state", states, expected.final_state, dtype=torch.bfloat16, case="prompt in pieces")


def test_what_does_not_fit(device):
    graphs = make_graphs(device)
    for lengths, message in (((300, 101), "401 tokens came, expected at most 400"), ((1,) * 7, "7 sequences came")):
        inputs = make_inputs(case_of(lengths), device)
        with pytest.raises(ValueError, match=message):
            graphs.prefill([inputs[name] for name in TOKENS], lengths, inputs["initial_state"])
