"""The prefill on a pool of states, against chunk_gated_delta_rule between a gather and a scatter. What only a GPU does
is in test_prefill_gpu.py. The file is long because all tests share a pool and its reference."""

import contextlib
import dataclasses
import itertools
import re

import accuracy
import pytest
import torch
from cases import ALL_INSIDE, Case, forward_mode, make_inputs, on_meta
from poison import poisoned

from flash_qla import (
    chunk_gated_delta_rule,
    prefill_gated_delta_rule,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = accuracy.FLOAT8
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SLOTS = 20
SIZES = {"K": 16, "V": 24, "state_v_first": True, "dtype": FP32}
LENGTHS = {"lengths": (70, 0, 130, 64, 1, 300), "padding": 5}
RAW = {"use_qk_l2norm_in_kernel": True, "keys": "raw"}
# Modes of the GPU's kernels; segments of a chunk, so that most sequences are cut.
MODES = {
    "fused": {"fused": 1, "segment_chunks": 0},
    "narrow": {"value_tile": 64, "segment_chunks": 0},
    "wide": {"value_tile": 128, "segment_chunks": 0},
    "cut": {"value_tile": 64, "segment_chunks": 1},
    "fused_segments": {"value_tile": 128, "segment_chunks": 1, "fused": 1},
}
WIDE_KEYS = {"wide_keys": MODES["wide"]}  # these modes also have other sizes


def in_mode(device: str, mode: str):
    return forward_mode(**(MODES | WIDE_KEYS)[mode]) if device == "cuda" else contextlib.nullcontext()


def sizes_in(mode: str, pool_dtype: torch.dtype = FP32) -> dict:
    K = 144 if pool_dtype.itemsize == 1 else 136  # states of 8 bits have pieces of 16 channels
    return SIZES | ({"K": K, "V": 136} if mode in WIDE_KEYS else {})


def of_modes(*modes: str):
    """Runs a test once on the CPU, which has no modes, and in each on the GPU."""
    values = [("cpu", ""), *(pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in modes)]
    return pytest.mark.parametrize(("device", "mode"), values)


def for_device(case: Case, device: str) -> Case:
    """The nearest case for a GPU, which takes 16-bit tokens."""
    dtype = case.dtype if device == "cpu" or case.dtype == FP16 else BF16
    return dataclasses.replace(case, dtype=dtype)


def make_pool(case: Case, dtype: torch.dtype, gap: int, device: str) -> torch.Tensor:
    """Slots [H_v, V, K], between slots of other sequences, and with NaN between all of them."""
    generator = torch.Generator().manual_seed(3)
    size = case.H_v * case.V * case.K
    rows = torch.full((SLOTS + 2, size + gap), float("nan"), dtype=dtype)
    rows[:, :size] = torch.randn(SLOTS + 2, size, generator=generator).to(dtype)
    return rows.to(device)[1:-1, :size].unflatten(1, (case.H_v, case.V, case.K))


def copied(pool: torch.Tensor) -> torch.Tensor:
    """A copy of the pool with the memory around it."""
    return pool._base.clone().as_strided(pool.shape, pool.stride(), pool.storage_offset())


def check_pool(pool: torch.Tensor, before: torch.Tensor, written: dict[int, torch.Tensor]) -> None:
    """Asserts that these slots of the pool, and no memory around them, were written, with these bits."""
    expected = copied(before)
    for slot, state in written.items():
        expected[slot] = state
    bits = BITS[pool.element_size()]
    assert torch.equal(pool._base.view(bits), expected._base.view(bits))


def make_arguments(
    case: Case, pool_dtype: torch.dtype = FP32, gap: int = 0, index_dtype=torch.int32, device: str = "cpu"
) -> dict:
    """The arguments of the prefill."""
    if device == "cuda":
        case, gap = for_device(case, device), gap // 16 * 16
        pool_dtype = FP32 if pool_dtype == FP64 else pool_dtype
    inputs = make_inputs(case, device)
    for name in ("initial_state", "state_v_first", "auto_cp"):
        del inputs[name]
    N = case.B if case.lengths is None else len(case.lengths)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[:N]
    pool = make_pool(case, pool_dtype, gap, device)
    return inputs | {"state_pool": pool, "state_indices": slots.to(device, index_dtype)}


def by_hand(arguments: dict) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """o, which is zero without a slot, and the final states by slot, of a call without the rest of the pool."""
    others = ("state_pool", "state_indices", "initial_state_indices", "has_initial_state", "null_index", "out")
    inputs = {name: x for name, x in arguments.items() if name not in others and "checkpoint" not in name}
    pool, slots = arguments["state_pool"], arguments["state_indices"].long()
    null = arguments.get("null_index", -1)
    first, is_real = arguments.get("initial_state_indices", slots).long(), slots > null
    states, dtype = pool[first.clamp_min(0)], pool.dtype
    if dtype in accuracy.FLOAT8:
        states, dtype = states.float(), FP32
    states = torch.where((first > null)[:, None, None, None], states, 0)
    if arguments.get("has_initial_state") is not None:
        states = torch.where(arguments["has_initial_state"][:, None, None, None], states, 0)
    o, finals = chunk_gated_delta_rule(
        **inputs, initial_state=states, output_final_state=True, state_v_first=True, state_dtype=dtype
    )
    if dtype != pool.dtype:
        finals = accuracy.to_float8(finals, pool.dtype)
    for n, real in enumerate(is_real.tolist()):
        if not real:
            rows(arguments, o, n).zero_()
    slots, is_real = slots.tolist(), is_real.tolist()
    return o, {slot: state for slot, state, real in zip(slots, finals, is_real, strict=True) if real}


def rows(arguments: dict, x: torch.Tensor, n: int) -> torch.Tensor:
    """A sequence's."""
    if arguments["cu_seqlens"] is None:
        return x[n : n + 1]
    offsets = arguments["cu_seqlens"].tolist()
    return x[:, offsets[n] : offsets[n + 1]]


def can_fuse(pool_dtype: torch.dtype) -> bool:
    """Whether the fused kernel takes the pool, and so may run in the place of the two kernels, with other bits."""
    return pool_dtype not in accuracy.FLOAT8


def check_by_hand(arguments: dict, device: str) -> None:
    """The same bits; what no sequence has is left alone."""
    before = copied(arguments["state_pool"])
    expected, states = by_hand(arguments)
    with poisoned(device):
        o = prefill_gated_delta_rule(**arguments)
    assert o.is_contiguous() and torch.equal(o, expected)
    check_pool(arguments["state_pool"], before, states)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool_dtype", (FP32, BF16, FP16, E4M3, E5M2), ids=str)
@pytest.mark.parametrize(("K", "V"), ((128, 128), (64, 64), (96, 192), (256, 256), (136, 64)), ids=str)
def test_kernels(mode, pool_dtype, K, V):
    """Each, with everything that the op has of its own."""
    if mode in ("fused", "fused_segments") and not can_fuse(pool_dtype):
        pytest.skip("the fused kernel takes no states of 8 bits")
    if mode == "fused" and K > 128:
        pytest.skip("the fused kernel has keys of up to 128 channels")
    if K > 128 and MODES[mode].get("value_tile") == 64:
        pytest.skip("wide keys have one value tile")
    if pool_dtype in accuracy.FLOAT8:
        K = -(-K // 16) * 16
    case = Case(**SIZES | {"K": K, "V": V, "dtype": BF16}, **LENGTHS, **RAW, **ALL_INSIDE, g_dtype=BF16)
    arguments = make_arguments(case, pool_dtype, gap=16, device="cuda")
    arguments["state_indices"][2] = -1
    arguments["has_initial_state"] = torch.tensor([True, False, True, False, True, True], device="cuda")
    with in_mode("cuda", mode):
        check_by_hand(arguments, "cuda")


@of_modes("fused", "narrow", "wide", *WIDE_KEYS)
@pytest.mark.parametrize("pool_dtype", (FP32, BF16, E4M3), ids=str)
@pytest.mark.parametrize("every", (64, 128, 16, 80))
def test_checkpoints(device, mode, every, pool_dtype):
    """The states of shorter prefills, bit for bit, in a tensor of their own or in slots."""
    if mode == "fused" and not can_fuse(pool_dtype):
        pytest.skip("the fused kernel takes no states of 8 bits")
    with in_mode(device, mode):
        check_checkpoints(device, sizes_in(mode, pool_dtype), every, pool_dtype, torch.equal)


@pytest.mark.gpu
def test_checkpoints_of_segments():
    def are_near(x, y):
        return not y.any() or accuracy.relative_error(x, y.double()) < accuracy.BF16_BAR

    with in_mode("cuda", "cut"):
        check_checkpoints("cuda", SIZES, 128, FP32, are_near)


@pytest.mark.parametrize("every", (65, 128, 130, 2**31 - 64))
def test_checkpoints_of_longer_sequences(device, every):
    """Those that no sequence is long enough for: their rows and slots stay as they are."""
    arguments = make_arguments(Case(**SIZES, B=3, T=64), device=device)
    before, slots = copied(arguments["state_pool"]), arguments["state_indices"].tolist()
    kept = torch.full((3, *before.shape[1:]), 7.0, device=device)
    unused = torch.tensor(sorted({*range(SLOTS)} - {*slots})[:3], device=device)
    for checkpoints in ({"checkpoints": kept}, {"checkpoint_indices": unused[:, None]}):
        arguments["state_pool"] = pool = copied(before)
        prefill_gated_delta_rule(**arguments, checkpoint_every=every, **checkpoints)
        check_pool(pool, before, {slot: pool[slot] for slot in slots})
    assert (kept == 7).all()


def check_checkpoints(device: str, sizes: dict, every: int, pool_dtype: torch.dtype, is_right) -> None:
    """`is_right` compares states with those of shorter prefills."""
    case = Case(**sizes, lengths=(70, 0, 130, 64, 1, 300, 128), padding=5)  # the last one ends with a checkpoint
    arguments = make_arguments(case, pool_dtype, gap=16, device=device)
    arguments["state_indices"][3] = -1  # a whole checkpoint and no more, without a slot
    before, of_tokens = copied(arguments["state_pool"]), ("q", "k", "v", "g", "beta")
    slots = arguments["state_indices"].tolist()
    # A checkpoint ends a chunk: this gives shorter prefills the same chunks, and keeps nothing.
    chunks = {"checkpoint_every": every} if every % 64 else {}
    no_slots = torch.zeros(7, 0, dtype=torch.int32, device=device)
    expected = []  # (sequence, how many before it, state)
    for n, length in enumerate(case.lengths):
        for j in range(length // every):
            pool = copied(before)
            short = {name: rows(arguments, arguments[name], n)[:, : (j + 1) * every] for name in of_tokens}
            changed = {"cu_seqlens": None, "state_pool": pool, "state_indices": arguments["state_indices"][n : n + 1]}
            checkpointing = chunks | ({"checkpoint_indices": no_slots[:1]} if chunks else {})
            prefill_gated_delta_rule(**arguments | short | changed | checkpointing)
            expected.append((n, j, pool[slots[n]]))
    finals = by_hand(arguments)[1]
    if chunks:
        pool = copied(before)
        prefill_gated_delta_rule(**arguments | {"state_pool": pool}, **chunks, checkpoint_indices=no_slots)
        finals = {slot: pool[slot] for slot in finals}

    kept = torch.full((len(expected) + 2, *before.shape[1:]), 7.0, dtype=pool_dtype, device=device)
    prefill_gated_delta_rule(**arguments, checkpoint_every=every, checkpoints=kept)
    for row, (n, _, state) in zip(kept, expected, strict=False):
        assert torch.equal(row, torch.full_like(row, 7.0)) if n == 3 else is_right(row, state)
    assert (kept[len(expected) :] == 7).all()

    table = torch.full((7, 3), -1)  # too few columns for the longest sequence with every = 64
    free = iter(sorted(set(range(SLOTS)) - set(slots)))
    for n, j, _ in expected:
        if j < 3 and (n, j) != (2, 0):
            table[n, j] = next(free)
    arguments["state_pool"] = pool = copied(before)
    prefill_gated_delta_rule(**arguments, checkpoint_every=every, checkpoint_indices=table.to(device))
    in_slots = {table[n, j].item(): state for n, j, state in expected if n != 3 and j < 3 and table[n, j] >= 0}
    assert all(is_right(pool[slot], state) for slot, state in in_slots.items())
    check_pool(pool, before, finals | {slot: pool[slot] for slot in in_slots})


@of_modes("fused", "narrow", "wide", "cut", *WIDE_KEYS)
@pytest.mark.parametrize("pool_dtype", (FP32, BF16, FP16, E4M3, E5M2), ids=str)
@pytest.mark.parametrize("every", (64, 128, 80))
def test_a_hit_is_a_miss(device, mode, every, pool_dtype):
    """With batch_invariant, calls that start from checkpoints give the bits of the call that left these: outputs, later
    checkpoints and last states."""
    case = Case(**sizes_in(mode, pool_dtype), lengths=(70, 0, 130, 64, 300, 160), padding=5)
    arguments = make_arguments(case, pool_dtype, device=device)
    of_tokens, N = ("q", "k", "v", "g", "beta"), len(case.lengths)
    most = max(case.lengths) // every
    free = iter(sorted(set(range(SLOTS)) - set(arguments["state_indices"].tolist())))
    table = torch.full((N, most), -1, dtype=torch.int32)
    for n in (2, 4, 5):
        for j in range(case.lengths[n] // every):
            table[n, j] = next(free)
    options = {"batch_invariant": True, "checkpoint_every": every}
    with in_mode(device, mode):
        o = prefill_gated_delta_rule(**arguments, **options, checkpoint_indices=table.to(device))
        after = copied(arguments["state_pool"])
        for j in range(most):
            hits = [n for n in (2, 4, 5) if case.lengths[n] >= (j + 1) * every]
            parts = {x: [rows(arguments, arguments[x], n)[:, (j + 1) * every :] for n in hits] for x in of_tokens}
            offsets = [0, *itertools.accumulate(x.shape[1] for x in parts["q"])]
            call = {name: torch.cat(x, 1) for name, x in parts.items()}
            call |= {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device=device)}
            pool = copied(after)
            last = arguments["state_indices"][hits]
            later = torch.full((len(hits), most), -1, dtype=torch.int32)
            later[:, : most - j - 1] = table[hits, j + 1 :]
            for slot in (*last.tolist(), *later[later >= 0].tolist()):
                pool[slot] = 7
            for n in hits:
                if case.lengths[n] == (j + 1) * every:  # no token is left, so the slot is left alone
                    slot = arguments["state_indices"][n].item()
                    pool[slot] = after[slot]
            call |= {"state_pool": pool, "state_indices": last, "initial_state_indices": table[hits, j].to(device)}
            again = prefill_gated_delta_rule(**arguments | call, **options, checkpoint_indices=later.to(device))
            whole = [rows(arguments, o, n)[:, (j + 1) * every :] for n in hits]
            assert torch.equal(again, torch.cat(whole, 1))
            check_pool(pool, after, {})


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", (32, 40))
def test_about_as_many_as_a_warp_sorts(sequences):
    """The fused kernel's CTAs find their first sequences by themselves, the longest first, if a warp can sort them."""
    lengths = tuple(1 + 37 * n % 70 for n in range(sequences))
    arguments = make_arguments(Case(**SIZES | {"dtype": BF16, "K": 64, "V": 64}, lengths=lengths, H_k=1), device="cuda")
    arguments["state_pool"] = arguments["state_pool"].repeat(3, 1, 1, 1)
    slots = torch.randperm(3 * SLOTS, generator=torch.Generator().manual_seed(0))[:sequences]
    arguments["state_indices"] = slots.cuda()
    pool = arguments["state_pool"].clone()
    with in_mode("cuda", "fused"):
        o = prefill_gated_delta_rule(**arguments)
    expected, states = by_hand(arguments | {"state_pool": pool})
    assert accuracy.relative_error(o, expected.double()) < accuracy.BF16_BAR
    for slot, state in states.items():
        assert accuracy.relative_error(arguments["state_pool"][slot], state.double()) < accuracy.BF16_BAR


@of_modes("fused", "narrow", "wide", "cut", *WIDE_KEYS)
def test_batch_invariance(device, mode):
    """The same bits alone and among others, first and last, with padding and without; whatever the tile, and though
    there are so few heads that the card would want segments."""
    case = Case(**sizes_in(mode), lengths=(70, 3, 200), padding=5, H_v=8)
    arguments = make_arguments(case, device=device)
    before = copied(arguments["state_pool"])
    with in_mode(device, mode):
        o = prefill_gated_delta_rule(**arguments, batch_invariant=True)
    states, slots = copied(arguments["state_pool"]), arguments["state_indices"].long()
    others = make_arguments(Case(**sizes_in(mode), lengths=(1,) * 70, H_v=8), device=device)  # more heads share a CTA
    of_tokens = ("q", "k", "v", "g", "beta")
    for n, length in enumerate(case.lengths):
        alone = {name: rows(arguments, arguments[name], n) for name in of_tokens}
        last = {name: torch.cat([others[name], alone[name], others[name][:, :3]], 1) for name in of_tokens}
        offsets = torch.tensor([0, *range(1, 71), 70 + length, 70 + length], dtype=torch.int32, device=device)
        of_last = torch.cat([torch.full((70,), -1, device=device), slots[n : n + 1], slots[n - 1 : n or None]])
        for call, row, indices in (
            (alone | {"cu_seqlens": None}, 0, slots[n : n + 1]),
            (last | {"cu_seqlens": offsets}, 70, of_last),
        ):
            call |= {"state_pool": copied(before), "state_indices": indices, "batch_invariant": True}
            again = prefill_gated_delta_rule(**arguments | call)
            assert torch.equal(again[:, row : row + length], rows(arguments, o, n))
            assert torch.equal(call["state_pool"][slots[n]], states[slots[n]])


@of_modes("narrow", "wide", *WIDE_KEYS)
def test_the_state_of_the_first_slot_is_not_rounded(device, mode):
    """With batch_invariant only the states at checkpoints are: the tokens before the first one do not depend on the
    checkpoints' dtype."""
    case = Case(**sizes_in(mode), lengths=(130, 300))
    o = []
    for dtype in (FP32, BF16):
        arguments = make_arguments(case, FP32, device=device)
        kept = torch.zeros(3, *arguments["state_pool"].shape[1:], dtype=dtype, device=device)
        with in_mode(device, mode):
            o.append(
                prefill_gated_delta_rule(**arguments, batch_invariant=True, checkpoint_every=128, checkpoints=kept)
            )
    first, other = (torch.cat([x[:, :128], x[:, 130:258]]) for x in o)
    assert torch.equal(first, other) and not torch.equal(*o)


@of_modes(*MODES)
def test_states_of_another_first_slot(device, mode):
    """Sequences start from slots of others, several from one, from their own, or from none, and end in their own."""
    arguments = make_arguments(Case(**SIZES, **LENGTHS), device=device)
    slots = arguments["state_indices"].tolist()
    one, other, *_ = {*range(SLOTS)} - {*slots}
    first = [one, slots[1], other, -1, slots[4], one]  # the second sequence has no tokens
    with in_mode(device, mode):
        check_by_hand(arguments | {"initial_state_indices": torch.tensor(first, device=device)}, device)


@of_modes(*MODES)
def test_no_tokens_and_another_first_slot(device, mode):
    """A sequence without tokens leaves its slot as it is, also if it starts from another one."""
    arguments = make_arguments(Case(**SIZES, lengths=(70, 0, 3)), device=device)
    arguments |= {"state_indices": torch.tensor([1, 4, 2], device=device)}
    before, first = copied(arguments["state_pool"]), {"initial_state_indices": torch.tensor([5, 6, 7], device=device)}
    with in_mode(device, mode):
        prefill_gated_delta_rule(**arguments | first)
    changed = (arguments["state_pool"] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


@of_modes(*MODES)
def test_a_checkpoint_in_the_first_slot(device, mode):
    """A sequence may write the slot that it started from: it has read the state before."""
    case = Case(**SIZES, lengths=(300, 130))
    arguments = make_arguments(case, device=device)
    before, written = copied(arguments["state_pool"]), {"state_indices": torch.tensor([3, 8], device=device)}
    first = {"initial_state_indices": torch.tensor([5, 6], device=device)}
    checkpointing = {"checkpoint_every": 128, "checkpoint_indices": torch.tensor([[5, 2], [-1, -1]], device=device)}
    elsewhere = checkpointing | {"checkpoint_indices": torch.tensor([[1, 2], [-1, -1]], device=device)}
    with in_mode(device, mode):
        expected = arguments | written | first | elsewhere | {"state_pool": copied(before)}
        o = prefill_gated_delta_rule(**expected)
        assert torch.equal(prefill_gated_delta_rule(**arguments | written | first | checkpointing), o)
    states = {slot: expected["state_pool"][slot] for slot in (3, 8, 2)}
    check_pool(arguments["state_pool"], before, states | {5: expected["state_pool"][1]})


def test_h_wants_contiguous_memory():
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)))
    with pytest.raises(RuntimeError, match=r"h has strides .* expected contiguous memory"):
        prefill_gated_delta_rule(**arguments, h=torch.zeros(1, 3, 4, 24, 32)[..., ::2])


def registered_arguments(name: str) -> dict:
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)))
    if name == "checkpoints":
        arguments |= {"checkpoint_every": 64, "checkpoints": torch.zeros(1, *arguments["state_pool"].shape[1:])}
        arguments["has_initial_state"] = torch.tensor([True, False])
    if name == "in slots":
        arguments |= {"checkpoint_every": 64, "checkpoint_indices": torch.tensor([[0], [-1]])}
        arguments["state_indices"] = torch.tensor([1, 2])
    if name == "out":
        arguments["out"] = torch.zeros_like(arguments["v"])
        arguments["initial_state_indices"] = torch.tensor([1, 1])
    if name == "h":
        arguments["h"] = torch.zeros(1, 3, 4, 24, 16)
    return arguments


