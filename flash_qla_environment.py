"""The environment variables of flash_qla, and one parser for those that switch something on.

    on: 1, true, yes, on        off: 0, false, no, off, or nothing        in any case, spaces around it are ignored

A switch with another value is off, and a warning names it. flash_qla's C++ code reads FLASH_QLA_CHECK and
FLASH_QLA_QUIET with the same words. This module is outside flash_qla, because the engines' plugins and the build read
switches without loading the library.
"""

import os
import warnings
from collections.abc import Callable

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")
_EXPECTED = f"expected one of {', '.join(filter(None, ON + OFF))}"

SWITCHES = {
    "FLASH_QLA_CHECK": "calls check the contents of their tensors",
    "FLASH_QLA_QUIET": "no warning that the CPU implementation is slow",
    "FLASH_QLA_ANY_GPU": "other packages' layers run flash_qla on GPUs other than Hopper's, too",
    "FLASH_QLA_VLLM": "vLLM's layers run flash_qla",
    "FLASH_QLA_SGLANG": "SGLang's layers run flash_qla",
    "FLASH_QLA_ALLOW_SPILLS": "a build accepts kernels that spill registers",
}


def is_on(name: str, warn: Callable[[str], None] = warnings.warn) -> bool:
    """Whether a switch is on. A value that is no word of ON or OFF goes to `warn`."""
    if _word(name) not in ON + OFF:
        warn(f"{name}={os.environ[name]} has no effect: {_EXPECTED}")
    return _word(name) in ON


def is_not_off(name: str) -> bool:
    """Whether a variable of another package, which may know more words, is set to anything but a word of OFF."""
    return _word(name) not in OFF


def _word(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def describe() -> list[str]:
    """A line for each variable of flash_qla that is set."""
    lines = []
    for name, value in sorted(os.environ.items()):
        if name in SWITCHES:
            word = _word(name)
            effect = SWITCHES[name] if word in ON else "off" if word in OFF else f"off: {_EXPECTED}"
        elif name.startswith("FLASH_QLA_"):
            effect = "no such variable"
        else:
            continue
        lines.append(f"{name}={value}: {effect}")
    return lines
