"""Plugins of inference engines, which switch flash_qla on in each of an engine's processes:

    FLASH_QLA_VLLM=1 vllm serve MODEL
    FLASH_QLA_SGLANG=1 sglang serve --model-path MODEL --linear-attn-prefill-backend triton

The package declares these functions as entry points, which the engines call in all of their processes. Without the
variable they do nothing. With it, they put the functions of flash_qla.integrations.vllm or sglang in place in each
process that imports the engine's layers, right after that import. A line of the engine's log says so.

Nothing raises here. If the functions do not fit the engine, its log says why, and the engine keeps its own. This module
is outside flash_qla, so that a process without the variable does not load the library.
"""

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable

from flash_qla_environment import is_on


def vllm() -> None:
    """The entry point of vLLM's group vllm.general_plugins."""
    _switch_on("vllm", "FLASH_QLA_VLLM", _decode_drafts)


def sglang() -> None:
    """The entry point of SGLang's group sglang.srt.plugins."""
    _switch_on("sglang", "FLASH_QLA_SGLANG")


def _decode_drafts(functions: str) -> None:
    """vLLM 0.28.0 and later decode drafts in a kernel of their own, unless a variable asks for the function."""
    variables = getattr(sys.modules.get("vllm.envs"), "environment_variables", ())
    if "fused_sigmoid_gating_delta_rule_update" in functions and "VLLM_GDN_DECODE_KERNEL" in variables:
        os.environ.setdefault("VLLM_GDN_DECODE_KERNEL", "triton")


def _switch_on(engine: str, variable: str, on_replaced: Callable[[str], None] = lambda functions: None) -> None:
    """`on_replaced` is called with the names of functions that flash_qla has replaced."""
    log = logging.getLogger(f"{engine}.flash_qla")  # the engine's handlers show it
    if not is_on(variable, log.warning):
        return

    def report(functions: str, error: Exception | None) -> None:
        if error is None:
            log.info("%s=1: flash_qla replaces %s", variable, functions)
            on_replaced(functions)
        else:
            log.warning("%s=1 has no effect on %s: %s", variable, functions, error)

    try:
        integration = importlib.import_module(f"flash_qla.integrations.{engine}")
        integration._replacement.use_when_imported(report)
    except Exception as error:  # such as a library that was built for another system
        log.warning("%s=1 has no effect: %s: %s", variable, type(error).__name__, error)
