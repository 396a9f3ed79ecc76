"""Gated Delta Rule (Gated DeltaNet) for PyTorch: kernels compiled ahead of time, a CPU default, and plain ops."""

import sys
from pathlib import Path

if any(Path(__file__).with_name("ops").rglob("*.py")):  # this package has stubs there
    raise ImportError(
        f"the published FlashQLA (flash-qla on PyPI) lies in {Path(__file__).parent} too, and its files are mixed with "
        "those of this package. `pip uninstall flash-qla flash-qla-aot`, then install this package again."
    )

from flash_qla import gated_delta_rule, ops as ops, testing as testing  # ops loads the library
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

# Where the published FlashQLA has them
ops.gated_delta_rule = sys.modules["flash_qla.ops.gated_delta_rule"] = gated_delta_rule
ops.chunk_gated_delta_rule = chunk_gated_delta_rule

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_packed",
    "prefill_gated_delta_rule",
]
