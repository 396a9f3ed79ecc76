"""The promises of every op: a sequence's results have the same bits for all contents of the other sequences, at every
place in a batch, and in every process. docs/determinism.md lists what is promised."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from cases import ALL_INSIDE, as_slices, backward_mode, equal, forward_mode, restride
from every_op import (
    BY_TOKEN,
    CONVOLUTIONS,
    NAMES,
    OF_ALL,
    SLOTS,
    WITH_POOL,
    at_offset,
    make_call,
    names_of_arguments,
    op_of,
)
from subprocesses import run_python

DTYPES = (torch.bfloat16, torch.float16)
# Numbers of a dtype that spread, overflow or vanish
HOSTILE_VALUES = {
    "nan": lambda dtype: float("nan"),
    "inf": lambda dtype: float("inf"),
    "minus inf": lambda dtype: -float("inf"),
    "largest": lambda dtype: torch.finfo(dtype).max,
    "denormal": lambda dtype: torch.finfo(dtype).smallest_normal / 2,
}

every_op = pytest.mark.parametrize("name", NAMES)


def assert_same_parts(call, actual: dict, expected: dict, sequences):
    """The same bits of these sequences, by their numbers in both."""
    assert actual.keys() == expected.keys()
    for of, x in actual.items():
        for n in sequences:
            part = call.part(of, x, n)
            assert part is None or torch.equal(part, call.part(of, expected[of], n)), (of, n)


INTERMEDIATES = ("intermediate_states", "intermediate_windows")


@every_op
def test_results_are_finite(device, name):
    """The table of calls has every op, and each result differs from what was there."""
    call = make_call(name, device)
    results = call()
    assert results and all(x.isfinite().all() and x.any() for x in results.values())
    for written in ("state_pool", "checkpoints", "window_pool", "window_checkpoints", *INTERMEDIATES):
        if written in results:
            assert not torch.equal(results[written], call.arguments[written])


@every_op
@pytest.mark.parametrize("kind", HOSTILE_VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_sequences_keep_their_bits(device, name, kind, dtype):
    """One sequence has this number in every argument, its states and gates among them."""
    call = make_call(name, device, dtype=dtype)
    expected = call()
    for bad in (1, 3):
        dirty = make_call(name, device, dtype=dtype)
        for argument, x in dirty.arguments.items():
            if torch.is_tensor(x) and x.is_floating_point():
                part = dirty.part(argument, x, bad)
                if part is not None:
                    part.fill_(HOSTILE_VALUES[kind](x.dtype))
        actual = dirty()
        assert_same_parts(call, actual, expected, [n for n in range(4) if n != bad])
        if kind == "nan":
            assert all(
                dirty.part(of, x, bad).isnan().all() for of, x in actual.items() if of in ("o", "dv", "maps", "y", "dx")
            )


IN_PLACE = ("state_pool", "checkpoints", "intermediate_states", "d_cache", "k_cache")
OFFSETS = (1, 2, 3, 4, 8)  # elements


def at_offsets(call, elements: int, device: str):
    """Every tensor of the call at this storage offset. States that are written where they lie begin at multiples of 16
    bytes on a GPU."""
    moved = dict(call.arguments)
    for argument, x in call.arguments.items():
        if torch.is_tensor(x):
            may_move = device == "cpu" or argument not in IN_PLACE or elements * x.element_size() % 16 == 0
            moved[argument] = at_offset(x, elements if may_move else 0)
            assert moved[argument].storage_offset() == (elements if may_move else 0)
    return dataclasses.replace(call, arguments=moved)


@pytest.mark.usefixtures("errors_change_nothing")
@every_op
def test_none_for_a_tensor(device, name):
    """By the dispatcher, which takes it for any tensor."""
    op = op_of(name)
    schema = op._schema.arguments
    arguments = {x: value for x, value in make_call(name, device).arguments.items() if x in {y.name for y in schema}}
    for argument in (x.name for x in schema if str(x.type) == "Tensor"):
        with pytest.raises(RuntimeError, match=f"flash_qla::{name}: {argument} is None, expected a tensor"):
            op(**arguments | {argument: None})


@every_op
@pytest.mark.parametrize("inside", (False, True), ids=("ready", "inside"))
def test_any_storage_offset(device, name, inside):
    """The same bits, wherever tensors begin in their storage, in both layouts of states. (In the emulator loads of
    vectors are checked, too.)"""
    raw = {"g_dtype": torch.bfloat16, "beta_dtype": torch.float16, "A_log": torch.bfloat16, "dt_bias": torch.float16}
    options = ALL_INSIDE | raw if inside else {}
    for layout in ({"state_v_first": True}, {}) if "state_v_first" in names_of_arguments(name) else ({},):
        call = make_call(name, device, **options, **layout)
        expected = call()
        for elements in OFFSETS:
            assert equal(at_offsets(call, elements, device)(), expected), (layout, elements)


# Layouts of tokens

LAYOUTS = {
    "slices": as_slices,
    "gaps": lambda tensors: [restride(x, "gaps", number) for number, x in enumerate(tensors)],
    "an odd start": lambda tensors: [restride(x, "odd_start", number) for number, x in enumerate(tensors)],
    "heads first": lambda tensors: [restride(x, "heads_first") for x in tensors],
    "tokens innermost": lambda tensors: [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in tensors],
    "tokens innermost, heads apart": lambda tensors: [
        torch.nn.functional.pad(x, (0, 8)).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[..., :-8]
        for x in tensors
    ],
    "tokens first": lambda tensors: [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors],
    "part of a batch": lambda tensors: [restride(x, "part_of_batch") for x in tensors],
    "every third element": lambda tensors: [restride(x, "every_third") for x in tensors],
    "one for all": lambda tensors: [x[:, :, :1].expand_as(x) for x in tensors],
}


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", ({}, ALL_INSIDE, {"K": 192}), ids=("ready", "inside", "K=192"))
def test_any_layout(device, name, layout, options):
    """The same bits, in whatever layout tokens come."""
    narrow = name.endswith(("_buffered", "decode_gated_delta_net"))
    if device == "cuda" and narrow and options.get("K", 0) > 128:
        pytest.skip("K is at most 128 there on a GPU")
    call = make_call(name, device, **options)
    names = [x for x in ("q", "k", "v", "do", "o", "z", "dy") if x in call.arguments and call.arguments[x].dim() == 4]
    if not names:
        pytest.skip(f"{name} takes one tensor")
    tensors = dict(zip(names, LAYOUTS[layout]([call.arguments[x] for x in names]), strict=True))
    contiguous = {x: y.contiguous() for x, y in tensors.items()}
    expected = dataclasses.replace(call, arguments=call.arguments | contiguous)()
    assert equal(dataclasses.replace(call, arguments=call.arguments | tensors)(), expected)


@every_op
@pytest.mark.parametrize("options", ({}, ALL_INSIDE), ids=("ready", "inside"))
def test_any_strides(device, name, options):
    """The same bits, though no two neighbours of any tensor that is read lie side by side: weights, windows, gates,
    states, tables and flags too."""
    call = make_call(name, device, **options)
    if "has_initial_state" in names_of_arguments(name):
        call.arguments["has_initial_state"] = torch.tensor([True, False, True, True], device=device)
    read = {x: y for x, y in call.arguments.items() if torch.is_tensor(y) and x not in {*IN_PLACE, "g_cache"}}
    strided = {x: y.repeat_interleave(3, -1).roll(1)[..., 1::3] for x, y in read.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    assert equal(dataclasses.replace(call, arguments=call.arguments | strided)(), call())


@pytest.mark.parametrize("name", [x for x in NAMES if "checkpoint_indices" in names_of_arguments(x)])
def test_any_strides_of_checkpoint_indices(device, name):
    """A table of two columns, next to each other or not."""
    results = []
    for columns in (slice(0, 2), slice(0, 4, 2)):
        call = make_call(name, device)
        call.arguments = {x: y for x, y in call.arguments.items() if x not in ("checkpoints", "window_checkpoints")}
        slots = torch.full((4, 4), -1)
        slots[:, columns] = torch.tensor([[1, 2], [4, -1], [-1, -1], [6, 8]])
        call.arguments["checkpoint_indices"] = slots.to(device)[:, columns]
        results.append(call())
    assert equal(*results)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted({*WITH_POOL} - {*CONVOLUTIONS}))
def test_states_between_pieces_are_refused(name):
    """States in place are not copied, so on a GPU they must begin at multiples of 16 bytes."""
    call = make_call(name, "cuda")
    for argument in IN_PLACE:
        if argument in call.arguments:
            moved = {argument: at_offset(call.arguments[argument], 1)}
            with pytest.raises(RuntimeError, match=rf"{argument} has \w+ that do not start at multiples of 16"):
                dataclasses.replace(call, arguments=call.arguments | moved)()


@every_op
def test_order_of_a_batch(device, name):
    check_order_of_a_batch(make_call(name, device))


@pytest.mark.gpu
@every_op
@pytest.mark.parametrize("mode", ((64, 1), (128, 2), (128, 0, 0), (128, 0, 1)), ids=str)
def test_order_of_a_batch_in_every_mode(name, mode):
    """(value_tile, segment_chunks, perhaps fused); segments of the backward too."""
    with forward_mode(*mode), backward_mode(mode[1]):
        check_order_of_a_batch(make_call(name, "cuda"))


def check_order_of_a_batch(call):
    """A sequence's bits do not depend on its place. (Sums over the sequences do: dA_log, ddt_bias.)"""
    expected = call()
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        other = call.permuted(order)
        actual = other()
        for of, x in actual.items():
            for position, n in enumerate(order):
                part = other.part(of, x, position)
                assert of in OF_ALL or torch.equal(part, call.part(of, expected[of], n)), (of, n)


