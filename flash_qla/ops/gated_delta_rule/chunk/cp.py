"""The published FlashQLA's import path of contexts, which its own tests use."""

from flash_qla.cp.published import (
    FlashQLACPContext as FlashQLACPContext,
    build_cp_context as build_cp_context,
)
