"""Backward and training step of flash_qla, FlashQLA and FLA on one GPU, same inputs, one process per package.

    python benchmarks/backward.py --out FILE.json
    python benchmarks/backward.py --heads 16x32 --sequences 1x8192,4096x8 --packages flash_qla
    python benchmarks/backward.py --heads 30x30 --head-dims 96x192 --activations
    python benchmarks/backward.py --variants contiguous

Inputs are those of forward.py, with random gradients of o and of the final state. Two calls are timed as there:

  backward   all six gradients by the package's low-level function, from the results of its own low-level forward, with
             normalised q and k
  step       chunk_gated_delta_rule and torch.autograd.grad, which normalise q and k inside; with --activations they
             also activate raw bf16 gates and betas inside, and A_log and dt_bias have gradients too

q, k and v are slices of one tensor, and their gradients are three tensors, whatever the package. A peer needs a
contiguous copy, which its users pay for once in a step: autograd saves the copy that the forward has made. So the step
of a peer has the copies in its time and in its bytes, and its backward, from the results of its forward, is given
them. With --variants contiguous every package is also measured on contiguous tensors.

An eager step, after the first one, counts the bytes of torch's allocator:

  saved      bytes kept for the backward: allocated after the forward, minus allocated before the step (the inputs, the
             gradients of o and of the final state), minus o and the final state
  extra      the peak during the step, minus allocated before it, minus the returned gradients. So o, the final state,
             saved tensors and workspaces count. The bytes of all gradients are subtracted, even if not all of them
             existed at the peak.

Error: relative L2 of both calls against the fp64 recurrence, on short sequences. FLA runs with its defaults on Hopper,
but with its dispatch to flash_qla switched off: its Triton kernels, and one kernel of its backward in TileLang, which
must be installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
from collections.abc import Iterator

import common
import torch


def flop(K: int, V: int) -> float:
    """Matrix work per token and value head: in a chunk of 64, eight products with a K x V state (two of them to make
    the states again), five of 64 x 64 x K, five of 64 x 64 x V and two of 64 x 64 x 64."""
    return common.three_digits(2 * (8 * K * V + 5 * common.CHUNK * (K + V) + 2 * common.CHUNK * common.CHUNK))


def traffic(H_k: int, H_v: int, K: int, V: int) -> int:
    """Bytes per token: q, k, dq, dk; v, do, dv; g, beta, dg, db."""
    return 8 * K * H_k + 6 * V * H_v + 16 * H_v


def flash_qla_backward(inputs: dict, output_gradients: dict):
    from flash_qla import chunk_gated_delta_rule_bwd

    saved = inputs | {"g": None, "A": None, "g_raw": inputs["g"]}  # as autograd
    return lambda: chunk_gated_delta_rule_bwd(**saved, **output_gradients)


def flash_qla_jit_backward(inputs: dict, output_gradients: dict):
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    inputs = common.contiguous(inputs) | {"auto_cp": True}
    kept = {"output_final_state": True, "output_h": False, "enable_fwd_cp_cache": True, "is_train": True}
    g_cumsum, A, *_, cp_cache = chunk_gated_delta_rule_fwd(**inputs, **kept)
    saved = inputs | {"g": g_cumsum, "A": A, "cp_cache": cp_cache}
    return lambda: chunk_gated_delta_rule_bwd(**saved, **output_gradients)


def fla_backward(inputs: dict, output_gradients: dict):
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from fla.ops.utils.index import prepare_chunk_indices

    inputs = common.contiguous(inputs) | {"chunk_indices": prepare_chunk_indices(inputs["cu_seqlens"], common.CHUNK)}
    g_cumsum, _, A, *_ = chunk_gated_delta_rule_fwd(**inputs, output_final_state=True)
    saved = inputs | {"g": g_cumsum, "A": A}
    return lambda: chunk_gated_delta_rule_bwd(**saved, **output_gradients)[: len(common.GRADIENT_OF)]


class Step:
    """One training step: `forward` returns o and the final state, `backward` takes them and returns the gradients."""

    def __init__(self, operator, inputs: dict, output_gradients: dict):
        self.operator = operator
        self.arguments = inputs | {"use_qk_l2norm_in_kernel": True}
        self.output_gradients = tuple(output_gradients.values())
        self.differentiable = [inputs[name].requires_grad_() for name in common.ALL_GRADIENTS_OF if name in inputs]

    def forward(self):
        return self.operator(**self.arguments, output_final_state=True)

    def backward(self, outputs):
        return torch.autograd.grad(outputs, self.differentiable, self.output_gradients)

    def __call__(self):
        return self.backward(self.forward())


def with_copies(operator):
    """A peer's function as its users call it: it takes contiguous tensors only."""
    return lambda **arguments: operator(**common.contiguous(arguments))


def inputs_of(package: str, *args, variant: str = "default", **kwargs) -> tuple[dict, dict]:
    """make_inputs with gradients. FlashQLA takes cu_seqlens in int32, and the same tensor in each call, because its
    caches go by identity, and a miss while a graph is captured is an error. flash_qla also takes the longest length."""
    inputs, output_gradients = common.make_inputs(*args, gradients=True, **kwargs)
    if package == "flash_qla":
        inputs["max_seqlen"] = common.longest_sequence(inputs)
    if package == "flash_qla_jit":
        inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    return common.contiguous(inputs) if variant == "contiguous" else inputs, output_gradients


