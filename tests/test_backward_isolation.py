"""A gradient does not depend on other sequences, heads and batch rows, or earlier outputs. Everything here compares
bits. What holds for every op is in test_every_op.py."""

import pytest
import torch
from cases import (
    GRADIENT_OF,
    Case,
    make_arguments,
    make_gradients,
    make_inputs,
    run_all,
    run_backward,
)

BY_TOKEN = ("dq", "dk", "dv", "db", "dg")


def poison(x: torch.Tensor, where) -> torch.Tensor:
    x = x.clone()
    x[where] = float("nan")
    return x


@pytest.mark.parametrize("lengths", ((70, 64, 100), (64, 64, 106)), ids=str)
@pytest.mark.parametrize("name", ("do", "dht", "v"))
@pytest.mark.parametrize("head_dims", ({}, {"K": 256, "V": 64}), ids=("narrow", "wide"))
def test_nan_of_one_kind_stays_in_its_sequence(device, lengths, name, head_dims):
    case = Case(lengths=lengths, **head_dims)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    clean = run_backward(inputs, **gradients)
    tokens = slice(lengths[0], lengths[0] + lengths[1])
    where = 1 if name == "dht" else (0, tokens)
    if name in gradients:
        gradients[name] = poison(gradients[name], where)
    else:
        inputs[name] = poison(inputs[name], where)
    dirty = run_backward(inputs, **gradients)
    assert any(dirty[of][:, tokens].isnan().any() for of in BY_TOKEN)
    for of in BY_TOKEN:
        dirty[of][:, tokens] = clean[of][:, tokens] = 0
        assert torch.equal(dirty[of], clean[of]), of
    assert torch.equal(dirty["dh0"][0::2], clean["dh0"][0::2])


@pytest.mark.parametrize("name", (*GRADIENT_OF, "do", "dht"))
def test_nan_stays_in_its_head_and_batch_row(device, name):
    """Two q/k heads, each read by two value heads. A NaN shows in the value heads that read it, and in the q/k heads
    that those read."""
    case = Case(B=2, T=70, H_k=2, H_v=4)
    arguments = make_arguments(case, device)
    clean = run_all(arguments)
    head = 1 if name in ("q", "k") else 3
    where = (1, head) if name in ("initial_state", "dht") else (1, slice(None), head)
    arguments[name] = poison(arguments[name], where)
    dirty = run_all(arguments)
    value_heads = torch.zeros(2, 4, dtype=torch.bool, device=device)
    value_heads[1, 2 if name in ("q", "k") else 3 :] = True
    key_heads = torch.zeros(2, 2, dtype=torch.bool, device=device)
    key_heads[1, 1] = True
    for of in ("o", "final_state", *GRADIENT_OF.values()):
        heads = key_heads if of in ("dq", "dk") else value_heads
        actual, expected = dirty[of], clean[of]
        if of not in ("dh0", "final_state"):
            actual, expected = actual.transpose(1, 2), expected.transpose(1, 2)
        assert torch.equal(actual[~heads], expected[~heads]), of
    assert any(dirty[of].isnan().any() for of in GRADIENT_OF.values())


def test_gradients_do_not_look_back_at_outputs(device):
    """The gradient of token t depends on do from t on, within its chunk too, if the final state has no gradient."""
    case = Case(T=150, gate="logsigmoid", dht=None)
    inputs, do = make_inputs(case, device), make_gradients(case, device)["do"]
    before = run_backward(inputs, do)
    do[:, :100] *= -0.5
    after = run_backward(inputs, do)
    for name in BY_TOKEN:
        assert torch.equal(after[name][:, 100:], before[name][:, 100:]), name
        assert (after[name][:, :100] != before[name][:, :100]).any(), name


def test_outputs_after_which_nothing_matters(device):
    """do is zero from token 100 on: later tokens have gradients of exactly zero, in the same chunk and after it."""
    case = Case(T=200, gate="logsigmoid", dht=None)
    inputs, do = make_inputs(case, device), make_gradients(case, device)["do"]
    do[:, 100:] = 0
    for name, x in run_backward(inputs, do).items():
        assert name == "dh0" or (x[:, :100].any() and not x[:, 100:].any()), name
