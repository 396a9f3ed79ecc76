"""FLASH_QLA_CHECK=1: what docs/checks.md says that it reports."""

import re
from pathlib import Path

from subprocesses import run_forks, run_python

ROOT = Path(__file__).parent.parent

CODE = """
import sys
sys.path.insert(0, {tests!r})
import dataclasses, torch
from torch.nn.functional import normalize
from every_op import make_call

DEVICE, NAN, INF = {device!r}, float("nan"), float("inf")

def said(name, **changes):
    # Of each change the element, by its index, and its number. `given` has whole arguments, None for no argument.
    options, given = changes.pop("options", {{}}), changes.pop("given", {{}})
    call = make_call(name, DEVICE, **options)
    arguments = {{x: value for x, value in (call.arguments | given).items() if value is not None}}
    for argument, (index, number) in changes.items():
        arguments[argument] = arguments[argument].clone()
        arguments[argument][index] = number
    try:
        dataclasses.replace(call, arguments=arguments)()
    except RuntimeError as error:
        return str(error)
    return "nothing"

def expect(text, name, **changes):
    found = said(name, **changes).replace("-nan", "nan").replace("-inf", "inf")
    assert found.endswith(text), (text, found)

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
    print(">", said(name, state_pool=((3, 1, 0, 5), NAN)))  # of the sequence without tokens
    print(">", said(name, a=((0, 5, 1), NAN)))
    print(">", said(name, a=((0, 5, 1), NAN), state_indices=(3, -1)))
    print(">", said(name, b=((0, 5, 1), INF)))
    print(">", said(name, state_indices=(1, 99)))
two_columns = torch.tensor([[7, 1], [0, 2], [3, 4], [5, 6]], device=DEVICE)
given = {"state_indices": two_columns, "num_accepted_tokens": torch.ones(4, dtype=torch.int32, device=DEVICE)}
for slot in (7, 1):
    print(">", said("decode_gated_delta_rule", given=given, state_pool=((slot, 1, 0, 5), NAN)))
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
        "nothing",
        "a[0, 5, 1] is nan, expected a number",
        "nothing",
        "nothing",
        "state_indices[1] is 99, expected 0 to 8",
    )
    columns = ("state_pool[7][1, 0, 5] is nan, expected a finite number", "nothing")
    accepted = (*columns, "nothing", *(f"num_accepted_tokens[0] is {n}, expected 1 to 1" for n in (2, 0)))
    texts = ("nothing", state.format("nan"), "nothing", "nothing", *of_decoding, *of_decoding, *accepted)
    for line, text in zip(run(POOLS, device), texts, strict=True):
        assert line.replace("-nan", "nan").endswith(text)


BACKLOGS = """
# The slots and their steps: 7 and 1, 0 and 3, 3 and 0, 5 and 2
name = "decode_gated_delta_rule_buffered"
log = ", expected at most 0: it is the logarithm of the decay, and not the decay"
expect("nothing", name)
expect("d_cache[0][1, 2, 7] is nan, expected a finite number", name, d_cache=((0, 1, 2, 7), NAN))
expect("nothing", name, d_cache=((0, 1, 3, 7), NAN))  # a step that is not there yet
expect("nothing", name, d_cache=((3, 1, 0, 7), NAN))
expect("nothing", name, d_cache=((4, 1, 0, 7), NAN))  # a slot that no sequence has
expect("nothing", name, d_cache=((0, 1, 2, 7), NAN), state_indices=(1, -1))
expect("k_cache[5][0, 1, 3] is inf, expected a finite number", name, k_cache=((5, 0, 1, 3), INF))
expect("nothing", name, k_cache=((5, 0, 2, 3), INF))
expect("g_cache[5][1, 1] is 0.5" + log, name, g_cache=((5, 1, 1), 0.5))
expect("nothing", name, g_cache=((5, 1, 1), -INF))
expect("nothing", name, g_cache=((5, 1, 2), 0.5))
expect("write_pos[1] is 4, expected 0 to 3", name, write_pos=(1, 4))
"""


def test_backlogs(device):
    """The steps that are used, of slots that a sequence has."""
    run(BACKLOGS, device)


FIRST_SLOTS = """
def mask(*flags):
    return torch.tensor([flags] * 2, device=DEVICE).T.contiguous()[:, 1]  # strided

def check(slot, is_read, flags=None, first=(2, 1, 6, 8), null_index=-1, **changes):
    given = {"initial_state_indices": torch.tensor(first, device=DEVICE) if first else None, "null_index": null_index}
    given["has_initial_state"] = mask(*flags) if flags else None
    text = f"state_pool[{slot}][1, 0, 5] is nan, expected a finite number" if is_read else "nothing"
    expect(text, "prefill_gated_delta_rule", state_pool=((slot, 1, 0, 5), NAN), given=given, **changes)

