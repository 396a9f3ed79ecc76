"""Forward time of flash_qla and of its peers on one GPU, same inputs, one process per package.

    python benchmarks/forward.py --out FILE.json
    python benchmarks/forward.py --packages flash_qla,fla --heads 16x32,2x8 --sequences 1x8192,4096x8 --gates bench
    python benchmarks/forward.py --packages flash_qla,fla --heads 30x30 --head-dims 96x192
    python benchmarks/forward.py --packages flash_qla --variants nocp,l2norm,output_h,v_first,fp16,unknown,op
    python benchmarks/forward.py --variants op,contiguous,op_contiguous

Packages, each by its function below autograd:

  flash_qla      this package, chunk_gated_delta_rule_fwd; in other forms with --variants
  fla            FLA's Triton kernels (fla-core on PyPI); its dispatch to other packages is switched off
  flash_qla_jit  the published FlashQLA (flash-qla on PyPI). Its import name is flash_qla too, so it needs a directory
                 of its own: pip install --target DIR flash-qla, and --peers-path DIR
  flashinfer     FlashInfer, or the module fi_aot if it exists: the same kernels compiled ahead of time

Python looks for the published FlashQLA in --peers-path first and for other peers there last, and for flash_qla in
--package-path. Peers compile as they run, into the folders that their own variables name, such as TRITON_CACHE_DIR and
TILELANG_CACHE_DIR.

Inputs: packed bf16 sequences, L2-normalised q and k, gates as in common.make_inputs, beta = sigmoid(randn), an fp32
initial state; the final state is returned. q, k and v are slices of one tensor (common.slices), because every model
hands them over so. flash_qla reads them in place. A peer's timed call makes them contiguous, as its users do. The
variant "contiguous" gives every package contiguous tensors, so that nothing is copied; "op_contiguous" is the op on
them. Inputs in another form (FlashInfer takes e^g, and states with V first) are computed beforehand. flash_qla and
FlashInfer are told how long the longest sequence is. FlashQLA and FLA read the lengths on the host before they are
timed. A package that does not support the --head-dims has errors instead of times.

Time: median over samples, each the replay of a CUDA graph that holds several calls. Workspace: the bytes that a call
takes from torch's allocator beyond its results. Outputs are compared twice: with the fp64 recurrence on a short batch
of each head count (relative L2), and, by sketches, with those of flash_qla on the inputs of every cell.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import common
import torch

VARIANTS = {
    "nocp": "auto_cp=False",
    "l2norm": "use_qk_l2norm_in_kernel=True",
    "output_h": "output_h=True",
    "v_first": "state_v_first=True",
    "fp16": "q, k and v in fp16",
    "unknown": "without max_seqlen",
    "op": "torch.ops.flash_qla.chunk_gated_delta_rule, which returns neither g nor A",
    "contiguous": "contiguous q, k and v",
    "op_contiguous": "the op with contiguous q, k and v",
}
HEADS = "2x8,4x16,8x32,16x64,16x32,8x24,16x48,16x16"
SEQUENCES = "1x512,1x2048,1x8192,1x32768,1x131072,28672+4096,16384+16384,8192x4,4096x8,1024x8,128x64,ragged32"

# Right bf16 outputs differ by less than 1e-2; a sketch's estimate of that may be off by half.
LARGEST_DIFFERENCE = 2e-2


def flop(K: int, V: int) -> float:
    """Matrix work per token and value head: in a chunk of 64, three products with a K x V state (K S, Q S, K^T V_new),
    two of 64 x 64 x K (K K^T, Q K^T) and two of 64 x 64 x V (L times the residual, P V_new)."""
    return common.three_digits(2 * (3 * K * V + 2 * common.CHUNK * (K + V)))


def traffic(H_k: int, H_v: int, K: int, V: int) -> int:
    """Bytes per token: q, k; v, o; g, beta."""
    return 4 * K * H_k + 4 * V * H_v + 8 * H_v


@dataclass
class Package:
    version: str
    prepare: Callable  # (inputs, variant) -> the timed call, which returns everything that it has allocated
    results: Callable  # (results of the call, variant) -> o, final_state with K first


def load_flash_qla() -> Package:
    import flash_qla

    if not hasattr(torch.ops.flash_qla, "chunk_gated_delta_rule"):
        raise ImportError(f"{flash_qla.__file__} is not this package; see --package-path")
    changes = {
        "nocp": {"auto_cp": False},
        "l2norm": {"use_qk_l2norm_in_kernel": True},
        "output_h": {"output_h": True},
        "v_first": {"state_v_first": True},
        "unknown": {"max_seqlen": None},
        "op": {"output_final_state": True},
    }

    def prepare(inputs, variant):
        arguments = inputs | {"max_seqlen": common.longest_sequence(inputs)} | changes.get(variant, {})
        if variant == "v_first":
            arguments["initial_state"] = inputs["initial_state"].mT.contiguous()
        if variant == "fp16":
            arguments |= common.slices(*(inputs[name].half() for name in ("q", "k", "v")))
        if variant == "op":
            return lambda: torch.ops.flash_qla.chunk_gated_delta_rule(**arguments)
        return lambda: flash_qla.chunk_gated_delta_rule_fwd(**arguments)

    def results(outputs, variant):
        o, final_state = outputs if variant == "op" else (outputs[2], outputs[4])
        return o, final_state.mT if variant == "v_first" else final_state

    return Package(flash_qla.__version__, prepare, results)


def load_fla() -> Package:
    from fla import __version__
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
    from fla.ops.utils.index import prepare_chunk_indices

    def prepare(inputs, _):
        chunk_indices = prepare_chunk_indices(inputs["cu_seqlens"], common.CHUNK)
        arguments = inputs | {"chunk_indices": chunk_indices, "output_final_state": True}
        return lambda: chunk_gated_delta_rule_fwd(**common.contiguous(arguments))

    return Package(__version__, prepare, lambda outputs, _: (outputs[1], outputs[3]))


def load_flash_qla_jit() -> Package:
    import flash_qla

    if hasattr(torch.ops.flash_qla, "chunk_gated_delta_rule"):
        raise ImportError(f"{flash_qla.__file__} is not the published FlashQLA; see --peers-path")
    import tilelang

    def prepare(inputs, _):
        arguments = inputs | {"cu_seqlens": inputs["cu_seqlens"].int(), "output_final_state": True}
        return lambda: flash_qla.chunk_gated_delta_rule_fwd(
            **common.contiguous(arguments), output_h=False, auto_cp=True
        )

    version = f"{flash_qla.__version__} (TileLang {tilelang.__version__})"
    return Package(version, prepare, lambda outputs, _: (outputs[2], outputs[4]))


def flashinfer_function() -> tuple[str, Callable]:
    """FlashInfer's version, and its chunk_gated_delta_rule."""
    try:
        from fi_aot import __version__, chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if error.name != "fi_aot":
            raise
        from flashinfer import __version__
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
    return __version__, chunk_gated_delta_rule


