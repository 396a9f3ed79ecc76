"""chunk_gated_delta_rule_packed: q, k and v in one tensor, and one gradient of it."""

import dataclasses

import pytest
import torch
from cases import (
    ALL_INSIDE,
    GRADIENT_OF,
    Case,
    equal,
    make_gradients,
    make_inputs,
    on_meta,
    packed,
    parametrize,
    split_gradient,
)
from dispatched import Ran

import flash_qla

SMALL = Case(lengths=(70, 64, 0, 133), padding=7, H_k=1, H_v=2, K=64, V=96, gate="logsigmoid")
CASES = parametrize(
    SMALL,
    Case(B=3, T=65, state_v_first=True, keys="raw", use_qk_l2norm_in_kernel=True, dht=None),
    Case(B=3, T=1, H_v=2, dtype=torch.float16, keys="raw", use_qk_l2norm_in_kernel=True, initial_state=None),
    Case(lengths=(5, 130), K=136, V=200, keys="raw", use_qk_l2norm_in_kernel=True, **ALL_INSIDE),
    Case(B=2, T=130, H_k=1, H_v=3, K=96, V=40, g_dtype=torch.bfloat16, beta_dtype=torch.float16, **ALL_INSIDE),
    Case(B=2, T=0),
)
SPLIT = ("q", "k", "v")


def results(function, arguments: dict, do, dht) -> dict:
    """o, the final state, and the gradients by the names of their tensors."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in arguments.items()
        if torch.is_tensor(x) and x.is_floating_point()
    }
    o, state = function(**arguments | leaves, output_final_state=True)
    torch.autograd.backward((o, state), (do, torch.zeros_like(state) if dht is None else dht.to(state.dtype)))
    return {"o": o.detach(), "final_state": state.detach()} | {name: x.grad for name, x in leaves.items()}


def assert_same(actual: dict, expected: dict, inputs: dict):
    """The same bits. The gradients of q, k and v are parts of that of mixed_qkv."""
    parts = split_gradient(actual.pop("mixed_qkv"), inputs)
    assert equal(actual | {name: parts[GRADIENT_OF[name]] for name in SPLIT}, expected)


@CASES
@pytest.mark.parametrize("wider", (0, 16, 3))
def test_the_same_bits(device, case, wider):
    """As chunk_gated_delta_rule's on q, k and v, forward and backward."""
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    do, dht = gradients["do"], gradients.get("dht")
    expected = results(flash_qla.chunk_gated_delta_rule, inputs, do, dht)
    actual = results(flash_qla.chunk_gated_delta_rule_packed, packed(inputs, wider), do, dht)
    assert actual["mixed_qkv"].is_contiguous()
    assert_same(actual, expected, inputs)


def test_autograd_in_python(device):
    """The same formula, of calls in a mode."""
    inputs, gradients = make_inputs(SMALL, device), make_gradients(SMALL, device)
    expected = results(flash_qla.chunk_gated_delta_rule_packed, packed(inputs), **gradients)
    with Ran() as ran:
        assert equal(results(flash_qla.chunk_gated_delta_rule_packed, packed(inputs), **gradients), expected)
    assert ran.ops == ["chunk_gated_delta_rule_packed", "chunk_gated_delta_rule_packed_bwd"]


def test_gradients_of_the_state_alone(device):
    """do is zeros then."""
    inputs = packed(make_inputs(SMALL, device))
    inputs["mixed_qkv"].requires_grad_()
    o, state = flash_qla.chunk_gated_delta_rule_packed(**inputs, output_final_state=True)
    (actual,) = torch.autograd.grad(state.sum(), inputs["mixed_qkv"], retain_graph=True)
    (expected,) = torch.autograd.grad((o, state), inputs["mixed_qkv"], (torch.zeros_like(o), torch.ones_like(state)))
    assert torch.equal(actual, expected) and actual.any()


