"""flash_qla without flash_qla._C, as under another Python than the wheel's: the ops run, and what needs _C says so."""

import itertools
from pathlib import Path

import pytest
import torch
from cases import Case, make_gradients, make_inputs
from subprocesses import run_python, start_python
from torch._subclasses import FakeTensorMode

import flash_qla
from flash_qla import _C, _binary

PACKAGE = Path(flash_qla.__file__).parent
BLOCKED = """
import sys
sys.modules["flash_qla._C"] = None
"""
OPS = """
import types, torch, flash_qla
from torch._subclasses import FakeTensorMode

assert not [name for name in sys.modules if name.startswith("flash_qla._C") and sys.modules[name]]
T, H_k, H_v, K, V = 70, 1, 2, 16, 8

def tokens():
    torch.manual_seed(0)
    sizes = ((H_k, K), (H_k, K), (H_v, V), (H_v,), (H_v,))
    q, k, v, g, beta = (torch.randn(1, T, *size) for size in sizes)
    return q / 4, k / 4, v, -g.abs(), beta.sigmoid()

leaves = [x.requires_grad_() for x in tokens()]
o, state = flash_qla.chunk_gated_delta_rule(*leaves, output_final_state=True)
(o.sum() + state.sum()).backward()
assert all(x.grad.isfinite().all() and x.grad.any() for x in leaves)

pool, slots, cu_seqlens = torch.zeros(3, H_v, V, K), torch.tensor([1]), torch.tensor([0, T])
inputs = tokens()
actual = flash_qla.prefill_gated_delta_rule(*inputs, pool, slots, cu_seqlens=cu_seqlens)
torch.testing.assert_close(actual, o.detach())
torch.testing.assert_close(pool[1], state[0].detach().transpose(-2, -1))

q, k, v, g, beta = (x[:, :1] for x in inputs)
actual = flash_qla.decode_gated_delta_rule(q, k, v, g, beta, torch.zeros(H_v), None, pool, slots)
assert actual.shape == v.shape and actual.isfinite().all() and actual.any()

compiled = torch.compile(flash_qla.chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(*inputs)[0], o.detach())
with FakeTensorMode() as mode:
    fakes = [mode.from_tensor(x) for x in inputs]
    assert flash_qla.chunk_gated_delta_rule(*fakes)[0].shape == o.shape
    begin = torch.ops.flash_qla.gated_delta_rule_forward_begin
    maps, workspace, *_ = begin(*fakes, [0])
    assert maps.shape == (1, H_v, V + K, K) and workspace.shape == (0,)
    flash_qla._binary.card = lambda _: dict(sm_count=132)
    maps, workspace, *_ = begin(*(torch.empty(x.shape, device="cuda") for x in inputs), [0])
    assert maps.is_cuda and workspace.shape[0] > 0
print("ran")
"""


def test_the_ops_run():
    assert run_python(BLOCKED + OPS).splitlines()[-1] == "ran"


def test_the_slow_path_notice_is_printed():
    """PyTorch prints the notice: Python's filters do not apply to it."""
    code = "import torch, flash_qla; x = torch.zeros(1, 3, 1, 4)\n"
    code += "flash_qla.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])"
    assert "flash_qla: the tensors are on the CPU" in run_python(BLOCKED + code, FLASH_QLA_QUIET="")


@pytest.mark.parametrize(
    "code",
    (
        "from flash_qla import _C",
        "flash_qla._C.forward_dispatch(1, 64, 1, 2, 8)",
        "with flash_qla.testing.forced_dispatch(forward={}): pass",
    ),
)
def test_what_needs_the_module_says_so(code):
    code = f"import flash_qla\ntry:\n    {code}\nexcept ImportError as error:\n    print(error)"
    (line,) = run_python(BLOCKED + code).splitlines()
    assert line.startswith(f"{PACKAGE}/_C.") and line.endswith("the ops run without it.")


def test_the_command_says_so():
    code = "import runpy; runpy.run_module('flash_qla', run_name='__main__')"
    process = start_python(BLOCKED + code)
    (line,) = process.communicate()[0].splitlines()
    assert process.returncode == 1 and line.startswith(f"{PACKAGE}/_C.") and "`python -m flash_qla`" in line


def test_the_library_answers_as_the_module():
    assert max(kernel.params.get("K", 0) for kernel in _C.kernels()) == _binary.MOST_KEY_DIM
    names = ("B", "T", "N", "H_k", "H_v", "K", "V")
    shapes = ((1, 9000, 3, 2, 8, 96, 136), (2, 700, 2, 4, 4, 128, 512), (1, 40000, 1, 1, 6, 8, 64))
    for sizes, flags in itertools.product(shapes, itertools.product((False, True), repeat=3)):
        shape = dict(zip((*names, "varlen", "auto_cp", "use_qk_l2norm"), (*sizes, *flags), strict=True))
        shape |= _C.cards()["H100 PCIe"]
        expected = _C.forward_dispatch(**shape, over_ranks=True)
        assert _binary.forward_workspace_bytes(**shape) == expected.workspace_bytes
        for activations in (False, True):
            shape["activations"] = activations
            expected = _C.backward_dispatch(**shape, over_ranks=True)
            assert _binary.backward_workspace_bytes(**shape) == expected.workspace_bytes
    assert _binary.forward_workspace_bytes(**shape) == -1  # activations are the backward's
    assert _binary.backward_workspace_bytes(**shape | {"H_v": 5, "H_k": 2}) == -1


@pytest.mark.parametrize("op", ("forward", "backward"))
@pytest.mark.parametrize(("name", "head_dims"), (("q", {"K": 264}), ("q", {"K": 20}), ("v", {"V": 520})))
def test_head_dims_of_no_kernel_are_refused_in_a_trace(monkeypatch, op, name, head_dims):
    """A trace refuses them as the library does in a call."""
    monkeypatch.setattr(_binary, "card", lambda _: {"sm_count": 132})
    begin = getattr(torch.ops.flash_qla, f"gated_delta_rule_{op}_begin").default
    case = Case(T=70, H_k=1, H_v=2, **head_dims)
    arguments = make_inputs(case, "cpu") | make_gradients(case, "cpu") | {"map_sequences": [0]}
    (dim,) = head_dims.values()
    expected = rf"{name} has head dimension . = {dim}, expected a multiple of 8 up to \d+ on a GPU"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=expected):
        begin_arguments = {x.name: arguments[x.name] for x in begin._schema.arguments if x.name in arguments}
        tensors = {n: x for n, x in begin_arguments.items() if isinstance(x, torch.Tensor)}
        begin(**begin_arguments | {n: torch.empty(x.shape, dtype=x.dtype, device="cuda") for n, x in tensors.items()})