@every_op
@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16), ids=str)
def test_sequences_by_themselves(device, name, state_dtype):
    """The bits are the same in any batch on the CPU, and for decoding on the GPU."""
    if device == "cuda" and not name.startswith("decode"):
        pytest.skip("on a GPU kernels are chosen by the shapes of a batch")
    call = make_call(name, device, state_dtype=state_dtype)
    expected = call()
    for n in range(4):
        alone = call.permuted([n])
        for of, x in alone().items():
            if of in OF_ALL or (of in ("state_pool", "window_pool") and not call.lengths[n]):
                continue
            part, expected_part = alone.part(of, x, 0), call.part(of, expected[of], n)
            assert torch.equal(part, expected_part), (of, n)


@every_op
@pytest.mark.parametrize("options", ({}, ALL_INSIDE | {"g_dtype": torch.bfloat16}), ids=("ready", "raw"))
def test_any_number_of_cpu_threads(name, options):
    call = make_call(name, "cpu", H_k=2, H_v=6, **options)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    assert equal(*results)


@pytest.mark.gpu
@every_op
def test_a_graph_is_replayed_with_other_numbers(name):
    """Captured once: the device reads lengths, slots and positions in each replay."""
    call = make_call(name, "cuda")
    other = make_call(name, "cuda", seed=1)
    if "map_sequences" not in call.arguments:  # which the host reads
        other = other.permuted((3, 1, 0, 2))
    buffers = {x: y.clone() for x, y in call.arguments.items() if torch.is_tensor(y)}
    captured = dataclasses.replace(call, arguments=call.arguments | buffers)
    captured()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured()
    for then in (other, call):
        for x, y in buffers.items():
            y.copy_(then.arguments[x])
        for x in results.values():
            x.fill_(torch.nan)
        graph.replay()
        assert equal(results, then())


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_POOL)
@pytest.mark.parametrize(
    ("outside", "dtype"),
    (((SLOTS, -7), torch.int32), ((2**31 - 1, -(2**31)), torch.int32), ((2**40, -(2**62)), torch.int64)),
    ids=str,
)
def test_slots_outside_are_no_slots(name, outside, dtype):
    """Where the host does not look. (compute-sanitizer sees to it that nothing outside is touched.)"""
    call = make_call(name, "cuda")
    expected = call()
    slots = call.arguments["state_indices"].to(dtype, copy=True)
    slots[0], slots[3] = outside
    bad = dataclasses.replace(call, arguments=call.arguments | {"state_indices": slots})
    actual = bad()
    of = "y" if "y" in actual else "o"
    assert torch.equal(call.part(of, actual[of], 1), call.part(of, expected[of], 1))
    if name in CONVOLUTIONS:  # which starts from zeros
        flags = torch.tensor([n in (1, 2) for n in range(4)], device="cuda")
        from_zeros = dataclasses.replace(call, arguments=call.arguments | {"has_initial_state": flags})
        assert torch.equal(actual[of], from_zeros()[of])
    else:
        assert not call.part(of, actual[of], 0).any() and not call.part(of, actual[of], 3).any()
    for pool in {"state_pool", "window_pool"} & actual.keys():
        written = call.arguments[pool].clone()
        for slot in slots[1:3]:
            written[slot] = expected[pool][slot]
        assert torch.equal(actual[pool], written)
    assert_same_parts(call, call(), expected, range(4))