def step_inputs(package: str, H_k: int, H_v: int, lengths: list[int], options, **kwargs) -> tuple[dict, dict]:
    inputs, output_gradients = inputs_of(package, H_k, H_v, lengths, options.head_dims, normalize=False, **kwargs)
    if options.activations:
        inputs |= common.raw_tensors(sum(lengths), H_v) | common.INSIDE
    return inputs, output_gradients


def step_memory(step: Step) -> dict[str, int]:
    """Bytes; see the top of this file."""

    def size(tensors) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    step()
    torch.cuda.synchronize()
    gc.collect()  # or what it frees later counts
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = step.forward()
    saved = torch.cuda.memory_allocated() - before - size(outputs)
    gradients = step.backward(outputs)
    extra = torch.cuda.max_memory_allocated() - before - size(gradients)
    return {"saved_bytes": saved, "extra_bytes": extra}


BACKWARDS = {"flash_qla": flash_qla_backward, "flash_qla_jit": flash_qla_jit_backward, "fla": fla_backward}


def load(package: str) -> tuple:
    """The version, the function with autograd as its users call it with slices, and the low-level backward."""
    module = importlib.import_module("fla" if package == "fla" else "flash_qla")
    operator_of = importlib.import_module("fla.ops.gated_delta_rule") if package == "fla" else module
    operator = operator_of.chunk_gated_delta_rule
    return module.__version__, operator if package == "flash_qla" else with_copies(operator), BACKWARDS[package]


def measure(package: str, options) -> Iterator[dict]:
    version, operator, low_level_backward = load(package)
    dims = options.head_dims
    for H_k, H_v in common.parse_heads(options.heads):
        cells = []
        for text, variant in itertools.product(options.sequences.split(","), variants_of(options)):
            cell = {
                "package": package,
                "variant": variant,
                "version": version,
                "heads": f"{H_k}x{H_v}",
                "sequences": text,
                **common.head_dims_field(dims),
                **({"activations": True} if options.activations else {}),
                **common.qkv_field(variant),
                **measure_calls(
                    package, operator, low_level_backward, H_k, H_v, common.parse_lengths(text), variant, options
                ),
            }
            cells.append(cell)
            figures = (f"{name} {cell[name]:.4g}" for name in ("backward_ms", "step_ms", "saved_bytes", "extra_bytes"))
            print(f"{package:>13} {variant:>10} {common.heads_of(cell):>6} {text:>12}", *figures, flush=True)
            torch.cuda.empty_cache()

        # The check comes last, because FLA tunes itself on the first problem of each head count, which must not be
        # small.
        errors = check(package, operator, low_level_backward, H_k, H_v, options)
        for name, error in errors.items():
            figure = ", ".join(f"{tensor} {e:.2e}" for tensor, e in error.items())
            print(f"{package:>13} {H_k:>3}x{H_v:<2} errors of the {name}: {figure}", flush=True)
        for cell in cells:
            yield cell | {"relative_error": errors}


def variants_of(options) -> list[str]:
    return ["default", *filter(None, [options.variants])]


def measure_calls(
    package: str, operator, low_level_backward, H_k: int, H_v: int, lengths: list[int], variant: str, options
) -> dict[str, float]:
    """Times and bytes of the backward and of the step."""
    dims = options.head_dims
    with torch.no_grad():
        backward = low_level_backward(*inputs_of(package, H_k, H_v, lengths, dims, variant=variant))
        _, workspace_bytes = common.workspace(backward)
        backward_times = common.time_graph(backward, options.samples, options.sample_ms)
    del backward
    step = Step(operator, *step_inputs(package, H_k, H_v, lengths, options, variant=variant))
    memory = step_memory(step)
    step_times = common.time_graph(step, options.samples, options.sample_ms)
    return {
        **common.spread(backward_times, "backward_"),
        "backward_floor_ms": common.floor_ms(sum(lengths), flop(*dims) * H_v, traffic(H_k, H_v, *dims)),
        "backward_workspace_bytes": workspace_bytes,
        **common.spread(step_times, "step_"),
        **memory,
    }


def check(package: str, operator, low_level_backward, H_k: int, H_v: int, options) -> dict[str, dict[str, float]]:
    """Errors of the gradients that are timed, on short sequences."""
    lengths = [256, 100, 257]
    inputs, output_gradients = inputs_of(package, H_k, H_v, lengths, options.head_dims, seed=1)
    with torch.no_grad():
        gradients = low_level_backward(inputs, output_gradients)()
    errors = {"backward": common.gradient_errors(inputs, output_gradients, gradients)}
    inputs, output_gradients = step_inputs(package, H_k, H_v, lengths, options, seed=1)
    step = Step(operator, inputs, output_gradients)
    errors["step"] = common.gradient_errors(step.arguments, output_gradients, step())
    return errors


def report(cells: list[dict]) -> None:
    for variant in dict.fromkeys(cell["variant"] for cell in cells):
        of_variant = [cell for cell in cells if cell["variant"] == variant]
        for field, floor in (("backward_ms", "backward_floor_ms"), ("step_ms", ""), ("extra_bytes", "")):
            print(f"\n{variant}, {field}:")
            common.print_comparison(of_variant, field, lambda cell: (common.heads_of(cell), cell["sequences"]), floor)


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0], packages=",".join(BACKWARDS))
    common.add_timing_arguments(
        parser, heads="4x8,8x16,16x32,16x64", sequences="1x8192,1x32768,4096x8,1024x8", samples=7
    )
    parser.add_argument("--activations", action="store_true", help="of gates and betas inside the step")
    parser.add_argument("--variants", default="", choices=("", "contiguous"), help="measured in each cell too")
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report, common.FLA_BACKWARD)
