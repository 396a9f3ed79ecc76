"""TorchScript, which PyTorch has deprecated in favour of torch.export (test_export.py): the block of examples/cpp,
scripted and saved by one process, loaded by others, with and without Python; gradients in Python."""

import cpp_example
import pytest
import torch
from cases import GRADIENT_OF, Case, make_gradients, make_inputs, run_autograd
from cpp_example import LIBRARY, assert_close, equal, export_block, run_program, try_run
from subprocesses import run_python

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]
INPUTS = ("q", "k", "v", "g", "beta")


def calls(device: str) -> list[tuple]:
    """Arguments of the block: packed sequences with states, without, and a batch."""
    block = export_block.make_block(device)
    x, cu_seqlens, state = export_block.make_inputs(block, (130, 0, 65, 1, 4), seed=1)
    return [(x, cu_seqlens, state), (x, cu_seqlens, None), (x.view(2, 100, -1), None, state[:2])]


@torch.no_grad()
def expected_of(arguments: tuple, device: str) -> tuple:
    return export_block.make_block(device)(*arguments)


@pytest.mark.hopper  # the other process takes the kernels of its GPU
def test_loaded_in_a_new_process(device, saved_block, tmp_path):
    """One that has the op library but not the Python package. From the second call on the executor may fuse gates."""
    arguments = calls(device)
    torch.save(arguments, tmp_path / "arguments.pt")
    code = f"""
import sys, torch
torch.ops.load_library({str(LIBRARY)!r})
outputs = []
for arguments in torch.load({str(tmp_path / "arguments.pt")!r}):
    block = torch.jit.load({str(saved_block / "block.pt")!r})
    with torch.no_grad():
        outputs.append([block(*arguments) for _ in range(3)])
torch.save(outputs, {str(tmp_path / "outputs.pt")!r})
assert "flash_qla" not in sys.modules
"""
    run_python(code)
    outputs = torch.load(tmp_path / "outputs.pt")
    assert len(outputs) == len(arguments)
    for (first, *later), y in zip(outputs, arguments, strict=True):
        expected = expected_of(y, device)
        assert equal(first, expected)
        for x in later:
            assert_close(x, expected)


def test_program_is_built_by_cmake(cpp_program):
    if reason := cpp_example.no_cmake_reason():
        pytest.skip(f"built by g++ alone: {reason}")
    assert (cpp_program.parent / "CMakeCache.txt").exists()


@torch.no_grad()
def test_a_call_through_the_dispatcher(cpp_program):
    """Of examples/cpp/call.cpp, most of which docs/export.md shows. The generator is Python's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, heads, 128) for heads in (2, 2, 4))
    g, beta = -torch.rand(1, 200, 4), torch.rand(1, 200, 4)
    o, _ = torch.ops.flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    *shape, total = cpp_example.run(cpp_program.with_name("flash_qla_call"), LIBRARY, FLASH_QLA_QUIET="1").split()
    assert "".join(shape) == "[1,200,4,128]" and float(total) == pytest.approx(o.sum().item(), rel=1e-4)
    page = (cpp_example.ROOT / "docs/export.md").read_text()
    shown = page.partition("```cpp\n")[2].partition("```")[0]
    assert shown in (cpp_example.EXAMPLE / "call.cpp").read_text()


def test_program_has_no_python_in_it(cpp_program):
    for file in (cpp_program, LIBRARY):
        names = [line.split()[0] for line in cpp_example.run("ldd", file).splitlines()]
        assert "libtorch_cpu.so" in names and not any("python" in name for name in names)


@pytest.mark.hopper  # the other process takes the kernels of its GPU
def test_in_the_cpp_program(device, saved_block, cpp_program, tmp_path):
    for arguments in calls(device):
        outputs = run_program(cpp_program, saved_block / "block.pt", arguments, tmp_path, device)
        assert equal(outputs, expected_of(arguments, device))


def test_errors_reach_the_cpp_program(device, saved_block, cpp_program, tmp_path):
    x, cu_seqlens, state = calls(device)[0]
    torch.save((x.cpu(), cu_seqlens.cpu().float(), state.cpu()), tmp_path / "inputs.pt")
    rest = (saved_block / "block.pt", tmp_path / "inputs.pt", tmp_path / "outputs.pt", device)
    failed = try_run(cpp_program, LIBRARY, *rest)
    assert failed.returncode == 1
    assert "flash_qla::chunk_gated_delta_rule: cu_seqlens has dtype float32, expected" in failed.stdout
    other_library = LIBRARY.with_name("missing.so")
    failed = try_run(cpp_program, other_library, *rest)
    assert failed.returncode == 1 and f"error: {other_library}" in failed.stdout
    assert not (tmp_path / "outputs.pt").exists()


def test_torchscript_differentiates(device, tmp_path):
    """Its executor may rewrite the graph after the first calls."""

    @torch.jit.script
    def scripted(q, k, v, g, beta, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None):
        o, state = torch.ops.flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        return o, state

    scripted.save(str(tmp_path / "layer.pt"))
    loaded = torch.jit.load(str(tmp_path / "layer.pt"))
    for seed in range(4):
        case = Case(lengths=(65, 3), seed=seed)
        inputs, gradients = make_inputs(case, device), make_gradients(case, device)
        names = (*INPUTS, "initial_state")
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        outputs = loaded(*leaves.values(), inputs["cu_seqlens"])
        actual = torch.autograd.grad(outputs, list(leaves.values()), tuple(gradients.values()))
        expected = run_autograd(inputs, **gradients)
        for name, dx in zip(names, actual, strict=True):
            assert torch.equal(dx, expected[GRADIENT_OF[name]]), name
