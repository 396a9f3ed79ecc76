"""FLASH_QLA_CHECK=1: what docs/checks.md says that it reports."""

from pathlib import Path

import pytest
from subprocesses import run_python

CODE = """
import sys
sys.path.insert(0, {tests!r})
import dataclasses, torch
from every_op import make_call

DEVICE, NAN, INF = {device!r}, float("nan"), float("inf")

def said(name, **changes):
    # Of each change the element, by its index, and its number
    options = changes.pop("options", {{}})
    call = make_call(name, DEVICE, **options)
    arguments = dict(call.arguments)
    for argument, (index, number) in changes.items():
        arguments[argument] = arguments[argument].clone()
        arguments[argument][index] = number
    try:
        dataclasses.replace(call, arguments=arguments)()
    except RuntimeError as error:
        return str(error)
    return "nothing"

{body}
"""


def run(body: str, device: str) -> list[str]:
    code = CODE.format(tests=str(Path(__file__).parent), device=device, body=body)
    lines = run_python(code, FLASH_QLA_CHECK="1", FLASH_QLA_QUIET="1").splitlines()
    return [line[2:] for line in lines if line.startswith("> ")]


CHUNK_OPS = """
for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "prefill_gated_delta_rule"):
    print(">", said(name))
    print(">", said(name, g=((0, 100, 1), 0.5)))
    print(">", said(name, g=((0, 100, 1), -INF)))
    for argument in ("q", "k", "v"):
        print(">", said(name, **{argument: ((0, 100, 0, 3), INF)}))
    print(">", said(name, beta=((0, 100, 1), NAN)))
"""


def test_tokens(device):
    """The token and the head of a log decay above 0, and of what is not finite."""
    lines = iter(run(CHUNK_OPS, device))
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "prefill_gated_delta_rule"):
        assert next(lines) == "nothing"
        message = "g[0, 100, 1] is 0.5, expected at most 0: it is the logarithm of the decay, and not the decay"
        assert next(lines) == f"flash_qla::{name}: {message}"
        assert next(lines) == "nothing"
        for argument in "qkv":
            assert next(lines) == f"flash_qla::{name}: {argument}[0, 100, 0, 3] is inf, expected a finite number"
        assert "beta[0, 100, 1] is" in next(lines)
    assert not list(lines)


OTHERS = """
inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
print(">", said("chunk_gated_delta_rule", options=inside, g=((0, 100, 1), 0.5), beta=((0, 3, 1), INF)))
print(">", said("chunk_gated_delta_rule", options=inside, A_log=(1, INF)))
print(">", said("chunk_gated_delta_rule", options=inside, A_log=(1, NAN)))
print(">", said("chunk_gated_delta_rule", options=inside, dt_bias=(0, INF)))
print(">", said("chunk_gated_delta_rule", initial_state=((2, 1, 0, 5), NAN)))
print(">", said("chunk_gated_delta_rule_bwd", do=((0, 266, 1, 0), INF)))
print(">", said("chunk_gated_delta_rule_bwd", dht=((3, 1, 0, 5), NAN)))
print(">", said("chunk_gated_delta_rule_bwd", g=((0, 266, 1), NAN)))
print(">", said("gated_delta_rule_forward_begin", k=((0, 266, 0, 0), NAN)))
print(">", said("gated_delta_rule_backward_begin", do=((0, 266, 1, 0), INF)))
"""


def test_other_tensors(device):
    texts = (
        "nothing",
        "nothing",
        "A_log[1] is nan, expected a number",
        "dt_bias[0] is inf, expected a finite number",
        "initial_state[2, 1, 0, 5] is nan, expected a finite number",
        "do[0, 266, 1, 0] is inf, expected a finite number",
        "dht[3, 1, 0, 5] is nan, expected a finite number",
        "g[0, 266, 1] is nan, expected a number",
        "k[0, 266, 0, 0] is nan, expected a finite number",
        "do[0, 266, 1, 0] is inf, expected a finite number",
    )
    for line, text in zip(run(OTHERS, device), texts, strict=True):
        assert line.replace("-nan", "nan").endswith(text)


