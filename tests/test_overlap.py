"""An op refuses to write what overlaps itself or another argument, and has then changed nothing."""

import ctypes
import itertools
import random
import threading

import pytest
import torch
from every_op import op_of
from test_mutation import WRITES, arguments_of
from unchanged import side_by_side

import flash_qla

pytestmark = pytest.mark.usefixtures("errors_change_nothing")
WRITING = [name for name, written in WRITES.items() if written]


@pytest.mark.parametrize("name", WRITING)
def test_every_pair_of_arguments(device, name):
    """Each tensor that is written shares its last bytes, or none, with the first of each other tensor."""
    arguments = arguments_of(name, device)
    tensors = [x for x, y in arguments.items() if torch.is_tensor(y) and y.numel() > 0]
    written = [x for x in WRITES[name] if x in tensors]
    assert written or name.startswith("gated")  # the CPU's workspace has no bytes
    fresh = {x: arguments[x].clone() for x in WRITES[name] if x in arguments}
    for x, other in itertools.permutations(tensors, 2):
        if x not in written:
            continue
        if other == tensors[0]:
            apart = dict(zip((x, other), side_by_side(arguments[x], arguments[other], 0), strict=True))
            op_of(name)(**arguments | fresh | apart)
        shared = dict(zip((x, other), side_by_side(arguments[x], arguments[other], 16), strict=True))
        one_way, other_way = f"{x} shares memory with {other}, expected", f"{other} shares memory with {x}, expected"
        with pytest.raises(RuntimeError, match=f"flash_qla::{name}: ({one_way}|{other_way})"):
            op_of(name)(**arguments | fresh | shared)


@pytest.mark.parametrize("name", WRITING)
def test_elements_that_overlap(device, name):
    arguments = arguments_of(name, device)
    for x in WRITES[name]:
        if x not in arguments or arguments[x].numel() < 2:
            continue
        along = next(i for i, size in enumerate(arguments[x].shape) if size > 1)
        expanded = arguments[x].narrow(along, 0, 1).clone().expand_as(arguments[x])
        windows = list(arguments[x].contiguous().stride())
        windows[along] -= 1
        for overlapping in (expanded, arguments[x].clone().as_strided(arguments[x].shape, windows)):
            with pytest.raises(RuntimeError, match=rf"{name}: {x} has shape .* and strides .* do not overlap"):
                op_of(name)(**arguments | {x: overlapping})


@pytest.mark.parametrize("name", [x for x in WRITING if "state_pool" in WRITES[x]])
def test_part_of_a_lazy_clone(device, name):
    """What is written gets memory of its own first, which its views share."""
    arguments = arguments_of(name, device)
    pool = torch._lazy_clone(arguments["state_pool"])
    other = next(x for x in ("b", "beta", "bias") if x in arguments)
    part = pool.view(-1)[: arguments[other].numel()].view(arguments[other].shape)
    with pytest.raises(RuntimeError, match=f"{name}: state_pool shares memory with {other}, expected"):
        op_of(name)(**arguments | {"state_pool": pool, other: part})


def addresses(x: torch.Tensor) -> list[int]:
    indices = itertools.product(*map(range, x.shape))
    return [x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True)) for index in indices]


def test_any_strides():
    """Of 1000 layouts of `out` beside v in one memory, exactly those are refused that share an element."""
    generator = random.Random(7)
    counts = {"own": 0, "itself": 0, "v": 0}
    memory = torch.randn(200)
    for _ in range(1000):
        shape = [generator.randint(1, 4), 1, generator.randint(1, 3), generator.randint(1, 4)]
        strides = [[generator.choice((0, 1, 2, 3, 5, 8, 12, 20)) for _ in shape] for _ in range(2)]
        v, out = (memory.as_strided(shape, x, generator.randrange(40)) for x in strides)
        addresses_of_out = addresses(out)
        expected = "own"
        if {*addresses_of_out} & {*addresses(v)}:
            expected = "v"
        if len({*addresses_of_out}) < len(addresses_of_out):
            expected = "itself"
        counts[expected] += 1
        q, gates = torch.randn(shape[0], 1, 1, 8), torch.randn(shape[0], 1, shape[2])
        pool = torch.zeros(shape[0], shape[2], shape[3], 8)
        actual = "own"
        try:
            flash_qla.decode_gated_delta_rule(q, q, v, gates, gates.sigmoid(), None, None, pool, out=out)
        except RuntimeError as error:
            actual = (
                "v" if "shares memory with v" in str(error) else "itself" if "do not overlap" in str(error) else error
            )
        assert actual == expected, (shape, v.stride(), v.storage_offset(), out.stride(), out.storage_offset())
    assert min(counts.values()) > 100, counts


