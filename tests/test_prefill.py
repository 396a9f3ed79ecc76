"""The prefill on a pool of states, against chunk_gated_delta_rule between a gather and a scatter. On the CPU; the GPU
refuses it so far."""

import re

import pytest
import torch
from cases import ALL_INSIDE, Case, make_inputs

from flash_qla import chunk_gated_delta_rule, prefill_gated_delta_rule

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SLOTS = 20
SIZES = {"K": 16, "V": 24, "state_v_first": True, "dtype": FP32}
LENGTHS = {"lengths": (70, 0, 130, 64, 1, 300), "padding": 5}


def make_arguments(case: Case, pool_dtype: torch.dtype = FP32, gap: int = 0, index_dtype=torch.int32) -> dict:
    """Of the prefill; NaN between the slots."""
    inputs = make_inputs(case, "cpu")
    for name in ("initial_state", "state_v_first", "auto_cp"):
        del inputs[name]
    generator = torch.Generator().manual_seed(3)
    size = case.H_v * case.V * case.K
    rows = torch.full((SLOTS, size + gap), float("nan"), dtype=pool_dtype)
    rows[:, :size] = torch.randn(SLOTS, size, generator=generator).to(pool_dtype)
    N = case.B if case.lengths is None else len(case.lengths)
    return inputs | {
        "state_pool": rows[:, :size].unflatten(1, (case.H_v, case.V, case.K)),
        "state_indices": torch.randperm(SLOTS, generator=generator)[:N].to(index_dtype),
    }