NAMES = ("plain", "checkpoints", "in slots", "out", "h")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(torch.ops.flash_qla.prefill_gated_delta_rule.default, (), registered_arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_compile(name):
    """The call is one graph, and writes the pool in place."""
    torch._dynamo.reset()
    compiled = torch.compile(prefill_gated_delta_rule, fullgraph=True, backend="aot_eager")
    arguments, others = registered_arguments(name), registered_arguments(name)
    assert torch.equal(compiled(**arguments), prefill_gated_delta_rule(**others))
    for written in ("state_pool", "checkpoints", "out", "h"):
        if written in arguments:
            assert torch.equal(arguments[written], others[written])


def indices(*values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


POOL = torch.zeros(4, 4, 24, 16)


# Errors that a GPU reports with FLASH_QLA_CHECK=1 only
WRONG_CONTENTS = [
    ({"state_indices": indices(1, SLOTS)}, (f"state_indices[1] is {SLOTS}", f"0 to {SLOTS - 1}")),
    ({"state_indices": indices(5, 5)}, ("state_indices[1] is 5", "written already")),
    (
        {"state_indices": indices(5, 6), "checkpoint_every": 64, "checkpoint_indices": indices(5, 1).reshape(2, 1)},
        ("checkpoint_indices[0, 0] is 5", "written already"),
    ),
    (
        {"state_indices": indices(5, 6), "checkpoint_every": 64, "checkpoint_indices": indices(6, 1).reshape(2, 1)},
        ("checkpoint_indices[0, 0] is 6", "written already"),
    ),
    ({"checkpoint_every": 64, "checkpoints": POOL[:0]}, ("number of a state of checkpoints is 0",)),
    ({"initial_state_indices": indices(SLOTS, 1)}, (f"initial_state_indices[0] is {SLOTS}", f"0 to {SLOTS - 1}")),
    (
        {"state_indices": indices(5, 6), "initial_state_indices": indices(6, 6)},
        ("state_indices[1] is 6", "which another sequence reads"),
    ),
    (
        {"state_indices": indices(5, 6), "initial_state_indices": indices(1, 5)},
        ("initial_state_indices[1] is 5", "which sequence 0 writes"),
    ),
]


WRONG_ARGUMENTS = [
    ({"q": torch.zeros(1, 73, 2, 8)}, ("k has shape", "[1, 73, 2, 8]")),
    ({"state_pool": POOL.transpose(2, 3).contiguous()}, ("state_pool has shape", "V = 24", "K = 16")),
    ({"state_pool": POOL[..., ::2, :].repeat_interleave(2, 2).transpose(1, 2)}, ("state_pool has",)),
    ({"state_pool": POOL.long()}, ("state_pool has dtype int64",)),
    ({"state_indices": indices(1)}, ("state_indices has 1 rows", "2")),
    ({"state_indices": indices(1, 2, dtype=FP32)}, ("state_indices has dtype float32", "int32 or int64")),
    ({"initial_state_indices": indices(1)}, ("initial_state_indices has 1 rows", "2")),
    ({"initial_state_indices": indices(1, 2, dtype=FP32)}, ("initial_state_indices has dtype float32",)),
    ({"out": torch.zeros(1, 73, 4, 24, dtype=FP64)}, ("out has dtype float64", "float32, the dtype of q")),
    ({"out": torch.zeros(1, 73, 24, 4)}, ("out has shape [1, 73, 24, 4]", "[1, 73, 4, 24]")),
    ({"h": torch.zeros(1, 3, 4, 24, 16, dtype=FP64)}, ("h has dtype float64", "float32, the dtype of q")),
    ({"h": torch.zeros(1, 3, 4, 16, 24)}, ("h has shape [1, 3, 4, 16, 24]", "[1, 3, 4, 24, 16]")),
    ({"h": torch.zeros(1, 3, 4, 24, 16), "checkpoint_every": 50, "checkpoints": POOL}, ("h is a tensor", "None")),
    ({"has_initial_state": indices(1, 0)}, ("has_initial_state has dtype int32", "bool")),
    ({"has_initial_state": torch.tensor([True])}, ("has_initial_state has shape [1]", "[2]")),
    ({"checkpoint_every": -64}, ("checkpoint_every is -64", "at least 0")),
    ({"checkpoint_every": 64}, ("checkpoint_every is 64", "one of them")),
    ({"checkpoints": POOL}, ("checkpoint_indices or checkpoints", "None")),
    (
        {"checkpoint_every": 64, "checkpoints": POOL, "checkpoint_indices": indices(3, 4).reshape(2, 1)},
        ("checkpoint_every is 64 with 2 of checkpoint_indices and checkpoints", "one of them"),
    ),
    ({"checkpoint_every": 64, "checkpoints": POOL[0]}, ("checkpoints has 3 dimensions", "4")),
    ({"checkpoint_every": 64, "checkpoint_indices": indices(1, 2)}, ("checkpoint_indices has 1 dimensions",)),
    ({"use_gate_in_kernel": True}, ("A_log is None",)),
]


def name_of(x) -> str:
    return "+".join(x) if isinstance(x, dict) else ""


@pytest.mark.parametrize(("change", "texts"), WRONG_ARGUMENTS, ids=name_of)
def test_errors_when_traced(change, texts):
    with pytest.raises(RuntimeError, match=re.escape(texts[0])):
        prefill_gated_delta_rule(**on_meta(make_arguments(Case(**SIZES, lengths=(70, 3))) | change))


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(("change", "texts"), [*WRONG_ARGUMENTS, *WRONG_CONTENTS], ids=name_of)
def test_errors(change, texts):
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)))
    before = copied(arguments["state_pool"])
    with pytest.raises(RuntimeError, match=".*".join(map(re.escape, texts))):
        prefill_gated_delta_rule(**arguments | change)
    check_pool(arguments["state_pool"], before, {})