def test_autocast(device):
    inputs = make_inputs(SMALL, device)
    expected = flash_qla.chunk_gated_delta_rule_packed(**packed(inputs))[0]
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = flash_qla.chunk_gated_delta_rule_packed(**packed(inputs | {x: inputs[x].float() for x in SPLIT}))[0]
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {"mixed_qkv": torch.zeros(1, 4, 191)},
            "mixed_qkv has 191 channels, expected 2 H_k K [+] H_v V, with num_",
        ),
        ({"mixed_qkv": torch.zeros(1, 4, 128)}, "mixed_qkv has 128 channels"),
        ({"mixed_qkv": torch.zeros(1, 4, 3, 64)}, "mixed_qkv has 4 dimensions"),
        ({"mixed_qkv": torch.zeros(1, 4, 192, dtype=torch.int32)}, "mixed_qkv has dtype int32"),
        ({"num_k_heads": 0}, "num_k_heads is 0, expected at least 1"),
        ({"num_k_heads": 2**40}, "mixed_qkv has 192 channels"),
        ({"num_k_heads": 2**57}, "mixed_qkv has 192 channels"),  # 2 H_k K does not fit in 64 bits
        ({"head_k_dim": -1}, "head_k_dim is -1, expected at least 1"),
        ({"num_k_heads": 4, "head_k_dim": 16}, "v has 2 heads, expected a positive multiple of the 4 heads"),
        ({"g": torch.zeros(1, 4)}, "g has 2 dimensions"),
        ({"beta": torch.zeros(1, 4, 3)}, "beta has shape"),
    ),
)
def test_errors(change, message):
    arguments = {"mixed_qkv": torch.zeros(1, 4, 192), "num_k_heads": 1, "head_k_dim": 64}
    arguments |= {"g": torch.zeros(1, 4, 2), "beta": torch.zeros(1, 4, 2)}
    with pytest.raises(RuntimeError, match=message):
        flash_qla.chunk_gated_delta_rule_packed(**arguments | change)
    if max(change.get("num_k_heads", 0), 1) < 2**31:  # no shape of a fake tensor has more
        arguments = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in (arguments | change).items()}
        with pytest.raises(RuntimeError, match=message):
            torch.ops.flash_qla.chunk_gated_delta_rule_packed(**arguments)


def test_fake_gradient_of_channels_before_tokens(device):
    """Contiguous, as the op's, whatever the strides of mixed_qkv are."""
    arguments = packed(make_inputs(SMALL, device)) | make_gradients(SMALL, device)
    arguments["mixed_qkv"] = arguments["mixed_qkv"].mT.contiguous().mT
    op = torch.ops.flash_qla.chunk_gated_delta_rule_packed_bwd
    real, fake = op(**arguments)[0], op(**on_meta(arguments))[0]
    assert real.is_contiguous() and (real.shape, real.stride()) == (fake.shape, fake.stride())


def test_slices_of_a_layer():
    """The adapter of transformers finds the tensor that a layer has split, in both orders of its dimensions."""
    transformers = pytest.importorskip("flash_qla.integrations.transformers")
    case = dataclasses.replace(SMALL, lengths=None, padding=0, B=2, T=70)
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    sizes = [inputs[name].shape[2] * inputs[name].shape[3] for name in SPLIT]
    mixed = packed(inputs)["mixed_qkv"]
    for tokens_first in (True, False):
        leaf = (mixed if tokens_first else mixed.mT.contiguous()).detach().requires_grad_()
        convolved = leaf * 1  # as a convolution makes it
        parts = (convolved if tokens_first else convolved.transpose(1, 2)).split(sizes, -1)
        query, key, value = (x.reshape(*x.shape[:2], -1, inputs[y].shape[3]) for x, y in zip(parts, SPLIT, strict=True))
        whole = transformers._mixed_qkv_of(query, key, value)
        assert whole.shape == mixed.shape and torch.equal(whole, mixed)
        assert (
            transformers._mixed_qkv_of(key, query, value) is None
            and transformers._mixed_qkv_of(query, key, value + 0) is None
        )
        with torch.no_grad():
            assert transformers._mixed_qkv_of(query, key, value) is None
        names = {"initial_state": inputs["initial_state"], "output_final_state": False}
        with Ran() as ran:
            o, _ = transformers.chunk_gated_delta_rule(query, key, value, inputs["g"], inputs["beta"], **names)
        assert ran.ops == ["chunk_gated_delta_rule_packed"]
        with Ran() as ran:  # a keyword that only chunk_gated_delta_rule has
            transformers.chunk_gated_delta_rule(query, key, value, inputs["g"], inputs["beta"], chunk_size=64)
        assert ran.ops == ["chunk_gated_delta_rule"]
        o.backward(gradients["do"])
        expected = results(flash_qla.chunk_gated_delta_rule_packed, packed(inputs), gradients["do"], None)
        actual = leaf.grad if tokens_first else leaf.grad.mT
        assert torch.equal(actual, expected["mixed_qkv"])
