"""Archives: the code of all instances of a kernel for one architecture, in one file of the format .lzma.

The library embeds archives, and csrc/gpu/runtime/lzma.cpp unpacks one when a kernel of it is first launched. Instances
of a kernel are much alike, so an archive has a seventh of the bytes, where a wheel's deflate, whose window is 32 KB and
which sees one cubin after the other, has more than a fourth.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 16  # of code in the archive: the driver reads an ELF file in place
# An instruction in a cubin has 16 bytes, and the kind of a byte depends on its position. PTX is text.
CUBINS, PTX = {"lc": 0, "lp": 4, "pb": 4}, {"lc": 3, "lp": 0, "pb": 0}


@dataclass(frozen=True)
class Archive:
    file: str
    packed_bytes: int
    bytes: int
    offsets: dict[str, int]  # of the code, by the name of its file
    hash: str

    @property
    def name(self) -> str:
        return self.file.replace(".", "_")


def write(path: Path, codes: list[Path]) -> Archive:
    contents, offsets = bytearray(), {}
    for code in codes:
        offsets[code.name] = len(contents)
        contents += code.read_bytes()
        contents += b"\0" * (ALIGNMENT - len(contents) % ALIGNMENT)  # at least one: PTX ends with it
    if not path.is_file() or unpack(path.read_bytes()) != contents:
        coder = PTX if codes[0].suffix == ".ptx" else CUBINS
        filters = [{"id": lzma.FILTER_LZMA1, "preset": 6} | coder]
        path.write_bytes(lzma.compress(contents, lzma.FORMAT_ALONE, filters=filters))
    packed = path.read_bytes()
    return Archive(path.name, len(packed), len(contents), offsets, hashlib.sha256(packed).hexdigest())


def unpack(packed: bytes) -> bytes:
    """The contents; nothing of a file that is damaged."""
    try:
        return lzma.decompress(packed, lzma.FORMAT_ALONE)
    except lzma.LZMAError:
        return b""
