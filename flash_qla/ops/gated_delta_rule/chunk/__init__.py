"""The published FlashQLA's import path, which its own tests use."""

from flash_qla.ops.gated_delta_rule import (
    chunk_gated_delta_rule as chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd as chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd as chunk_gated_delta_rule_fwd,
)