def test_the_parts_are_all_there_is():
    """So that nothing of a result is compared with nothing."""
    call = make_call("chunk_gated_delta_rule_bwd", "cpu", **ALL_INSIDE)
    results = call()
    assert results.keys() == {"dq", "dk", "dv", "db", "dg", "dh0", "dA_log", "ddt_bias"}
    for of, x in results.items():
        parts = [call.part(of, x, n) for n in range(4)]
        if of in OF_ALL:
            assert parts == [None] * 4
        else:
            assert torch.equal(torch.cat(parts, 1 if of in BY_TOKEN else 0), x)


def digests(device: str) -> dict[str, str]:
    """The results of every op."""
    hashes = {}
    for name in NAMES:
        try:
            results = make_call(name, device)()
        except pytest.skip.Exception:
            continue
        data = b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for _, x in sorted(results.items()))
        hashes[name] = hashlib.sha256(data).hexdigest()
    return hashes


def test_every_process_has_the_same_bits(device, request):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from flash_qla.testing import forced_dispatch
from test_every_op import digests
with forced_dispatch(kernels={request.config.getoption("--kernels")!r}):
    print(digests({device!r}))
"""
    expected = digests(device)
    assert {"chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "decode_gated_delta_rule"} <= expected.keys()
    assert run_python(code, FLASH_QLA_QUIET="1").strip() == str(expected)
