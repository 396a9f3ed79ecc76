"""The published FlashQLA's import path: ByteDance-Seed/VeOmni and FlashQLA's own tests import from here."""

from flash_qla.gated_delta_rule import (
    chunk_gated_delta_rule as chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd as chunk_gated_delta_rule_bwd,
)
from flash_qla.published import chunk_gated_delta_rule_fwd as chunk_gated_delta_rule_fwd
