"""FLA's functions on flash_qla, which programs import in FLA's place. They need no FLA."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import accuracy
import published_ranks
import pytest
import torch
import torch.nn.functional as F
from cases import GRADIENT_OF, Case, cumulative_gates, make_gradients, make_inputs, reference_gradients, reference_of
from ranks import run_on_ranks
from subprocesses import run_python
from torch.utils.checkpoint import checkpoint

import flash_qla
from flash_qla.integrations.fla import chunk_gated_delta_rule

TENSORS = ("q", "k", "v", "g", "beta")
PACKED = Case(lengths=(70, 0, 3), state_v_first=True)
TRAINING = Path(__file__).parent.parent / "docs/training.md"


def inputs_of(case: Case) -> tuple[list[torch.Tensor], dict]:
    inputs = make_inputs(case, "cpu")
    del inputs["auto_cp"]
    return [inputs.pop(name) for name in TENSORS], inputs


def assert_same(actual, expected):
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_by_position():
    """In FLA's order, in which activations and the layout come earlier than in flash_qla's."""
    tensors, options = inputs_of(PACKED)
    h0, offsets = options["initial_state"], options["cu_seqlens"]
    expected = flash_qla.chunk_gated_delta_rule(
        *tensors, scale=0.3, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True, cu_seqlens=offsets,
    )  # fmt: skip
    indices = torch.tensor([[0, 0], [0, 1], [2, 0]])
    actual = chunk_gated_delta_rule(
        *tensors, 0.3, h0, True, True, True, True, True, offsets, offsets.cpu(), indices, None, chunk_size=64
    )
    assert_same(actual, expected)


def test_final_state_is_none_by_default():
    tensors, _ = inputs_of(Case(T=5))
    assert chunk_gated_delta_rule(*tensors)[1] is None


def test_gate():
    """A_log and dt_bias count with use_gate_in_kernel, and are ignored without, as in FLA."""
    tensors, _ = inputs_of(Case(T=5))
    gate = {"A_log": torch.zeros(4), "dt_bias": torch.ones(4)}
    expected = flash_qla.chunk_gated_delta_rule(*tensors, use_gate_in_kernel=True, **gate)
    assert torch.equal(chunk_gated_delta_rule(*tensors, use_gate_in_kernel=True, **gate)[0], expected[0])
    expected = flash_qla.chunk_gated_delta_rule(*tensors)
    assert torch.equal(chunk_gated_delta_rule(*tensors, **gate)[0], expected[0])


@pytest.mark.parametrize("v_first", (False, True))
def test_older_name_of_the_layout(v_first):
    tensors, options = inputs_of(Case(T=5, K=64, state_v_first=v_first))
    expected = flash_qla.chunk_gated_delta_rule(*tensors, **options, output_final_state=True)
    del options["state_v_first"]
    with pytest.warns(DeprecationWarning, match="older name of state_v_first"):
        actual = chunk_gated_delta_rule(*tensors, **options, transpose_state_layout=v_first, output_final_state=True)
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ({"chunk_size": 32}, TypeError, "chunk_size is 32, expected 64"),
        ({"head_first": True}, TypeError, "head_first is True, expected False"),
        ({"no_such_keyword": None}, TypeError, "unexpected keyword argument 'no_such_keyword'"),
        ({"state_v_first": True, "transpose_state_layout": True}, ValueError, "expected one of state_v_first and"),
        ({"use_gate_in_kernel": True}, RuntimeError, "A_log is None"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens is of type list; pass a tensor"),
    ),
    ids=str,
)
def test_what_is_refused(arguments, error, message):
    tensors, _ = inputs_of(Case(T=5))
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(*tensors, **arguments)


def call_of_torchtitan(q, k, v, g, beta, cu_seqlens):
    """The block of Qwen3.5 in torchtitan 0.3.0, around FLA's function: it repeats the key heads, and passes the offsets
    on both devices."""
    cu_seqlens_cpu = None if cu_seqlens is None else cu_seqlens.cpu()
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    return chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu
    )[0]


# Betas are the sigmoid of a projection in bf16.
OF_TORCHTITAN = {
    "keys": "raw", "use_qk_l2norm_in_kernel": True, "initial_state": None, "dht": None, "beta_dtype": torch.bfloat16
}  # fmt: skip


@pytest.mark.parametrize("how", ("eager", "checkpoint", "compile"))
@pytest.mark.parametrize("lengths", ((70, 1, 65), None), ids=("documents", "one stream"))
def test_call_of_torchtitan(lengths, how, device):
    """Output and gradients beside the fp64 recurrence, in one graph under torch.compile."""
    case = Case(lengths=lengths, T=130, **OF_TORCHTITAN)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    leaves = {name: inputs[name].detach().requires_grad_() for name in TENSORS}
    arguments = (*leaves.values(), inputs["cu_seqlens"])
    if how == "checkpoint":
        o = checkpoint(call_of_torchtitan, *arguments, use_reentrant=False)
    elif how == "compile":
        torch._dynamo.reset()
        o = torch.compile(call_of_torchtitan, fullgraph=True, backend="aot_eager")(*arguments)
    else:
        o = call_of_torchtitan(*arguments)
    leaf_gradients = torch.autograd.grad(o, list(leaves.values()), gradients["do"])
    accuracy.check("o", o, reference_of(inputs).o, dtype=case.dtype, case=case)
    actual = {GRADIENT_OF[name]: x for name, x in zip(leaves, leaf_gradients, strict=True)}
    expected = reference_gradients(inputs, **gradients)
    accuracy.check_gradients(actual, expected, dtype=case.dtype, case=case, g_cumsum=cumulative_gates(inputs))


def samples_of_torchtitan() -> dict:
    """The functions that docs/training.md defines for torchtitan."""
    (sample,) = re.findall(r"^def convolve.*?(?=^qwen3_5)", TRAINING.read_text(), re.MULTILINE | re.DOTALL)
    names = {"causal_conv1d": flash_qla.causal_conv1d, "gated_rms_norm": flash_qla.gated_rms_norm}
    exec(sample, names)
    return names


def test_convolution_and_norm_of_torchtitan(device):
    """They compute what torchtitan 0.3.0 documents: a convolution with SiLU that begins anew at each document, and
    silu(gate) * weight * norm(x)."""
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 1, 75, 24, generator=generator).to(device, torch.bfloat16)
    weight, offsets = torch.randn(24, 1, 4, generator=generator).to(device, torch.bfloat16), [0, 70, 70, 75]
    samples, cu_seqlens = samples_of_torchtitan(), torch.tensor(offsets, device=device)
    actual = samples["convolve"](x, weight, cu_seqlens, cu_seqlens.cpu())
    for begin, end in itertools.pairwise(offsets):
        padded = F.pad(x[:, begin:end].double().mT, (3, 0))
        expected = F.silu(F.conv1d(padded, weight.double(), groups=24)).mT if end > begin else x[:, :0].double()
        torch.testing.assert_close(actual[:, begin:end].double(), expected, rtol=5e-3, atol=1e-3)
    layer = SimpleNamespace(weight=torch.randn(8, generator=generator).to(device), eps=1e-6)
    x, gate = (y.unflatten(-1, (3, 8)) for y in (x, gate))
    norm = F.rms_norm(x.double(), (8,), layer.weight.double(), layer.eps)
    y = samples["normalize"](layer, x, gate)
    torch.testing.assert_close(y.double(), norm * F.silu(gate.double()), rtol=5e-3, atol=1e-3)


def test_context():
    for same, chain, unknown in run_on_ranks(2, published_ranks.fla_contexts):
        assert same
        assert "use_tf32x3_affine_chain is False, expected True" in chain
        assert "unexpected keyword argument 'no_such_keyword'" in unknown


def test_without_fla():
    code = """
import sys
sys.modules["fla"] = None  # an import of it fails
from flash_qla.integrations import fla
try:
    fla.use_flash_qla()
except ImportError as error:
    print(error)
"""
    assert "fla" in run_python(code)
