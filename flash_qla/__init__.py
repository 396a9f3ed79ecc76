"""Gated Delta Rule (Gated DeltaNet) for PyTorch: kernels compiled ahead of time, a CPU default, and plain ops."""

from flash_qla import ops as ops  # loads the library that defines torch.ops.flash_qla
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

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_packed",
    "prefill_gated_delta_rule",
]