check(8, True)
check(5, False)  # sequence 3 writes it, and reads slot 8
check(6, False)  # of the sequence without tokens
check(8, True, flags=(True, True, True, True))
check(8, False, flags=(True, True, True, False))
check(1, False, flags=(True, False, True, True))
check(2, True, flags=(True, False, True, True))
check(5, True, flags=(False, False, True, True), first=None)
check(5, False, flags=(True, True, True, False), first=None)
check(8, False, state_indices=(3, -1))
check(5, False, first=(2, 1, 6, -1))
check(0, True, first=(2, 1, 6, 0))
check(0, False, first=(2, 1, 6, 0), null_index=0)
check(1, False, null_index=0)  # of sequence 1, whose slot is 0
for index in (9, 100):
    changes = {"given": {"initial_state_indices": torch.tensor((2, 1, 6, index), device=DEVICE)}}
    expect(f"initial_state_indices[3] is {index}, expected 0 to 8", "prefill_gated_delta_rule", **changes)
"""


def test_first_slots(device):
    """The states that are read are checked: those of initial_state_indices, where has_initial_state says so."""
    run(FIRST_SLOTS, device)


STEPS = """
def text(token, step, k_head, head, to_do="normalize the keys, or pass use_qk_l2norm_in_kernel=True"):
    reason = "expected at most 2, because the state grows from token to token otherwise"
    return f"k[0, {token}, {k_head}] has beta |k|^2 = {step} in value head {head}, {reason}: {to_do}"

half = {"k": ((0, 100), 0.5)}  # 64 channels: |k|^2 is 16
names = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd",
         "gated_delta_rule_forward_begin", "gated_delta_rule_backward_begin", "prefill_gated_delta_rule")
for name in names:
    expect(text(100, 8, 0, 0), name, beta=((0, 100), 0.5), **half)
    expect("nothing", name, beta=((0, 100), 0.125), **half)
grouped = {"options": {"H_k": 2, "H_v": 4}}  # value heads 2 and 3 have the second key
name, second = "chunk_gated_delta_rule", {"k": ((0, 100, 1), 0.5)}
expect(text(100, 8, 1, 2), name, beta=((0, 100), 0.5), **second, **grouped)
expect("nothing", name, beta=((0, 100, slice(2, 4)), 0.1), **second, **grouped)
expect(text(100, 8, 1, 3), name, beta=((0, 100), torch.tensor((0.9, 0.9, 0.1, 0.5))), **second, **grouped)
late = {"k": ((0, 266), 0.5), "beta": ((0, 266), 0.5)}
expect(text(266, 8, 0, 0), "prefill_gated_delta_rule", **late)
expect("nothing", "prefill_gated_delta_rule", **late, state_indices=(3, -1))

