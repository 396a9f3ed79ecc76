"""Strips a cubin of variables that its code does not use.

Every `static constexpr` of a header that a kernel includes becomes a variable of the cubin, because NVRTC compiles the
headers with -default-device. Each cubin has some 700 of these variables, from CUTLASS and the standard library. ptxas
keeps them, with a name, a place in memory, and an address in constant bank 4 with its relocation. Together they are two
fifths of the compressed cubin.

strip() removes the variables if the PTX shows that no code mentions them. The information that the driver, cuobjdump
and the debugger read about the code stays: names, resources and parameters of functions, call graph, frames.

A cubin is an ELF file. Symbols are mentioned in the tables of any ELF file, and in three places that CUDA adds: some
attributes of .nv.info, .nv.callgraph, and the sh_info of a function's .text. The upper 8 bits of this sh_info are the
number of registers.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
SEGMENT = struct.Struct("<IIQQQQQQ")
ATTRIBUTE = struct.Struct("<BBH")  # an entry of .nv.info: format, attribute, value or size of the values after it

RELOCATIONS, NO_BITS = 4, 8  # types of sections
WRITABLE, IN_MEMORY, EXECUTABLE, INFO_IS_SECTION = 1, 2, 4, 0x40  # flags of sections
PROGRAM_HEADERS, LOADED = 6, 1  # types of segments
READABLE = 4  # flag of segments
SIZED = 4  # format of an attribute with values after it
SYMBOL_BITS = 24  # bits of a symbol in the sh_info of .text
FIRST_MARK = 0xFFFFFFFC  # entries of the call graph with this number or a higher one are no symbols

VARIABLES = (".nv.constant4", ".nv.global.init", ".nv.global")

# Attributes whose first value is a symbol: PARAM_CBANK, FRAME_SIZE, MIN_STACK_SIZE, REGCOUNT
OF_SYMBOLS = {0x0A, 0x11, 0x12, 0x2F}
# All other attributes that the kernels have. They name no symbol.
OF_CODE = {0x05, 0x17, 0x19, 0x1B, 0x1C, 0x1E, 0x28, 0x29, 0x31, 0x36, 0x37, 0x38, 0x39, 0x44, 0x50, 0x54, 0x55}


class UnknownContents(Exception):
    """The cubin has contents whose references to symbols are not known."""


@dataclass
class Section:
    name: str
    type: int
    flags: int
    address: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int
    data: bytes  # empty with NO_BITS

    @property
    def relocated(self) -> int | None:
        """The number of the section that these relocations change."""
        return self.info if self.type == RELOCATIONS else None


@dataclass
class Cubin:
    header: tuple
    sections: list[Section]

    @classmethod
    def read(cls, data: bytes) -> Cubin:
        header = HEADER.unpack_from(data)
        offset, count, names = header[6], header[12], header[13]
        found = [SECTION.unpack_from(data, offset + i * SECTION.size) for i in range(count)]
        table = _contents(data, found[names])
        return cls(
            header,
            [Section(_text(table, fields[0]), *fields[1:4], *fields[5:], _contents(data, fields)) for fields in found],
        )

    def write(self) -> bytes:
        """The ELF file, laid out as ptxas does."""
        table = _section(self.sections, ".shstrtab").data
        out, offsets = bytearray(HEADER.size), []
        for section in self.sections:
            _align(out, section.align)
            offsets.append(len(out) if section.type else 0)
            out += section.data
        _align(out, 8)
        table_offset = len(out)
        for section, offset in zip(self.sections, offsets, strict=True):
            fields = (section.type, section.flags, section.address, offset, section.size, section.link, section.info)
            out += SECTION.pack(_find(table, section.name), *fields, section.align, section.entry_size)
        segments = self._segments(offsets, len(out))
        segments_offset = len(out)
        out += b"".join(SEGMENT.pack(*segment) for segment in segments)
        fields = list(self.header)
        fields[5], fields[6] = segments_offset, table_offset
        fields[10], fields[12] = len(segments), len(self.sections)
        fields[13] = [section.name for section in self.sections].index(".shstrtab")
        out[: HEADER.size] = HEADER.pack(*fields)
        return bytes(out)

    def _segments(self, offsets: list[int], at: int) -> list[tuple]:
        """The program headers: two for the table of program headers itself, then one for each run of sections in memory
        with the same rights."""
        runs: list[list[int]] = []
        for i, section in enumerate(self.sections):
            if not section.flags & IN_MEMORY:
                continue
            if runs and runs[-1][-1] == i - 1 and _rights(self.sections[i - 1]) == _rights(section):
                runs[-1].append(i)
            else:
                runs.append([i])
        size = (2 + len(runs)) * SEGMENT.size
        segments = [(kind, READABLE, at, 0, 0, size, size, 8) for kind in (PROGRAM_HEADERS, LOADED)]
        for run in runs:
            first, last = offsets[run[0]], self.sections[run[-1]]
            in_file = offsets[run[-1]] + len(last.data) - first
            in_memory = in_file + sum(self.sections[i].size for i in run if self.sections[i].type == NO_BITS)
            segments.append((LOADED, _rights(self.sections[run[0]]), first, 0, 0, in_file, in_memory, 8))
        return segments


def strip(cubin: bytes, ptx: str) -> bytes:
    """The cubin without its variables. The cubin as it is, if a function of its PTX mentions a variable, or if the
    cubin has unknown contents."""
    found = Cubin.read(cubin)
    dropped = {i for i, section in enumerate(found.sections) if section.name in VARIABLES}
    dropped |= {i for i, section in enumerate(found.sections) if section.relocated in dropped}
    table = _section(found.sections, ".symtab")
    symbols = [SYMBOL.unpack(table.data[i : i + SYMBOL.size]) for i in range(0, table.size, SYMBOL.size)]
    names = _section(found.sections, ".strtab").data
    kept = [i for i, symbol in enumerate(symbols) if symbol[3] not in dropped]
    variables = {_text(names, symbol[0]) for symbol in symbols if symbol[3] in dropped}
    if not dropped or variables & mentioned(ptx):
        return cubin
    new_symbol = {old: new for new, old in enumerate(kept)}
    new_section = {old: new for new, old in enumerate(i for i in range(len(found.sections)) if i not in dropped)}
    try:
        _renumber(found, dropped, new_symbol)
    except (KeyError, UnknownContents):
        return cubin
    text = _shortened(names, {_text(names, symbols[i][0]) for i in kept})
    _section(found.sections, ".strtab").data = text
    of_sections = _section(found.sections, ".shstrtab")
    of_sections.data = _shortened(of_sections.data, {found.sections[i].name for i in new_section})
    table.data = b"".join(
        SYMBOL.pack(_find(text, _text(names, name)), kind, other, new_section.get(section, section), *rest)
        for name, kind, other, section, *rest in (symbols[i] for i in kept)
    )
    table.info = sum(1 for i in kept if i < table.info)
    for section in found.sections:
        if section.type != NO_BITS:
            section.size = len(section.data)
        section.link = new_section[section.link]
        if section.flags & INFO_IS_SECTION or section.type == RELOCATIONS:
            section.info = new_section.get(section.info, 0)
    found.sections = [section for i, section in enumerate(found.sections) if i not in dropped]
    return found.write()


def mentioned(ptx: str) -> set[str]:
    """The names in the PTX, except names that occur only in declarations of variables."""
    declaration = r"^\s*(?:\.(?:visible|weak|extern|common)\s+)*\.(?:global|const)\b[^;]*;"
    code = re.sub(declaration, "", ptx, flags=re.MULTILINE)
    return set(re.findall(r"[\w$%]+", code))


def _renumber(cubin: Cubin, dropped: set[int], new_symbol: dict[int, int]) -> None:
    """Writes the symbols' new numbers into the sections that are kept. Raises KeyError if such a section refers to a
    dropped symbol."""
    for i, section in enumerate(cubin.sections):
        if i in dropped:
            continue
        if section.type == RELOCATIONS:
            entries = RELOCATION.iter_unpack(section.data)
            section.data = b"".join(
                RELOCATION.pack(offset, new_symbol[info >> 32] << 32 | info & 0xFFFFFFFF, addend)
                for offset, info, addend in entries
            )
        elif section.name.startswith(".nv.info"):
            section.data = _attributes(section.data, new_symbol)
        elif section.name == ".nv.callgraph":
            words = struct.iter_unpack("<I", section.data)
            section.data = b"".join(struct.pack("<I", x if x >= FIRST_MARK else new_symbol[x]) for (x,) in words)
        elif section.flags & EXECUTABLE:
            low = (1 << SYMBOL_BITS) - 1
            section.info = section.info & ~low | new_symbol[section.info & low]


def _attributes(data: bytes, new_symbol: dict[int, int]) -> bytes:
    out, position = bytearray(data), 0
    while position < len(data):
        form, attribute, size = ATTRIBUTE.unpack_from(data, position)
        if attribute not in OF_SYMBOLS | OF_CODE:
            raise UnknownContents
        position += ATTRIBUTE.size
        if attribute in OF_SYMBOLS:
            [symbol] = struct.unpack_from("<I", data, position)
            struct.pack_into("<I", out, position, new_symbol[symbol])
        position += size if form == SIZED else 0
    return bytes(out)


def _shortened(table: bytes, kept: set[str]) -> bytes:
    """The table of strings with only the strings in `kept`, in their order."""
    return b"".join(x + b"\0" for x in table[:-1].split(b"\0") if not x or x.decode() in kept)


def _find(table: bytes, name: str) -> int:
    """The offset of the string. The empty string is at the start."""
    return table.index(b"\0" + name.encode() + b"\0") + 1 if name else 0


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _contents(data: bytes, fields: tuple) -> bytes:
    return b"" if fields[1] in (0, NO_BITS) else data[fields[4] : fields[4] + fields[5]]


def _section(sections: list[Section], name: str) -> Section:
    return next(section for section in sections if section.name == name)


def _rights(section: Section) -> int:
    return READABLE | (2 if section.flags & WRITABLE else 0) | (1 if section.flags & EXECUTABLE else 0)


def _align(out: bytearray, alignment: int) -> None:
    out += bytes(-len(out) % max(alignment, 1))