def by_hand(arguments: dict, slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final states, from the slots, of a call without anything else of the pool."""
    others = ("state_pool", "state_indices", "has_initial_state", "null_index")
    inputs = {name: x for name, x in arguments.items() if name not in others and "checkpoint" not in name}
    pool = arguments["state_pool"]
    states = pool[arguments["state_indices"].long() if slots is None else slots]
    if arguments.get("has_initial_state") is not None:
        states = states * arguments["has_initial_state"][:, None, None, None]
    return chunk_gated_delta_rule(
        **inputs, initial_state=states, output_final_state=True, state_v_first=True, state_dtype=pool.dtype
    )


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(**SIZES, **LENGTHS), {}),
        (Case(**SIZES, B=2, T=70), {"index_dtype": torch.int64, "gap": 3}),
        (Case(**SIZES | {"dtype": BF16}, **LENGTHS, use_qk_l2norm_in_kernel=True, keys="raw"), {"pool_dtype": BF16}),
        (Case(**SIZES | {"dtype": FP16}, **LENGTHS, **ALL_INSIDE, g_dtype=FP16, beta_dtype=BF16), {"gap": 64}),
        (Case(**SIZES | {"dtype": FP64}, **LENGTHS, H_v=6, scale=0.7), {"pool_dtype": FP64}),
        (Case(**SIZES, lengths=(), padding=3), {}),
        (Case(**SIZES, lengths=(0, 0), padding=3), {}),
        (Case(**SIZES, B=2, T=0), {}),
    ],
    ids=str,
)
def test_as_gather_and_scatter(case, options):
    """The same bits; slots that no sequence has are left alone."""
    arguments = make_arguments(case, **options)
    before = arguments["state_pool"].clone()
    expected, states = by_hand(arguments)
    o = prefill_gated_delta_rule(**arguments)
    assert o.is_contiguous() and torch.equal(o, expected)
    before[arguments["state_indices"].long()] = states
    assert torch.equal(arguments["state_pool"], before)


def test_new_requests_and_nobody():
    case = Case(**SIZES, **LENGTHS)
    arguments = make_arguments(case)
    for null_index in (-1, 0):
        slots = torch.tensor([4, null_index, null_index - 3, 9, 1, 7])
        mask = torch.tensor([True, True, False, False, True, False])
        real = slots > null_index
        call = arguments | {"state_indices": slots, "has_initial_state": mask, "null_index": null_index}
        call["state_pool"] = before = arguments["state_pool"].clone()
        expected, states = by_hand(call, slots.clamp_min(0))
        before = before.clone()
        o = prefill_gated_delta_rule(**call)
        offsets = arguments["cu_seqlens"].tolist()
        for n in range(6):
            rows = o[:, offsets[n] : offsets[n + 1]]
            assert torch.equal(rows, expected[:, offsets[n] : offsets[n + 1]]) if real[n] else not rows.any()
        before[slots[real]] = states[real]
        assert torch.equal(call["state_pool"], before)


@pytest.mark.parametrize("pool_dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("every", (64, 128))
def test_checkpoints(every, pool_dtype):
    """The states of shorter prefills, bit for bit, in a tensor of their own or in slots."""
    lengths = LENGTHS["lengths"]
    case = Case(**SIZES, **LENGTHS)
    arguments = make_arguments(case, pool_dtype)
    arguments["state_indices"][3] = -1  # a whole checkpoint and no more, and nobody's
    offsets, of_tokens = arguments["cu_seqlens"].tolist(), ("q", "k", "v", "g", "beta")
    expected = []  # (sequence, how many before it, state)
    for n, length in enumerate(lengths):
        for j in range(length // every):
            rows = slice(offsets[n], offsets[n] + (j + 1) * every)
            short = {name: arguments[name][:, rows] for name in of_tokens} | {"cu_seqlens": None}
            slot = arguments["state_indices"][n : n + 1].long().clamp_min(0)
            expected.append((n, j, by_hand(arguments | short, slot)[1][0]))
    before = arguments["state_pool"].clone()
    _, finals = by_hand(arguments, arguments["state_indices"].long().clamp_min(0))

    rows = torch.full((len(expected) + 2, *before.shape[1:]), 7.0, dtype=pool_dtype)
    prefill_gated_delta_rule(**arguments, checkpoint_every=every, checkpoints=rows)
    for row, (n, _, state) in zip(rows, expected, strict=False):
        assert torch.equal(row, torch.full_like(row, 7.0) if n == 3 else state)
    assert (rows[len(expected) :] == 7).all()

    table = torch.full((6, 3), -1)  # too few columns for the last sequence with every = 64
    free = iter(sorted(set(range(SLOTS)) - set(arguments["state_indices"].tolist())))
    for n, j, _ in expected:
        if j < 3 and (n, j) != (2, 0):
            table[n, j] = next(free)
    arguments["state_pool"] = before.clone()
    prefill_gated_delta_rule(**arguments, checkpoint_every=every, checkpoint_indices=table)
    wanted = before.clone()
    for n, slot in enumerate(arguments["state_indices"].tolist()):
        if slot >= 0:
            wanted[slot] = finals[n]
    for n, j, state in expected:
        if n != 3 and j < 3 and table[n, j] >= 0:
            wanted[table[n, j]] = state
    assert torch.equal(arguments["state_pool"], wanted)


def registered_arguments(name: str) -> dict:
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)))
    if name == "checkpoints":
        arguments |= {"checkpoint_every": 64, "checkpoints": torch.zeros(1, *arguments["state_pool"].shape[1:])}
        arguments["has_initial_state"] = torch.tensor([True, False])
    if name == "in slots":
        arguments |= {"checkpoint_every": 64, "checkpoint_indices": torch.tensor([[0], [-1]])}
        arguments["state_indices"] = torch.tensor([1, 2])
    return arguments


NAMES = ("plain", "checkpoints", "in slots")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(torch.ops.flash_qla.prefill_gated_delta_rule.default, (), registered_arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_compile(name):
    """In one graph, and the pool is written in place."""
    torch._dynamo.reset()
    compiled = torch.compile(prefill_gated_delta_rule, fullgraph=True, backend="aot_eager")
    arguments, others = registered_arguments(name), registered_arguments(name)
    assert torch.equal(compiled(**arguments), prefill_gated_delta_rule(**others))
    for written in ("state_pool", "checkpoints"):
        if written in arguments:
            assert torch.equal(arguments[written], others[written])


def indices(*numbers, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


POOL = torch.zeros(4, 4, 24, 16)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"q": torch.zeros(1, 73, 2, 8)}, ("k has shape", "[1, 73, 2, 8]")),
        ({"state_pool": POOL.transpose(2, 3).contiguous()}, ("state_pool has shape", "V = 24", "K = 16")),
        ({"state_pool": POOL[..., ::2, :].repeat_interleave(2, 2).transpose(1, 2)}, ("state_pool has",)),
        ({"state_pool": POOL.long()}, ("state_pool has dtype int64",)),
        ({"state_indices": indices(1)}, ("state_indices has 1 rows", "2")),
        ({"state_indices": indices(1, 2, dtype=FP32)}, ("state_indices has dtype float32", "int32 or int64")),
        ({"has_initial_state": indices(1, 0)}, ("has_initial_state has dtype int32", "bool")),
        ({"has_initial_state": torch.tensor([True])}, ("has_initial_state has shape [1]", "[2]")),
        ({"checkpoint_every": 32}, ("checkpoint_every is 32", "a multiple of 64")),
        ({"checkpoint_every": 64}, ("checkpoint_every is 64", "one of them")),
        ({"checkpoints": POOL}, ("checkpoint_indices or checkpoints", "None")),
        ({"checkpoint_every": 64, "checkpoints": POOL[0]}, ("checkpoints has 3 dimensions", "4")),
        ({"checkpoint_every": 64, "checkpoint_indices": indices(1, 2)}, ("checkpoint_indices has 1 dimensions",)),
        ({"use_gate_in_kernel": True}, ("A_log is None",)),
        ({"state_indices": indices(1, SLOTS)}, (f"state_indices[1] is {SLOTS}", f"0 to {SLOTS - 1}")),
        ({"state_indices": indices(5, 5)}, ("state_indices[1] is 5", "written already")),
        (
            {"state_indices": indices(5, 6), "checkpoint_every": 64, "checkpoint_indices": indices(5, 1).reshape(2, 1)},
            ("checkpoint_indices[0, 0] is 5", "written already"),
        ),
        ({"checkpoint_every": 64, "checkpoints": POOL[:0]}, ("number of a state of checkpoints is 0",)),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else "",
)
def test_errors(change, texts):
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)))
    before = arguments["state_pool"].clone()
    with pytest.raises(RuntimeError, match=".*".join(map(re.escape, texts))):
        prefill_gated_delta_rule(**arguments | change)
    assert torch.equal(arguments["state_pool"], before)


@pytest.mark.gpu
def test_on_the_gpu():
    arguments = make_arguments(Case(**SIZES | {"dtype": BF16, "K": 128, "V": 128}, lengths=(70, 3)))
    arguments = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match="not supported on the GPU yet"):
        prefill_gated_delta_rule(**arguments)
