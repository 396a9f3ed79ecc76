"""build_tools/strip.py: cubins without the variables that their code does not use."""

import importlib.util
import re
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Only for these imports: otherwise later ones would find the checkout's flash_qla/, which may hold no library.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT)
    from build_tools import nvrtc, strip as module, toolchain
    from build_tools.strip import Cubin, strip

SOURCE = """
struct Limits { static constexpr int most = 7; };
static constexpr float table[4] = {1, 2, 3, 4};
__shared__ int space[32];
__device__ __noinline__ int call(int x) { return __shfl_sync(~0u, x, 3) / (x | 1); }
extern "C" __global__ void first(int* x, long y) { space[threadIdx.x % 32] = *x; __syncthreads(); *x = call(space[y]); }
extern "C" __global__ void second(float* x) { *x += Limits::most; }
"""
USED = 'extern "C" __global__ void third(float* x, int i) { *x = table[i]; }\n'


def compile_raw(source: str, folder: Path) -> tuple[bytes, str]:
    """The cubin as the compiler leaves it, and its PTX."""
    compiler = nvrtc.Compiler(toolchain.find_toolkit(), [folder])
    compiler.options = [option for option in compiler.options if not option.startswith("--pre-include")]
    path = folder / "source.cu"
    path.write_text(source)
    found = []
    nvrtc_strip, nvrtc.strip = nvrtc.strip, lambda cubin, ptx: found.extend((cubin, ptx)) or cubin
    try:
        compiler.compile(path)
    finally:
        nvrtc.strip = nvrtc_strip
    return tuple(found)


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> tuple[bytes, str]:
    pytest.importorskip("tilelang", reason="needs TileLang (in the `test` extra)")
    return compile_raw(SOURCE, tmp_path_factory.mktemp("strip"))


def symbols_of(cubin: Cubin) -> list[tuple]:
    """(name, type, section's name, value, size) of each symbol."""
    data = {section.name: section.data for section in cubin.sections}
    table = data[".symtab"]
    found = [module.SYMBOL.unpack_from(table, at) for at in range(0, len(table), module.SYMBOL.size)]
    return [
        (module._text(data[".strtab"], name), kind, cubin.sections[section].name, value, size)
        for name, kind, _, section, value, size in found
    ]


def references(cubin: Cubin) -> list[tuple]:
    """What refers to symbols and to sections, by names."""
    symbols, found = symbols_of(cubin), []
    for section in cubin.sections:
        if section.name in module.VARIABLES or section.name == f".rela{module.VARIABLES[0]}":
            continue
        found.append((section.name, "link", cubin.sections[section.link].name))
        if section.type == module.RELOCATIONS or section.flags & module.INFO_IS_SECTION:
            found.append((section.name, "section", cubin.sections[section.info].name))
        if section.type == module.RELOCATIONS:
            entries = module.RELOCATION.iter_unpack(section.data)
            found += [(section.name, offset, symbols[info >> 32]) for offset, info, _ in entries]
        if section.name.startswith(".text"):
            found.append((section.name, section.info >> 24, symbols[section.info & 0xFFFFFF]))
        if section.name == ".nv.info":
            words = struct.unpack(f"<{section.size // 4}I", section.data)
            found += [
                (section.name, words[i] >> 8, symbols[words[i + 1]], words[i + 2]) for i in range(0, len(words), 3)
            ]
        if section.name == ".nv.callgraph":
            words = [x for (x,) in struct.iter_unpack("<I", section.data)]
            found += [(section.name, x if x >= module.FIRST_MARK else symbols[x]) for x in words]
    return found


@pytest.mark.build
def test_only_the_variables_go(raw):
    before, after = Cubin.read(raw[0]), Cubin.read(strip(*raw))
    kept = [section for section in before.sections if section.name in {section.name for section in after.sections}]
    gone = {section.name for section in before.sections} - {section.name for section in after.sections}
    assert {".nv.constant4", ".rela.nv.constant4"} <= gone <= {*module.VARIABLES, ".rela.nv.constant4"}
    assert [section.name for section in kept] == [section.name for section in after.sections]
    for old, new in zip(kept, after.sections, strict=True):
        if old.name.startswith((".text", ".nv.shared", ".nv.constant0", ".debug")):
            assert (old.data, old.size, old.flags, old.align) == (new.data, new.size, new.flags, new.align)
    symbols = symbols_of(after)
    assert symbols == [symbol for symbol in symbols_of(before) if symbol[2] not in gone]
    assert {"first", "second"} <= {name for name, *_ in symbols}
    assert not any("Limits" in name or "table" in name for name, *_ in symbols)
    assert references(after) == references(before)


@pytest.mark.build
def test_segments(raw):
    """Each program header covers its sections, as in the compiler's file."""
    for data in (raw[0], strip(*raw)):
        cubin = Cubin.read(data)
        header = module.HEADER.unpack_from(data)
        found = [module.SEGMENT.unpack_from(data, header[5] + i * module.SEGMENT.size) for i in range(header[10])]
        offsets = [module.SECTION.unpack_from(data, header[6] + i * module.SECTION.size)[4] for i in range(header[12])]
        assert cubin._segments(offsets, header[5]) == found
        assert header[5] + header[10] * module.SEGMENT.size == len(data)


@pytest.mark.build
def test_variables_that_are_used_stay(tmp_path):
    pytest.importorskip("tilelang", reason="needs TileLang (in the `test` extra)")
    cubin, ptx = compile_raw(SOURCE + USED, tmp_path)
    assert strip(cubin, ptx) == cubin
    assert strip(cubin, "") != cubin


@pytest.mark.build
def test_what_is_not_known_stays(raw, monkeypatch):
    monkeypatch.setattr(module, "OF_CODE", module.OF_CODE - {0x1C})  # EXIT_INSTR_OFFSETS
    assert strip(*raw) == raw[0]


def test_declarations_mention_nothing():
    ptx = """
.global .align 4 .u32 counter = 3;
.visible .global .align 8 .u64 table[2] = {1, generic(other)};
.const .align 4 .f32 factor;
.visible .entry first(.param .u64 first_param_0) { ld.global.u32 %r1, [used]; }
"""
    assert {"used", "first", "first_param_0"} <= module.mentioned(ptx)
    assert not {"counter", "table", "other", "factor"} & module.mentioned(ptx)


def test_every_cubin_of_the_library_is_stripped():
    package = next(Path(path) for path in importlib.util.find_spec("flash_qla").submodule_search_locations)
    library = (package / "libflash_qla.so").read_bytes()
    starts = [found.start() for found in re.finditer(rb"\x7fELF\x02\x01\x01\x33", library)]
    assert len(starts) > 50
    for start in starts:
        cubin = Cubin.read(library[start : start + 2**20])
        assert not {section.name for section in cubin.sections} & set(module.VARIABLES)
        kinds = [kind for _, kind, *_ in symbols_of(cubin)]
        assert sum(kind == 0x12 for kind in kinds) == 1  # a global function
