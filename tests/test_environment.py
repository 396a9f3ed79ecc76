"""The environment variables of flash_qla: one parser, warnings, and the list of those that are set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_qla_environment as environment

ROOT = Path(__file__).resolve().parent.parent
ON = ("1", "true", "yes", "on", "True", "YES", " on ")
OFF = ("0", "false", "no", "off", "", "False", "NO", " ")
UNKNOWN = ("2", "y", "enabled", "1 0", "-1")


@pytest.mark.parametrize("name", environment.SWITCHES)
def test_words(name, monkeypatch):
    warned = []
    for words, expected in ((ON, True), (OFF, False), (UNKNOWN, False)):
        for word in words:
            monkeypatch.setenv(name, word)
            assert environment.is_on(name, warned.append) is expected
            assert environment.is_not_off(name) == (word not in OFF)
    monkeypatch.delenv(name)
    assert not environment.is_on(name, warned.append) and not environment.is_not_off(name)
    assert [text.partition(" has no effect: expected one of 1, true, ")[0] for text in warned] == [
        f"{name}={word}" for word in UNKNOWN
    ]


def test_no_other_parser():
    """Python asks for switches in one place, and each variable that the sources name is in its tables."""
    named = set()
    for folder in ("flash_qla", "build_tools", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                text = path.read_text()
                assert path.suffix != ".py" or not re.search(r"environ.*FLASH_QLA_", text), path
                named |= {*re.findall(r'(?:is_switched_on|is_on)\("(FLASH_QLA_\w+)"', text)}
    assert named == {*environment.SWITCHES} - {"FLASH_QLA_VLLM", "FLASH_QLA_SGLANG"}


def test_the_command_lists_those_that_are_set(tmp_path):
    """And the import warns of unknown words, also where the library reads a switch itself."""
    settings = {
        "FLASH_QLA_ALLOW_SPILLS": ("True", "a build accepts kernels that spill registers"),
        "FLASH_QLA_CHECK": ("what", "off: expected one of 1, true, yes, on, 0, false, no, off"),
        "FLASH_QLA_CHEK": ("1", "no such variable"),
        "FLASH_QLA_QUIET": ("2", "off: expected one of 1, true, yes, on, 0, false, no, off"),
        "FLASH_QLA_VLLM": ("no", "off"),
    }
    outer = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_QLA_")}
    result = subprocess.run(
        [sys.executable, "-m", "flash_qla"],
        cwd=tmp_path,
        env=outer | {name: value for name, (value, _) in settings.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert [x for x in lines if x.startswith("variable ")] == [
        f"variable {name}={value}: {effect}" for name, (value, effect) in settings.items()
    ]
    warned = re.findall(r"UserWarning: (\w+=\w+) has no effect", result.stderr)
    assert warned == ["FLASH_QLA_CHECK=what", "FLASH_QLA_QUIET=2"]