keys = normalize(torch.randn(1, 267, 1, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
keys, betas = keys.to(DEVICE, torch.bfloat16), torch.full((1, 267, 2), 2.0, device=DEVICE)
normalized, raw = {"use_qk_l2norm_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}
expect("nothing", name, given={"k": keys, "beta": betas})  # keys that are rounded
expect("nothing", name, given={"k": normalize(keys, dim=-1), "beta": betas})
assert "has beta |k|^2 = 2.1" in said(name, given={"k": keys, "beta": 1.07 * betas})
expect("nothing", name, given={"k": 30 * keys, "beta": betas, **normalized})
expect("so beta has to be at most 2", name, given={"k": keys, "beta": 1.5 * betas, **normalized})
expect("nothing", name, given={"k": 1.5 * keys, "beta": 0 * betas, **raw})  # betas of 1/2
assert "beta |k|^2 = 2.2" in said(name, given={"k": 1.5 * keys, "beta": 0 * betas, "allow_neg_eigval": True, **raw})
decoded = {"k": ((0, 5), 0.5), "b": ((0, 5), 0.0)}
expect("nothing", "decode_gated_delta_rule", **decoded)
without = {"given": {"use_qk_l2norm_in_kernel": False}}
expect(text(5, 8, 0, 0), "decode_gated_delta_rule", **decoded, **without)
"""


def test_steps_that_let_the_state_grow(device):
    """beta |k|^2 above 2, after activations and l2norm: the first token, the heads, and what to do."""
    run(STEPS, device)


RESULTS = """
result = "expected a finite result, because the arguments are finite: a number has left the range of its dtype"
half = {"options": {"dtype": torch.float16}}

def expect_at(element, name, **changes):
    found = said(name, **changes)
    assert f": {element}" in found and found.endswith(result), found

for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "gated_delta_rule_forward_begin",
             "prefill_gated_delta_rule"):
    expect_at("o[0, 100, 0, 3] is ", name, v=((0, 100, 0, 3), 6e4), given={"scale": 1e4}, **half)
out = torch.zeros(1, 267, 2, 96, device=DEVICE, dtype=torch.float16)
given = {"scale": 1e4, "out": out}
expect_at("o[0, 100, 0, 3] is ", "prefill_gated_delta_rule", v=((0, 100, 0, 3), 6e4), given=given, **half)
huge = {"initial_state": ((2, 1, 0, 5), 1e6), "given": {"state_dtype": torch.float16}}
expect(f"final_state[2, 1, 0, 5] is inf, {result}", "chunk_gated_delta_rule", **huge)
expect("nothing", "chunk_gated_delta_rule", **huge | {"given": {}})
expect_at("dq[0, 100, ", "chunk_gated_delta_rule_bwd", do=((0, 100), 1e30), given={"scale": 1e30})
expect_at("dq[0, 100, ", "chunk_gated_delta_rule_packed_bwd", do=((0, 100), 1e30), given={"scale": 1e30})
expect_at("dq[0, 100, ", "gated_delta_rule_backward_begin", do=((0, 100), 1e30), given={"scale": 1e30})

def pool_of(name, **more):
    call = make_call(name, DEVICE)
    without = ("checkpoint_every", "checkpoints", "intermediate_states")
    return {"given": {"state_pool": call.arguments["state_pool"].half(), **dict.fromkeys(without), **more}}

last = {"v": ((0, 266, 0, 3), 1e7)}
expect_at("state_pool[5][0, 3, ", "prefill_gated_delta_rule", **last, **pool_of("prefill_gated_delta_rule"))
no_slot = {"state_indices": (3, -1)}
expect("nothing", "prefill_gated_delta_rule", **last, **no_slot, **pool_of("prefill_gated_delta_rule"))
name, last = "decode_gated_delta_rule", {"v": ((0, 5, 0, 3), 1e7)}
expect_at("state_pool[5][0, 3, ", name, **last, **pool_of(name))
written = torch.tensor([[1, 2, 4], [6, -1, -1], [-1, -1, -1], [-1, -1, 8]], device=DEVICE)
expect_at("state_pool[8][0, 3, ", name, **last, **pool_of(name, write_indices=written))
written[3, 2] = -1
expect("nothing", name, **last, **pool_of(name, write_indices=written))
written[1, 1] = 8  # of a sequence with one token, which does not write it
expect("nothing", name, state_pool=((8, 1, 0, 5), NAN), **pool_of(name, write_indices=written))
expect("nothing", name, **last, **pool_of(name, update_state=False))
"""


def test_results(device):
    """Those of finite arguments: the first token, or the state, of what is not finite."""
    run(RESULTS, device)


RESULTS_OF_EVERY_OP = """
from every_op import NAMES

for name in NAMES:
    if "scale" in {x.name for x in getattr(torch.ops.flash_qla, name).default._schema.arguments}:
        found = said(name, given={"scale": 1e30}, options={"dtype": torch.float16})
        assert f"::{name.removesuffix('_begin')}" in found and "expected a finite result" in found, (name, found)
        print(">", name)
"""


def test_results_of_every_op(device):
    """No op with a scale returns what is not finite in silence."""
    assert {"gated_delta_net", "decode_gated_delta_rule_packed"} < {*run(RESULTS_OF_EVERY_OP, device)}


def test_words_of_the_variable():
    """1, true, yes and on, in any case; nothing else."""
    words = ("1", "true", "TRUE", "Yes", " on ", "0", "false", "no", "off", "", "2", "o")
    body = 'print(">", said("chunk_gated_delta_rule", g=((0, 100, 1), 0.5)))'
    code = CODE.format(tests=str(Path(__file__).parent), device="cpu", body=body)
    outputs = run_forks(
        [f"import os\nos.environ['FLASH_QLA_CHECK'] = {word!r}\n{code}" for word in words], FLASH_QLA_QUIET="Yes"
    )
    actual = {word: "> nothing" not in output for word, output in zip(words, outputs, strict=True)}
    assert actual == {word: i < 5 for i, word in enumerate(words)}
    assert "slow path" not in "".join(outputs)


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


def test_the_page_lists_them():
    """Whatever the checks name, and the tables, which others check."""
    page = (ROOT / "docs/checks.md").read_text()
    named = set(re.findall(r'"(\w+)"', (ROOT / "csrc/contents.cpp").read_text()))
    assert {"g", "d_cache", "final_state", "A_log"} <= named
    named |= {"cu_seqlens", "state_indices", "num_accepted_tokens", "intermediate_indices", "write_pos", "parents"}
    in_code = {word for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"\w+", code)}
    assert named <= in_code, named - in_code
    assert re.search(r"^\| activated `g`, .* \| at most 0; .*\bg > 0\b", page, re.MULTILINE)