def flashinfer_arguments(inputs: dict) -> dict:
    """Arguments of FlashInfer's function, without states. q, k and v are still slices, which it does not take."""
    cu_seqlens = inputs["cu_seqlens"].int()
    arguments = {name: inputs[name][0] for name in ("q", "k", "v", "beta")} | {"scale": inputs["scale"]}
    return arguments | {
        "g": inputs["g"][0].exp(),  # FlashInfer's g is the decay itself
        "output_final_state": True,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": common.longest_sequence(inputs),
        "use_cp": "auto",
        "output": torch.empty_like(arguments["v"]),
    }


def load_flashinfer() -> Package:
    version, chunk_gated_delta_rule = flashinfer_function()

    def prepare(inputs, _):
        arguments = flashinfer_arguments(inputs) | {"initial_state": inputs["initial_state"].mT.contiguous()}
        arguments["output_state"] = torch.empty_like(arguments["initial_state"])
        return lambda: chunk_gated_delta_rule(**common.contiguous(arguments))

    return Package(version, prepare, lambda outputs, _: (outputs[0][None], outputs[1].mT))


LOADERS = {
    "flash_qla": load_flash_qla,
    "fla": load_fla,
    "flash_qla_jit": load_flash_qla_jit,
    "flashinfer": load_flashinfer,
}


def sketch(x: torch.Tensor) -> list[float]:
    """16 sums of the elements of x under random signs, the same ones at every call. |sketch(x) - sketch(y)| estimates
    |x - y|, so a few numbers of each package say how far their outputs differ."""
    rows = x.reshape(-1, 16)
    generator = torch.Generator(x.device).manual_seed(0)
    sums = torch.zeros(16, dtype=torch.float64, device=x.device)
    for block in rows.split(2**20):  # o may have gigabytes: no fp64 copy of it at once
        signs = 2 * torch.randint(2, (len(block), 1), generator=generator, device=x.device) - 1
        sums += (block.double() * signs).sum(0)
    return [float(f"{value:.6g}") for value in sums.tolist()]


def difference(sketches: dict, expected: dict) -> float:
    """The larger of the relative differences of o and the final state."""
    return largest(math.dist(sketches[name], x) / (math.hypot(*x) or math.nan) for name, x in expected.items())


@torch.no_grad()
def measure(package: str, options):
    loaded = LOADERS[package]()
    dims = options.head_dims
    requested = filter(None, options.variants.split(","))
    variants = ["default", *(x for x in requested if package == "flash_qla" or x == "contiguous")]
    for gate in options.gates.split(","):
        for H_k, H_v in common.parse_heads(options.heads):
            errors = None
            for text in options.sequences.split(","):
                described = {"gate": gate, "heads": f"{H_k}x{H_v}", "sequences": text, **common.head_dims_field(dims)}
                if errors is None:
                    errors = check(package, loaded, H_k, H_v, dims, gate)
                lengths = common.parse_lengths(text)
                inputs = common.make_inputs(H_k, H_v, lengths, dims, gate=gate)
                for variant in variants:
                    cell = {"package": package, "variant": variant, "version": loaded.version, **described}
                    cell |= common.qkv_field(variant)
                    try:
                        cell |= measure_call(loaded, inputs, variant, options)
                    except Exception as error:
                        cell["error"] = f"{type(error).__name__}: {error}"[:500]
                    cell["floor_ms"] = common.floor_ms(sum(lengths), flop(*dims) * H_v, traffic(H_k, H_v, *dims))
                    cell["relative_error"] = errors
                    figure = f"{cell['ms']:.4f} ms" if "ms" in cell else cell["error"]
                    print(f"{package:>13} {variant:>13}", *key_of(cell), figure, flush=True)
                    yield cell
                    torch.cuda.synchronize()  # raises, and so ends this process, if an error has left CUDA unusable
                del inputs
                torch.cuda.empty_cache()


