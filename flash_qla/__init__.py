"""Gated Delta Rule (Gated DeltaNet) for PyTorch: kernels compiled ahead of time, a CPU default, and plain ops."""

import sys
from pathlib import Path

if any(Path(__file__).with_name("ops").rglob("*.py")):  # this package has stubs there
    raise ImportError(
        f"the published FlashQLA (flash-qla on PyPI) lies in {Path(__file__).parent} too, and its files are mixed with "
        "those of this package. `pip uninstall flash-qla flash-qla-aot`, then install this package again."
    )

from flash_qla import gated_delta_rule, ops as ops  # loads the library that defines torch.ops.flash_qla
from flash_qla._version import __version__
from flash_qla.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from flash_qla.serving import (
    decode_gated_delta_rule,
    decode_gated_delta_rule_packed,
    prefill_gated_delta_rule,
)

# ByteDance-Seed/VeOmni and the published FlashQLA's tests of context parallelism import chunk_gated_delta_rule from
# flash_qla.ops.gated_delta_rule. FLA takes it from flash_qla.
ops.gated_delta_rule = sys.modules["flash_qla.ops.gated_delta_rule"] = gated_delta_rule

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_packed",
    "prefill_gated_delta_rule",
]
