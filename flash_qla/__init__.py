"""Gated Delta Rule (Gated DeltaNet) for PyTorch: kernels compiled ahead of time, a CPU default, and plain ops."""

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if Path(__file__).with_name("ops").joinpath("utils/__init__.py").exists():  # only the published package has this file
    raise ImportError(
        f"the published FlashQLA (flash-qla on PyPI) lies in {Path(__file__).parent} too, and its files are mixed with "
        "those of this package. `pip uninstall flash-qla flash-qla-aot`, then install this package again."
    )

from flash_qla import ops as ops, testing as testing  # ops loads the library
from flash_qla._version import __version__
from flash_qla.convolution import causal_conv1d, prefill_causal_conv1d
from flash_qla.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_intermediates,
    chunk_gated_delta_rule_packed,
)
from flash_qla.gated_norm import gated_rms_norm
from flash_qla.ops import gated_delta_rule as _published_path  # noqa: F401  an attribute of ops without an import
from flash_qla.published import chunk_gated_delta_rule_fwd
from flash_qla.region import decode_gated_delta_net, gated_delta_net, prefill_gated_delta_net
from flash_qla.serving import (
    decode_gated_delta_rule,
    decode_gated_delta_rule_buffered,
    decode_gated_delta_rule_packed,
    prefill_gated_delta_rule,
)

if not TYPE_CHECKING:  # a type checker would take any attribute for one that exists

    def __getattr__(name):
        if name == "_C":
            raise ImportError(
                f"{Path(__file__).with_name('_C' + sysconfig.get_config_var('EXT_SUFFIX'))} is missing: flash_qla._C, "
                "which `python -m flash_qla`, questions about the dispatch and flash_qla.testing need, has to be built "
                "for this Python; the ops run without it."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "__version__",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_intermediates",
    "chunk_gated_delta_rule_packed",
    "decode_gated_delta_net",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_buffered",
    "decode_gated_delta_rule_packed",
    "gated_delta_net",
    "gated_rms_norm",
    "prefill_causal_conv1d",
    "prefill_gated_delta_net",
    "prefill_gated_delta_rule",
]