def check(
    package: str, loaded: Package, H_k: int, H_v: int, head_dims: tuple[int, int], gate: str
) -> dict[str, float] | str:
    """Errors on a short batch, or the package's exception."""
    try:
        if package == "fla":
            # FLA tunes itself on the first problem of each head count, which must not be small.
            loaded.prepare(common.make_inputs(H_k, H_v, [32768], head_dims, gate=gate), "default")()
        inputs = common.make_inputs(H_k, H_v, [256] * 4, head_dims, seed=1, gate=gate)
        outputs = loaded.prepare(inputs, "default")()
        return common.forward_errors(inputs, *loaded.results(outputs, "default"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def measure_call(loaded: Package, inputs: dict, variant: str, options) -> dict:
    if variant in common.ON_CONTIGUOUS:
        inputs, variant = common.contiguous(inputs), common.ON_CONTIGUOUS[variant]
    call = loaded.prepare(inputs, variant)
    outputs, workspace_bytes = common.workspace(call)
    o, final_state = loaded.results(outputs, variant)
    sketches = {"o": sketch(o), "final_state": sketch(final_state)}
    del outputs, o, final_state
    times = common.time_graph(call, options.samples, options.sample_ms)
    return {**common.spread(times), "workspace_bytes": workspace_bytes, "sketches": sketches}


def report(cells: list[dict]) -> None:
    """Each variant compared with the peers, which have contiguous tensors if it has them, and with the default."""
    ours = [cell for cell in cells if cell["package"] == "flash_qla"]
    for variant in dict.fromkeys(cell["variant"] for cell in ours):
        of_peers = "contiguous" if variant in common.ON_CONTIGUOUS else "default"
        others = [cell for cell in cells if cell["package"] != "flash_qla" and cell["variant"] == of_peers]
        if variant != "default":
            others += [cell | {"package": "the default"} for cell in ours if cell["variant"] == "default"]
        print(f"\n{variant}, {VARIANTS.get(variant, 'the low-level forward')}:")
        of_variant = [cell for cell in ours if cell["variant"] == variant]
        common.print_comparison([*of_variant, *others], "ms", key_of, "floor_ms")
    for package in dict.fromkeys(cell["package"] for cell in cells):
        errors = [cell["relative_error"] for cell in cells if cell["package"] == package]
        measured = [x for x in errors if isinstance(x, dict)]
        worst = [f"{name} {largest(x[name] for x in measured):.1e}" for name in ("o", "final_state") if measured]
        print(f"{package}, errors on short batches:", *worst, *dict.fromkeys(x for x in errors if isinstance(x, str)))
    print(*problems(cells), sep="\n")


def problems(cells: list[dict]) -> list[str]:
    """Outputs that differ from those of flash_qla's default, and cells without a time."""
    lines = []
    ours = {key_of(cell): cell for cell in cells if cell["package"] == "flash_qla" and cell["variant"] == "default"}
    for cell in cells:
        name = " ".join((cell["package"], cell["variant"], *key_of(cell)))
        if "error" in cell:
            lines.append(f"NOT MEASURED, {name}: {cell['error']}")
        expected = ours.get(key_of(cell), {})
        if "sketches" in cell and "sketches" in expected:
            distance = difference(cell["sketches"], expected["sketches"])
            if not distance <= LARGEST_DIFFERENCE:  # NaN is a disagreement
                lines.append(f"DISAGREEMENT with flash_qla's default, {name}: {distance:.1e}")
    return lines


def key_of(cell: dict) -> tuple[str, ...]:
    return cell["gate"], common.heads_of(cell), cell["sequences"]


def largest(figures) -> float:
    """The largest number, or NaN if any is NaN."""
    return max(figures, key=lambda x: math.inf if math.isnan(x) else x)


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0], packages=",".join(LOADERS))
    common.add_timing_arguments(parser, HEADS, SEQUENCES, samples=7)
    parser.add_argument("--gates", default="bench,trained", help="see common.make_inputs")
    variants = f"timed in each cell too: {', '.join(VARIANTS)}; peers have only the variant 'contiguous'"
    parser.add_argument("--variants", default="", help=variants)
    return parser


if __name__ == "__main__":
    parser = make_parser()
    options = parser.parse_args()
    if not set(filter(None, options.variants.split(","))) <= set(VARIANTS):
        parser.error(f"--variants is {options.variants!r}, expected some of {', '.join(VARIANTS)}")
    common.run(parser, measure, report, common.FLA_TRITON)
