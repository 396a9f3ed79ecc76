"""Errors of flash_qla and FLA against the fp64 recurrence on one GPU, same inputs, one process per package.

    python benchmarks/peer_errors.py --out FILE.json
    python benchmarks/peer_errors.py --cases underflow,4095 --packages flash_qla
    python benchmarks/peer_errors.py --head-dims 96x192

Each case is one call of chunk_gated_delta_rule in bf16 with an initial state, and torch.autograd.grad of both results.
The error is the relative L2 error of o, the final state and the six gradients. Inputs are those of tests/cases.py. The
reference is tests/reference.py: gated_delta_rule for o and the final state, gated_delta_rule_bwd for the gradients. The
report has the largest error of each package and the largest ratio of the two. If the true value is almost zero, as
dg is when gates erase the state, a relative error may be large without a meaning, but the ratio to FLA's error keeps
its meaning.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator

import common
import torch

HEADS = [(16, 32), (2, 8), (4, 4)]
GATES = ["softplus", "logsigmoid", "near_threshold", "tiny", "underflow", "zero"]
LENGTHS = {
    **{f"1x{length}": (length,) for length in (1, 63, 64, 65, 127, 4095)},
    "tiny sequences": tuple(1 + i % 9 for i in range(200)),
    "ragged": (700, 1, 64, 1300, 65, 128, 333),
    "empty sequences": (0, 100, 0, 0, 64, 0),  # not for FLA, which does not promise to take them
}
TENSORS = ("o", "final_state", *common.GRADIENT_OF.values())


def all_cases(K: int, V: int) -> dict:
    """name -> Case: gates and heads at middle lengths, lengths at few heads, un-normalised keys."""
    from cases import Case

    def case(H_k, H_v, lengths, gate="logsigmoid", **changes):
        return Case(H_k=H_k, H_v=H_v, K=K, V=V, lengths=lengths, gate=gate, cu_dtype=torch.int64, **changes)

    cases = {}
    for (H_k, H_v), gate in itertools.product(HEADS, GATES):
        cases[f"{H_k}x{H_v} {gate}"] = case(H_k, H_v, (1000, 24), gate)
    for name, lengths in LENGTHS.items():
        cases[f"2x8 {name}"] = case(2, 8, lengths)
    for H_k, H_v in HEADS:
        raw = case(H_k, H_v, (1000, 24), keys="raw", use_qk_l2norm_in_kernel=True)
        cases[f"{H_k}x{H_v} l2norm inside"] = raw
    return cases


def run_case(operator, case) -> dict[str, float]:
    from cases import make_inputs

    inputs = make_inputs(case, common.DEVICE)
    # The reference has no such arguments, and FLA names them otherwise.
    arguments = {name: x for name, x in inputs.items() if name not in ("auto_cp", "state_v_first")}
    generator = torch.Generator().manual_seed(case.seed + 1)
    output_gradients = {
        "do": torch.randn(inputs["v"].shape, generator=generator).to(common.DEVICE, case.dtype),
        "dht": torch.randn(inputs["initial_state"].shape, generator=generator).to(common.DEVICE),
    }
    differentiable = [arguments[name].requires_grad_() for name in common.GRADIENT_OF]
    outputs = operator(**arguments, output_final_state=True)
    gradients = torch.autograd.grad(outputs, differentiable, tuple(output_gradients.values()))
    return common.forward_errors(arguments, *outputs) | common.gradient_errors(arguments, output_gradients, gradients)


def measure(package: str, options) -> Iterator[dict]:
    if package == "flash_qla":
        from flash_qla import __version__, chunk_gated_delta_rule
    else:
        from fla import __version__
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for name, case in all_cases(*options.head_dims).items():
        if not any(part in name for part in options.cases.split(",")):
            continue
        cell = {"package": package, "version": __version__, "case": name, "inputs": str(case)}
        cell |= common.head_dims_field(options.head_dims)
        if package == "fla" and "empty sequences" in name:
            continue
        try:
            cell["errors"] = run_case(chunk_gated_delta_rule, case)
        except Exception as error:
            if package == "flash_qla":
                raise
            cell["skipped"] = f"{type(error).__name__}: {error}"
        print(f"{package:>10} {name:24} {cell.get('skipped', 'done')}", flush=True)
        yield cell


def report(cells: list[dict]) -> None:
    """The largest errors, and where flash_qla's is the largest compared with FLA's. NaN is larger than all."""

    def size(x: float) -> float:
        return math.inf if math.isnan(x) else x

    errors: dict[str, dict[str, dict]] = {"flash_qla": {}, "fla": {}}
    for cell in (cell for cell in cells if "errors" in cell):
        errors[cell["package"]][cell["case"]] = cell["errors"]
    for tensor in TENSORS:
        line = f"{tensor:>12}"
        for package, case_errors in errors.items():
            line += f" {package} {max((x[tensor] for x in case_errors.values()), key=size):.1e}" if case_errors else ""
        both = {case: (x[tensor], errors["fla"].get(case, x)[tensor]) for case, x in errors["flash_qla"].items()}
        ratios = {case: ours / theirs for case, (ours, theirs) in both.items() if theirs > 0}
        worst = max(ratios, key=lambda case: size(ratios[case]), default=None)
        print(line if worst is None else f"{line}, at most {ratios[worst]:.2f} times FLA's ({worst})")


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only those whose name contains one of these, comma-separated")
    common.add_head_dims_argument(parser)
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report, common.FLA_BACKWARD)