def test_states_and_windows_in_one_page(device):
    """Pages of an engine hold the state of a request and what else belongs to it, at one stride."""
    expected = arguments_of("decode_gated_delta_rule_buffered", device)
    names = ("state_pool", "d_cache", "k_cache", "g_cache")
    sizes = [-(-expected[x][0].numel() // 4) * 4 for x in names]
    pages = torch.zeros(len(expected["state_pool"]), sum(sizes), device=device)
    paged, start = {}, 0
    for x, size in zip(names, sizes, strict=True):
        slots = pages[:, start : start + expected[x][0].numel()]
        paged[x] = slots.unflatten(1, expected[x].shape[1:]).copy_(expected[x])
        start += size
    o = op_of("decode_gated_delta_rule_buffered")(**expected)
    assert torch.equal(op_of("decode_gated_delta_rule_buffered")(**expected | paged), o)
    for x in names:
        assert torch.equal(paged[x], expected[x])


# Autograd, which notes after the call what has been written


def of_several(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x)).unbind(0)[1]


def view_of_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.clone()[:]


def view_of_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


REFUSED = {
    "several": (of_several, "one of several"),
    "no_grad": (view_of_no_grad, "made in no_grad mode"),
    "inference": (view_of_inference, "an inference tensor"),
    "leaf": (lambda x: x.clone().requires_grad_(), "leaf"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", WRITING)
def test_what_autograd_does_not_follow(device, name, kind):
    make, text = REFUSED[kind]
    arguments = arguments_of(name, device)
    needs_gradient = next(x for x in arguments if x not in WRITES[name] and arguments[x].is_floating_point())
    arguments[needs_gradient] = arguments[needs_gradient].clone().requires_grad_()
    for x in WRITES[name]:
        if x in arguments and arguments[x].is_floating_point():
            with pytest.raises(RuntimeError, match=f"flash_qla::{name}: .*{text}"):
                op_of(name)(**arguments | {x: make(arguments[x])})


# Exceptions


class Globals(ctypes.Structure):
    """__cxa_eh_globals of the C++ ABI."""

    _fields_ = (("caught", ctypes.c_void_p), ("uncaught", ctypes.c_uint))


def uncaught_exceptions() -> int:
    """std::uncaught_exceptions() of this thread, for the libraries that share the process's libstdc++."""
    function = ctypes.CDLL("libstdc++.so.6").__cxa_get_globals
    function.restype = ctypes.POINTER(Globals)
    return function().contents.uncaught


@pytest.mark.parametrize("name", [*WRITES])
def test_no_exception_stays_in_flight(device, name):
    arguments = arguments_of(name, device)
    counts = []

    def raise_several():
        for x in ("k", "v", "mixed_qkv", "x", "z", "mixed"):
            if x in arguments:
                with pytest.raises(RuntimeError, match=f"flash_qla::{name}:"):
                    op_of(name)(**arguments | {x: arguments[x][..., :-1]})
                counts.append(uncaught_exceptions())

    raise_several()
    thread = threading.Thread(target=raise_several)
    thread.start()
    thread.join()
    assert counts
    assert not any(counts)


def test_no_exception_of_the_module_stays_in_flight():
    C = pytest.importorskip("flash_qla._C")
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        C.forward_dispatch(no_such_field=1)
    assert uncaught_exceptions() == 0
