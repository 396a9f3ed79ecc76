"""The decoder of the kernels' compressed code (csrc/gpu/runtime/lzma.cpp), against Python's lzma."""

import lzma
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
#include <iostream>
#include <iterator>
#include <string>

#include "gpu/runtime/lzma.h"

int main(int, char** arguments) {
  const std::string file(std::istreambuf_iterator<char>(std::cin), {});
  try {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(file.data());
    const std::vector<char> out = flash_qla::unpack_lzma({bytes, file.size()}, std::stoul(arguments[1]));
    std::cout.write(out.data(), out.size());
  } catch (const std::runtime_error& error) {
    std::cerr << error.what();
    return 1;
  }
}
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lzma")
    source, built = folder / "main.cpp", folder / "main"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
    command = ["g++", "-std=c++20", "-O1", *checks, "-I", ROOT / "csrc"]
    subprocess.run([*command, source, ROOT / "csrc/gpu/runtime/lzma.cpp", "-o", built], check=True)
    return built


def unpack(program: Path, packed: bytes, size: int) -> subprocess.CompletedProcess:
    return subprocess.run([program, str(size)], input=packed, capture_output=True)


def contents_of(seed: int) -> bytes:
    """Runs, text, noise, and repetitions near and far, so that every kind of symbol occurs."""
    draw = random.Random(seed)
    parts = [draw.randbytes(draw.randrange(300)) for _ in range(6)] + [b"x" * 700, b"mma.sync.aligned " * 9]
    return b"".join(draw.choice(parts)[draw.randrange(20) :] for _ in range(draw.randrange(1, 400)))


@pytest.mark.parametrize("coder", ((0, 4, 4), (3, 0, 0), (4, 0, 2)), ids=str)
def test_contents(program, coder):
    filters = [{"id": lzma.FILTER_LZMA1} | dict(zip(("lc", "lp", "pb"), coder, strict=True))]
    for contents in (b"", b"a", b"a" * 5000, *map(contents_of, range(8))):
        packed = lzma.compress(contents, lzma.FORMAT_ALONE, filters=filters)
        result = unpack(program, packed, len(contents))
        assert result.returncode == 0, result.stderr
        assert result.stdout == contents


def test_damage(program):
    """Nothing is read or written out of bounds."""
    contents = contents_of(9)
    packed = lzma.compress(contents, lzma.FORMAT_ALONE)
    draw = random.Random(1)
    damaged = [packed[: draw.randrange(len(packed))] for _ in range(20)]
    for _ in range(40):
        changed = bytearray(packed)
        changed[draw.randrange(13, len(packed))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(changed))
    for file, size in ((b"", 0), (packed, len(contents) - 1), (packed, len(contents) + 1), (b"\xff" + packed, 1)):
        result = unpack(program, file, size)
        assert result.returncode == 1 and b"libflash_qla.so" in result.stderr, result.stderr
    for file in damaged:
        result = unpack(program, file, len(contents))
        assert result.returncode in (0, 1) and b"Sanitizer" not in result.stderr, result.stderr
        assert result.stdout != contents if result.returncode == 0 else b"libflash_qla.so" in result.stderr


def test_a_zero_follows_each_code(tmp_path):
    """PTX ends with it, also where its length is a multiple of 16."""
    from build_tools import archive

    codes = [tmp_path / f"{size}.ptx" for size in (15, 16, 17, 32)]
    for code in codes:
        code.write_bytes(b"x" * int(code.stem))
    record = archive.write(tmp_path / "found.lzma", codes)
    contents = archive.unpack((tmp_path / "found.lzma").read_bytes())
    for code in codes:
        offset = record.offsets[code.name]
        assert offset % archive.ALIGNMENT == 0 and contents[offset + int(code.stem)] == 0