POOLS = """
print(">", said("prefill_gated_delta_rule", state_pool=((3, 1, 0, 5), NAN)))  # of the sequence without tokens
print(">", said("prefill_gated_delta_rule", state_pool=((5, 1, 0, 5), NAN)))
no_slot = {"state_indices": (3, -1), "k": ((0, 266, 0, 0), NAN)}
print(">", said("prefill_gated_delta_rule", state_pool=((5, 1, 0, 5), NAN), **no_slot))
print(">", said("prefill_gated_delta_rule", state_pool=((6, 1, 0, 5), NAN)))  # a slot that no sequence has
for name in ("decode_gated_delta_rule", "decode_gated_delta_rule_packed"):
    print(">", said(name))
    print(">", said(name, state_pool=((5, 1, 0, 5), INF)))
    print(">", said(name, a=((0, 5, 1), NAN)))
    print(">", said(name, a=((0, 5, 1), NAN), state_indices=(3, -1)))
    print(">", said(name, b=((0, 5, 1), INF)))
    print(">", said(name, state_indices=(1, 99)))
call = make_call("decode_gated_delta_rule", DEVICE)
slots = call.arguments["state_indices"][:, None]
for accepted in (1, 2, 0):
    table = torch.full((4,), accepted, device=DEVICE)
    arguments = call.arguments | {"state_indices": slots, "num_accepted_tokens": table}
    try:
        dataclasses.replace(call, arguments=arguments)()
        print("> nothing")
    except RuntimeError as error:
        print(">", error)
"""


def test_pools(device):
    """States that are read, tokens of sequences that have a slot, tables."""
    state = "state_pool[5][1, 0, 5] is {}, expected a finite number"
    of_decoding = (
        "nothing",
        state.format("inf"),
        "a[0, 5, 1] is nan, expected a number",
        "nothing",
        "nothing",
        "state_indices[1] is 99, expected 0 to 8",
    )
    accepted = ("nothing", *(f"num_accepted_tokens[0] is {n}, expected 1 to 1" for n in (2, 0)))
    texts = ("nothing", state.format("nan"), "nothing", "nothing", *of_decoding, *of_decoding, *accepted)
    for line, text in zip(run(POOLS, device), texts, strict=True):
        assert line.replace("-nan", "nan").endswith(text)


def test_without_the_variable(device):
    """Nothing is looked at."""
    code = CODE.format(tests=str(Path(__file__).parent), device=device, body=CHUNK_OPS)
    lines = run_python(code, FLASH_QLA_QUIET="1").splitlines()
    assert lines and all(line == "> nothing" for line in lines if line.startswith("> "))


def test_padding(device):
    """Tokens after the last offset may hold anything."""
    body = """
call = make_call("chunk_gated_delta_rule", DEVICE)
arguments = {name: x for name, x in call.arguments.items()}
arguments["cu_seqlens"] = torch.tensor([0, 70, 134, 134, 200], dtype=torch.int32, device=DEVICE)
for name in ("q", "k", "v", "g", "beta"):
    arguments[name] = arguments[name].clone()
    arguments[name][:, 200:] = NAN
dataclasses.replace(call, arguments=arguments)()
print("> nothing")
arguments["k"][0, 199, 0, 0] = NAN
try:
    dataclasses.replace(call, arguments=arguments)()
except RuntimeError as error:
    print(">", error)
"""
    first, second = run(body, device)
    assert first == "nothing" and "k[0, 199, 0, 0]" in second


@pytest.mark.parametrize("name", ("g > 0", "cu_seqlens", "num_accepted_tokens", "state_pool", "intermediate_indices"))
def test_the_page_lists_them(name):
    assert name.split()[0] in (Path(__file__).parent.parent / "docs/checks.md").read_text()
