"""torch.compile, torch.export and AOTInductor on what people build around the op: the block of examples/cpp, and a
Qwen3-Next of transformers. The ops by themselves are in test_op_registration.py."""

from pathlib import Path

import pytest
import torch
from cases import Case, make_arguments, make_inputs, run_all
from cpp_example import ROOT, assert_close, equal, export_block, load_example, run_program
from subprocesses import run_python
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

# No two sizes of the first are equal: the compiler would take them for one symbol.
LENGTHS = ((65, 30, 1, 0, 4), (3, 200, 64, 2, 7, 0, 1, 70), (30, 0, 5, 9), (7, 0))


# Outputs and inputs


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


@pytest.mark.parametrize(
    "case",
    (
        Case(lengths=(70, 0, 3)),
        # Nothing to compute or to convert: what comes out is what came in, and must still be another tensor.
        Case(lengths=(0, 0)),
        Case(B=2, T=0, state_v_first=True),
        Case(T=3, K=16, V=16, dtype=torch.float64, g_dtype=torch.float64, initial_state=torch.float64),
    ),
    ids=str,
)
def test_outputs_are_no_views_and_share_no_memory(device, case):
    if device == "cuda" and case.dtype == torch.float64:
        pytest.skip("fp64 is for the CPU")
    arguments = make_arguments(case, device)
    inputs = {storage(x) for x in arguments.values() if isinstance(x, torch.Tensor)}
    outputs = run_all(arguments)
    assert not any(x._is_view() for x in outputs.values())
    storages = [storage(x) for x in outputs.values()]
    assert len({*storages} | inputs) == len(storages) + len(inputs)
    if not case.T and not any(case.lengths or ()):
        assert torch.equal(outputs["final_state"], arguments["initial_state"])


class InPlace(torch.nn.Module):
    """Writes into outputs of the op, and in place of a state."""

    def forward(self, q, k, v, g, beta, initial_state, cu_seqlens, kept):
        o, state = torch.ops.flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        kept.copy_(state)
        return o.mul_(2), state.add_(1)


def test_tracers_know_that_outputs_are_new(device):
    """Writing an output does not mutate an input, for functionalization and for export, and their programs leave the
    inputs unchanged."""
    inputs = make_inputs(Case(lengths=(70, 0, 3)), device)
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    arguments = (*(inputs[name] for name in names), torch.zeros_like(inputs["initial_state"]))
    before = [x.clone() for x in arguments]
    with torch.no_grad():
        expected = InPlace()(*(x.clone() for x in arguments))
        traced = make_fx(torch.func.functionalize(InPlace()))(*arguments)
        exported = torch.export.export(InPlace(), arguments).run_decompositions()
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    # The one write that remains is that into `kept`, at the end.
    assert [target for target in targets if "_." in target] == ["aten.copy_.default"]
    signature = exported.graph_signature
    assert [*signature.user_inputs_to_mutate.values()] == ["kept"] and not signature.buffers_to_mutate
    for program in (traced, exported.module()):
        arguments = tuple(x.clone() for x in before)
        assert equal(program(*arguments), expected)
        assert equal(arguments[:-1], before[:-1])
        assert torch.equal(arguments[-1] + 1, expected[1])


# The block


@torch.no_grad()
def test_block_compiles_once_for_all_shapes(device):
    block = export_block.make_block(device)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for seed, lengths in enumerate(LENGTHS):
        arguments = export_block.make_inputs(block, lengths, seed)
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            assert_close(compiled(*arguments), block(*arguments))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


# A separate process, because the loader of some versions of torch crashes if the compiler links libstdc++ statically.
RUN_PACKAGE = """
import torch
import torch._inductor.codecache  # which aoti_load_package of torch 2.10 uses without importing it
import flash_qla

package = torch._inductor.aoti_load_package({package!r})
with torch.no_grad():
    outputs = [[x.cpu() for x in package(*arguments)] for arguments in torch.load({inputs!r})]
torch.save(outputs, {outputs!r})
"""


def run_package(package: Path, inputs: list[tuple], folder: Path, device: str) -> list[list[torch.Tensor]]:
    """The package's results for each of the inputs, in Python."""
    paths = {"package": package, "inputs": folder / "of_python.pt", "outputs": folder / "by_python.pt"}
    torch.save(inputs, paths["inputs"])
    run_python(RUN_PACKAGE.format(**{name: str(path) for name, path in paths.items()}))
    return [[x.to(device) for x in outputs] for outputs in torch.load(paths["outputs"])]


@pytest.mark.long
@torch.no_grad()
def test_aoti_package_in_python(device, saved_block, tmp_path):
    block = export_block.make_block(device)
    inputs = [export_block.make_inputs(block, lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    for arguments, outputs in zip(
        inputs, run_package(saved_block / "block.pt2", inputs, tmp_path, device), strict=True
    ):
        assert_close(outputs, block(*arguments))


@pytest.mark.long
@torch.no_grad()
def test_aoti_package_in_the_cpp_program(device, saved_block, cpp_program, tmp_path):
    """The same bits as in Python."""
    block = export_block.make_block(device)
    inputs = [export_block.make_inputs(block, lengths, seed) for seed, lengths in enumerate(LENGTHS[:2])]
    for arguments, outputs in zip(
        inputs, run_package(saved_block / "block.pt2", inputs, tmp_path, device), strict=True
    ):
        assert equal(run_program(cpp_program, saved_block / "block.pt2", arguments, tmp_path, device), outputs)


# A model


@pytest.mark.long
@torch.no_grad()
def test_compiled_qwen3_next(device):
    """The whole model with its cache in one graph, one op per layer in it, for prompts of several lengths (on a GPU the
    one made for 70 tokens is guarded by 4 <= T <= 127). In bf16 a compiler rounds less often than eager calls do, so
    there the errors from fp32 are compared."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from flash_qla.integrations.transformers import use_flash_qla

    example = load_example(ROOT / "examples/transformers_model.py")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    dtype, backend = (torch.bfloat16, "inductor") if device == "cuda" else (torch.float32, "aot_eager")
    model = example.build_model("qwen3_next", device=device, dtype=dtype, **layers)
    ops = []

    def recording_backend(graph, inputs):
        ops.extend(str(node.target) for node in graph.graph.nodes if "flash_qla" in str(node.target))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def values(run, tokens):
        out = run(tokens, use_cache=True)
        return out.logits, example.recurrent_states(example.cache_of(model, out))

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recording_backend)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(256, (1, length), generator=generator).to(device) for length in (70, 101)]
    with use_flash_qla(model):
        first = values(compiled, texts[0])
        with torch.compiler.set_stance("fail_on_recompile"):
            ours = [first, values(compiled, texts[1])]
        eager = [values(model, tokens) for tokens in texts]
    assert {*ops} == {"flash_qla.gated_delta_net"}
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    if dtype == torch.float32:
        for x, y in zip(ours, eager, strict=True):
            assert_close(x, y)
        return
    exact = [values(model.float(), tokens) for tokens in texts]
    for x, y, z in zip(ours, eager, exact, strict=True):
        for value, eager_value, exact_value in zip(x, y, z, strict=True):
            assert example.relative_error(value, exact_value) <= 1.25 * example.relative_error(eager_value, exact_value)
