"""The build: what it says when it fails, and that it builds nothing twice.

Everything runs in subprocesses, as in a build, on a small kernel package of its own. The file is long because nearly
all tests build that package.
"""

import ast
import importlib.metadata
import importlib.util
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The module is loaded by its path, because the checkout is not on sys.path.
_spec = importlib.util.spec_from_file_location("toolchain", ROOT / "build_tools/toolchain.py")
toolchain = sys.modules["toolchain"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toolchain)

# Documents and scripts that name versions of what builds the project
VERSIONED = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / ".ci/run", *(ROOT / ".github").rglob("*.yml")]
VERSIONED.remove(ROOT / "CHANGELOG.md")

needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None, reason="needs TileLang (in the `test` extra)"
)

KERNELS = {
    "instances.py": """
from build_tools.instance import EVERY, Instance

INSTANCES = [
    Instance("scale", {"dtype": "bfloat16"}),
    Instance("scale", {"dtype": "float16"}),
    Instance("follow", architectures=EVERY),
]
""",
    "common.py": "THREADS = 128\n",
    "scale.py": """
import tilelang.language as T


def scale(dtype):
    N = T.dynamic("N")

    @T.prim_func
    def main(x: T.Tensor([N], dtype), factor: T.float32, y: T.Tensor([N], dtype)):
        with T.Kernel(T.ceildiv(N, 128), threads=128) as i:
            for j in T.Parallel(128):
                y[i * 128 + j] = T.Cast(dtype, T.Cast("float32", x[i * 128 + j]) * factor)

    return main
""",
    "follow.py": """
import tilelang.language as T

from fixture_kernels.common import THREADS


def follow():
    N = T.dynamic("N")

    @T.prim_func
    def main(x: T.Tensor([N], "float32")):
        with T.Kernel(T.ceildiv(N, THREADS), threads=THREADS) as i:
            T.pdl_sync()
            for j in T.Parallel(THREADS):
                x[i * THREADS + j] += 1.0

    return main
""",
}

# A bundle of a tensor, a size and a scalar, as two kernels take it; the second has it in another bundle, and writes its
# tensor.
BUNDLES = {
    "instances.py": """
from build_tools.instance import Instance

INSTANCES = [
    Instance("read", {"which": "first"}, facts={"rows": 8, "is_first": True}),
    Instance("read", {"which": "second"}, facts={"rows": 4, "is_first": False}),
    Instance("write"),
]
""",
    "rows.py": """
import tilelang.language as T

from build_tools.bundle import Bundle


class Rows(Bundle):
    def __init__(self):
        N = T.dynamic("N")
        super().__init__(x=T.Tensor([N], "float32"), N=N, factor=T.float32, unused=T.int32)


class Scale(Bundle):
    repeats = True

    def __init__(self):
        super().__init__(factor=T.float32)


class Table(Bundle):
    def __init__(self):
        super().__init__(count=T.int32, rows=Rows(), left=Scale(), right=Scale())
""",
    "read.py": """
import tilelang.language as T

from fixture_kernels.rows import Rows


def read(which):
    rows = Rows()

    @T.prim_func
    def main(rows: rows, y: T.Tensor([rows.N], "float32")):
        with T.Kernel(T.ceildiv(rows.N, 128), threads=128) as i:
            for j in T.Parallel(128):
                y[i * 128 + j] = rows.x[i * 128 + j] * rows.factor

    return main
""",
    "write.py": """
import tilelang.language as T

from fixture_kernels.rows import Table


def write():
    @T.prim_func
    def main(table: Table()):
        with T.Kernel(T.ceildiv(table.rows.N, 128), threads=128) as i:
            for j in T.Parallel(128):
                table.rows.x[i * 128 + j] = table.rows.factor * table.left.factor + table.right.factor

    return main
""",
}

# Not among the instances: lowered only.
TWO_TILES = """
import tilelang.language as T


def scale(dtype):
    @T.prim_func
    def main(a: T.Tensor([64, 64], dtype), c: T.Tensor([64, 64], dtype)):
        with T.Kernel(1, threads=128):
            a_s = T.alloc_shared([64, 64], dtype)
            b_s = T.alloc_shared([64, 64], dtype)
            LOOP
            for i, j in T.Parallel(64, 64):
                c[i, j] = a_s[i, j] + b_s[j, i]

    return main
"""

TILES = """
import tilelang.language as T


def tiles():
    N, H = T.dynamic("N"), T.dynamic("H")

    @T.prim_func
    def main(
        x: T.Tensor([N, H, 128], "bfloat16"),
        y: T.Tensor([N, H, 128], "bfloat16"),
        z: T.Tensor([N, 128], "bfloat16"),
    ):
        with T.Kernel(H, threads=128) as h:
            large = T.alloc_shared([64, 128], "bfloat16")
            small = T.alloc_shared([32, 128], "bfloat16")
            for n in T.Pipelined(T.ceildiv(N, 64), num_stages=2):
                T.copy(x[n * 64 : n * 64 + 64, h, 0:128], large)
                T.copy(x[n * 64 : n * 64 + 32, h, 0:128], small)
                for i, j in T.Parallel(32, 128):
                    large[i, j] += small[i, j]
                T.copy(large, y[n * 64 : n * 64 + 64, h, 0:128])
            # rank, sizes, strides, box, element strides; no interleaving, swizzle, promotion; zeros out of bounds
            T.call_extern(
                "handle",
                "use",
                0,
                T.create_tma_descriptor(9, 2, z.data, 128, N, 2, 256, 64, 8, 1, 1, 0, 0, 0, 0),
            )

    return main
"""


def write_package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "fixture_kernels"
    package.mkdir(parents=True)
    for name, text in files.items():
        (package / name).write_text(text)
    return package


def build_kernels(package: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "build_tools.kernels", "--kernels", package, "--out", package.parent / "out"]
    return run([*command, *options], **environment)


def run(command: list, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The fixture package, built once. Tests that change it work on copies."""
    package = write_package(tmp_path_factory.mktemp("build"), KERNELS)
    result = build_kernels(package)
    assert result.returncode == 0, result.stderr
    for name, of_code in (("scale_bf16", ", "), ("scale_fp16", ", "), ("follow", "; sm_80 ")):
        resources = rf"{of_code}\d+ registers, 0 B spills, \d+ KB shared"
        progress = rf"\[\d/3\] {name}: lowered [\d.]+ s, compiled [\d.]+ s{resources}"
        assert re.search(progress, result.stdout)
    return package


@pytest.fixture
def copy_of_built(built, tmp_path) -> Path:
    shutil.copytree(built.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / built.name


@pytest.mark.build
@needs_tilelang
class TestCache:
    def test_nothing_changed_builds_nothing(self, copy_of_built):
        # Other time stamps and another folder, as in pip's throw-away environments.
        for path in copy_of_built.iterdir():
            os.utime(path)
        launchers = copy_of_built.parent / "out/launchers.cpp"
        before = launchers.stat().st_mtime_ns
        result = build_kernels(copy_of_built)
        assert result.returncode == 0, result.stderr
        assert re.findall(r"(\w+): cached", result.stdout) == ["scale_bf16", "scale_fp16", "follow"]
        assert "lowered" not in result.stdout
        assert launchers.stat().st_mtime_ns == before

    def test_a_changed_import_rebuilds_its_users_only(self, copy_of_built):
        (copy_of_built / "common.py").write_text("THREADS = 256\n")
        result = build_kernels(copy_of_built)
        assert result.returncode == 0, result.stderr
        assert re.findall(r"(\w+): cached", result.stdout) == ["scale_bf16", "scale_fp16"]
        assert re.findall(r"(\w+): lowered", result.stdout) == ["follow"]
        registry = (copy_of_built.parent / "out/registry.cpp").read_text()
        assert re.search(r'\{"follow", "follow", "", "sm_80", 256, ', registry)

    def test_another_cubin_is_another_source(self, copy_of_built):
        """So that it is embedded anew."""
        out = copy_of_built.parent / "out"
        before = (out / "launchers.cpp").read_text().splitlines()
        with (out / "follow.sm_120.cubin").open("ab") as cubin:
            cubin.write(b"more")
        assert build_kernels(copy_of_built).returncode == 0
        after = (out / "launchers.cpp").read_text().splitlines()
        assert {re.sub(r"\d+|// \w+", "", new) for old, new in zip(before, after, strict=True) if old != new} == {
            "",
            "    .packed = follow_sm__lzma_packed, .packed_bytes = , .bytes = };",
        }

    def test_spills_over_the_budget_fail(self, copy_of_built):
        self.edit_record(copy_of_built, "scale_bf16", lambda record: self.resources(record).update(spill_bytes=48))
        result = build_kernels(copy_of_built)
        assert result.returncode == 1
        assert "kernel scale_bf16 spills 48 bytes, its budget is 0" in result.stderr
        assert build_kernels(copy_of_built, FLASH_QLA_ALLOW_SPILLS="1").returncode == 0

    def test_remarks_about_speed_fail(self, copy_of_built):
        remark = "ptxas info    : (C7518) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        self.edit_record(copy_of_built, "scale_bf16", lambda record: record["remarks"].append(remark))
        result = build_kernels(copy_of_built)
        assert result.returncode == 1
        assert f"kernel scale_bf16: {remark}" in result.stderr

    def test_too_much_shared_memory_fails(self, copy_of_built):
        def edit(record):
            self.resources(record)["static_shared_bytes"] = 1024
            record["shared_bytes"] = 226 * 1024 + 64

        self.edit_record(copy_of_built, "scale_bf16", edit)
        result = build_kernels(copy_of_built)
        assert result.returncode == 1
        assert "kernel scale_bf16 takes 232512 bytes of shared memory, a CTA has 232448" in result.stderr

    def test_instances_of_a_kernel_share_their_arguments(self, copy_of_built):
        self.edit_record(copy_of_built, "scale_fp16", lambda record: record["fields"].pop())
        result = build_kernels(copy_of_built)
        assert result.returncode == 1
        assert "scale_bf16 and scale_fp16 are instances of one kernel, but differ in" in result.stderr

    def test_portable_code_has_the_least_shared_memory_of_all_gpus(self, copy_of_built):
        self.edit_record(copy_of_built, "follow", lambda record: record.update(shared_bytes=99 * 1024 + 16))
        result = build_kernels(copy_of_built)
        assert result.returncode == 1
        assert "kernel follow takes 101392 bytes of shared memory, a CTA has 101376" in result.stderr

    @staticmethod
    def resources(record: dict) -> dict:
        (used,) = record["resources"].values()
        return used

    @staticmethod
    def edit_record(package: Path, name: str, edit) -> None:
        path = package.parent / f"out/{name}.json"
        record = json.loads(path.read_text())
        edit(record)
        path.write_text(json.dumps(record))


INCLUDED = {
    "layout.py": "ROWS = 8\n",
    "rows.cuh": '#include "layout.h"\n',
    "sums.cuh": '#include "rows.cuh"\n',
    "other.cuh": "",
    "sizes.py": "THREADS = 128\n",
    "common.py": "from fixture_kernels.sizes import THREADS\n",
    "add.py": 'from fixture_kernels.common import THREADS\n\nSOURCE = """\n#include "sums.cuh"\n"""\n',
    "copy.py": 'SOURCE = """\n#include "other.cuh"\n"""\n',
}


@pytest.mark.build
@needs_tilelang
def test_a_kernel_is_out_of_date_after_a_change_of_any_of_its_files(tmp_path):
    """Of what it imports and includes, directly or not, and of the constants that a header has from layout.py."""
    package = write_package(tmp_path, INCLUDED)
    program = (
        "import sys; from pathlib import Path; from build_tools.instance import Instance\n"
        "from build_tools.kernels import Builder\n"
        "package = Path(sys.argv[1]); sys.path.insert(0, str(package.parent))\n"
        "def hashes():\n"
        "    builder = Builder(package, package.parent / 'out')\n"
        "    return {name: builder.content_hash(Instance(name)) for name in ('add', 'copy')}\n"
        "for file in sys.argv[2:]:\n"
        "    before = hashes()\n"
        "    with (package / file).open('a') as x: x.write('\\n')\n"
        "    print(file, *(name for name, of_sources in hashes().items() if of_sources != before[name]))\n"
    )
    result = run([sys.executable, "-c", program, package, *INCLUDED])
    assert result.returncode == 0, result.stderr
    users = dict.fromkeys(INCLUDED, "add") | {"other.cuh": "copy", "copy.py": "copy"}
    assert result.stdout.splitlines() == [f"{file} {user}" for file, user in users.items()]


@pytest.mark.build
@needs_tilelang
def test_bundles(tmp_path):
    """One struct for both kernels, whose tensor is not const as one of them writes it, before the struct that has it;
    and enumerators for strings."""
    package = write_package(tmp_path, BUNDLES)
    result = build_kernels(package)
    assert result.returncode == 0, result.stdout
    header = (package.parent / "out/kernels.h").read_text()
    rows = "struct Rows {\n  void* x;\n  int64_t N;\n  float factor;\n  int64_t unused;\n};\n"
    assert header.count(rows) == header.count("struct Rows") == 1, header
    assert "struct ReadArgs {\n  Rows rows;\n  void* y;\n};" in header
    assert "struct WriteArgs {\n  Table table;\n};" in header
    table = "struct Table {\n  int64_t count;\n  Rows rows;\n  Scale left;\n  Scale right;\n};\n"
    assert header.count("struct Scale {\n  float factor;\n};\n") == 1, header
    assert "struct ReadFacts {\n  int64_t rows;\n  bool is_first;\n};" in header
    assert "if (params.which == Which::kSecond) return {4, false};" in header
    assert header.count(table) == header.count("struct Table") == 1 and rows in header.partition(table)[0], header
    assert "enum class Which { kFirst, kSecond };" in header and "struct ReadParams {\n  Which which;\n};" in header
    launchers = (package.parent / "out/launchers.cpp").read_text()
    used = {"args.rows.factor", "args.table.rows.factor", "args.table.left.factor", "args.table.right.factor"}
    assert used <= set(re.findall(r"args[.\w]*", launchers))
    assert "unused" not in launchers and "count" not in launchers
    registry = (package.parent / "out/registry.cpp").read_text()
    assert "if (params.which == Which::kFirst) return launch_read_first(args, stream);" in registry


@pytest.mark.build
@needs_tilelang
def test_unused_variables_do_not_reach_ptxas(built, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from build_tools.nvrtc import without_unused_variables

    unused = (
        ".global .align 4 .b8 _ZN7cutlass5widthE[4] = {32, 0, 0, 0};\n"
        ".visible .const .align 1 .b8 _ZN4cute1_E;\n"
        ".weak .global .align 8 .u64 first = second;\n"
    )
    used = ".const .align 8 .b8 table[16];\n.extern .shared .align 1024 .b8 buffer[];\n"
    code = ".visible .entry kernel() {\n\tld.const.u32 %r1, [table];\n}\n"
    assert without_unused_variables(unused + used + code) == used + code
    ptx = (built.parent / "out/scale_fp16.compute_90a.ptx").read_text()
    assert ".entry scale_fp16" in ptx and not re.search(r"^\.(global|const) ", ptx, re.MULTILINE)


def test_ptx_of_each_cubin():
    """NVRTC runs once or twice for an instance, ptxas for each cubin."""
    code = (
        "import json; from build_tools.instance import *\n"
        "every, portable = (Instance('room.kernel', architectures=x) for x in (EVERY, PORTABLE))\n"
        "print(json.dumps([every.cubins, every.measured, portable.cubins, portable.measured]))"
    )
    assert json.loads(run([sys.executable, "-c", code]).stdout) == [
        {"sm_80": "compute_80", "sm_90": "compute_90", "sm_100": "compute_90", "sm_120": "compute_90"},
        "sm_90",
        dict.fromkeys(("sm_80", "sm_100", "sm_120"), "compute_80"),
        "sm_80",
    ]


@pytest.mark.build
@needs_tilelang
def test_only_kernels_that_wait_overlap_their_predecessor(built):
    launchers = (built.parent / "out/launchers.cpp").read_text()
    tables = re.findall(r"^static runtime::Code codes_of_(\w+)\[\] = {(.*?)^}", launchers, re.MULTILINE | re.DOTALL)
    code = r'architecture = "(\w+)".* .overlaps_predecessor = (\w+)'
    overlapping = {
        name: [arch for arch, overlaps in re.findall(code, rows) if overlaps == "true"] for name, rows in tables
    }
    assert overlapping == {"scale_bf16": [], "scale_fp16": [], "follow": ["sm_90", "sm_100", "sm_120"]}


@pytest.mark.build
@needs_tilelang
def test_a_tensor_has_a_descriptor_for_each_tile(tmp_path):
    package = write_package(tmp_path, KERNELS | {"tiles.py": TILES})
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from build_tools.instance import Instance\n"
        "from build_tools.lower import lower\n"
        "lowered = lower('fixture_kernels', Instance('tiles'))\n"
        "print([(tma.tensor, tma.box[1], tma.strides[1:]) for tma in lowered.tensor_maps])\n"
        "print([field.c_type for field in lowered.fields])\n"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    strides = "['(args.H * 256)', '256']"
    tiles, types = result.stdout.splitlines()[-2:]
    assert sorted(re.findall(r"'(\w)', '(\d+)'", tiles)) == [("x", "32"), ("x", "64"), ("y", "64"), ("z", "8")]
    assert tiles.count(strides) == 3
    # The function may write z through its descriptor.
    assert types == "['const void*', 'void*', 'void*', 'int64_t', 'int64_t']"


@pytest.mark.build
@needs_tilelang
class TestPatches:
    """build_tools/tilelang_patches.py."""

    # Lowers an instance, and again without one patch after the other: whether the code differs, and where it should.
    PROGRAM = """
import json
from unittest import mock
from build_tools import tilelang_patches as patches
from build_tools.lower import lower
from kernels_tl.instances import INSTANCES

(instance,) = [each for each in INSTANCES if each.name == "segment_scan_bf16_K128_no_reverse_columns32"]
configs = patches.pass_configs

def lowered():
    return lower("kernels_tl", instance).source

def without(patch, replacement):
    with mock.patch.object(patches, patch, replacement):
        return lowered()

def without_config(name):
    return without("pass_configs", lambda module: {k: v for k, v in configs(module).items() if k != name})

ours = lowered()
nothing = patches.contextlib.nullcontext
print(json.dumps({
    "patched": ours,
    "no_negative_indices": without("no_negative_indices", nothing),
    "no_inferred_fences": without("no_inferred_fences", nothing),
    "uniform_warpgroups": without("uniform_warpgroups", lambda source: source),
    **{name: without_config(name) for name in patches.PASS_CONFIGS},
}))
"""

    def test_each_says_what_why_where_and_until_when(self):
        tree = ast.parse((ROOT / "build_tools/tilelang_patches.py").read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and "Change:" in str(node.value)
        ]
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        undocumented = [node.name for node in functions if ast.get_docstring(node, clean=False) not in texts]
        assert undocumented == ["pass_configs"]  # each of them has a text of its own
        labels = ["Change", "Why", "Upstream", "Until"]
        assert all(re.findall(r"^ *(\w+): ", text, re.MULTILINE) == labels for text in texts)
        known = r"Upstream: .*(tile-ai/tilelang#\d+|none filed that we know of)"
        assert all(re.search(known, text) for text in texts)

    def test_each_is_still_needed(self):
        result = run([sys.executable, "-c", self.PROGRAM])
        assert result.returncode == 0, result.stderr
        sources = json.loads(result.stdout.splitlines()[-1])
        ours = sources.pop("patched")
        # The pass is left out because it takes time, the option is a guard. Neither changes the code.
        same = [name for name, source in sources.items() if source == ours]
        assert same == ["no_negative_indices", "tl.disable_warp_specialized"]
        fences, barriers = (lambda source: source.count("fence_proxy_async")), (lambda source: source.count("__sync"))
        assert fences(sources["no_inferred_fences"]) > fences(ours)
        assert barriers(sources["tl.disable_thread_storage_sync"]) > barriers(ours)
        assert "warpgroup_of_cta" not in sources["uniform_warpgroups"]

    def test_an_option_without_a_reason(self, tmp_path):
        option = 'PASS_CONFIGS = {"tl.disable_vectorize_256": True}\n'
        package = write_package(tmp_path, KERNELS | {"scale.py": KERNELS["scale.py"] + option})
        result = build_kernels(package, "--only", "scale_fp16", "--sources")
        assert result.returncode == 1
        assert "PASS_CONFIGS has tl.disable_vectorize_256, which build_tools/tilelang_patches.py lacks" in result.stderr


@pytest.mark.build
@needs_tilelang
class TestFailures:
    def test_a_kernel_that_does_not_lower(self, tmp_path):
        broken = KERNELS["scale.py"].replace("for j in T.Parallel(128)", "for j in T.Parallel(nowhere)")
        result = build_kernels(write_package(tmp_path, KERNELS | {"scale.py": broken}), "--only", "scale_fp16")
        assert result.returncode == 1
        assert "error: kernel scale_fp16 does not lower: name 'nowhere' is not defined\n" in result.stderr
        assert "Traceback" in (tmp_path / "out/scale_fp16.log").read_text()

    def test_shared_buffers_of_one_name(self, tmp_path):
        """A loop variable bound to buffers would rename both, and two builds could place them differently."""
        loop = "for s in (a_s[:, :], b_s[:, :]):\n                T.copy(a[0:64, 0:64], s)"
        package = write_package(tmp_path, KERNELS | {"scale.py": TWO_TILES.replace("LOOP", loop)})
        assert build_kernels(package, "--only", "scale_bf16").returncode == 0
        loop = "for s in (a_s, b_s):\n                T.copy(a[0:64, 0:64], s)"
        (package / "scale.py").write_text(TWO_TILES.replace("LOOP", loop))
        result = build_kernels(package, "--only", "scale_bf16")
        assert result.returncode == 1
        assert "kernel scale_bf16 does not lower: two shared buffers are called s;" in result.stderr

    def test_a_kernel_that_does_not_parse(self, tmp_path):
        result = build_kernels(write_package(tmp_path, KERNELS | {"scale.py": "def scale(:\n"}))
        assert result.returncode == 1
        assert "error: kernel scale does not lower: invalid syntax" in result.stderr

    def test_a_kernel_that_crashes_the_compiler(self, tmp_path):
        crash = "import os\n\n\ndef scale(dtype):\n    os.abort()\n"
        result = build_kernels(write_package(tmp_path, KERNELS | {"scale.py": crash}), "--only", "scale_bf16")
        assert result.returncode == 1
        assert "error: kernel scale_bf16 crashed the compiler (exit status -6)" in result.stderr

    def test_a_kernel_that_does_not_compile(self, tmp_path):
        broken = KERNELS["follow.py"].replace("T.pdl_sync()", 'T.evaluate(T.call_extern("int32", "nowhere", 1))')
        result = build_kernels(write_package(tmp_path, KERNELS | {"follow.py": broken}), "--only", "follow")
        assert result.returncode == 1
        reason = (
            r'error: kernel follow does not compile: follow\.cu\((\d+)\): error: identifier "nowhere" is undefined\n'
        )
        line = int(re.search(reason, result.stderr).group(1))
        assert "nowhere(1)" in (tmp_path / "out/follow.cu").read_text().splitlines()[line - 1]
        assert f"its source: {tmp_path}/out/follow.cu, all messages: {tmp_path}/out/follow.log" in result.stderr
        assert '"nowhere" is undefined' in (tmp_path / "out/follow.log").read_text()

    def test_an_unknown_instance(self, tmp_path):
        result = build_kernels(write_package(tmp_path, KERNELS), "--only", "scale_fp32")
        assert result.returncode == 1
        assert "no instance or kernel is called scale_fp32; there are: scale_bf16, scale_fp16, follow" in result.stderr


class TestToolchain:
    @pytest.mark.parametrize("release", (None, "12.8.93"))
    def test_a_compiler_that_does_not_do(self, release, monkeypatch):
        def version(package):
            if package != "nvidia-cuda-nvrtc-cu12":
                return toolchain.CUDA_PACKAGES[package]
            if release is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return release

        monkeypatch.setattr(toolchain.importlib.metadata, "version", version)
        message = rf"compiler is missing: nvidia-cuda-nvrtc-cu12 12\.9\.86 \(found {release or 'none'}\)\. pip install "
        with pytest.raises(toolchain.BuildError, match=message) as error:
            toolchain.find_toolkit()
        assert all(f"{name}=={version}" in str(error.value) for name, version in toolchain.CUDA_PACKAGES.items())

    def test_packages_have_one_version(self):
        """Which the build's requirements decide. Tests build, too, so the extra of that name has the same pins."""
        pins = toolchain.PINS
        assert set(pins) > {"setuptools", "torch", "tilelang", *toolchain.CUDA_PACKAGES}
        build, extras = (ROOT / "pyproject.toml").read_text().split("\n[project]\n")
        assert all(f'"{name}=={version}"' in build for name, version in pins.items())
        assert set(toolchain.CUDA_PACKAGES) < {name for name, _ in self.pinned(extras)}
        for text in (extras, *(page.read_text() for page in VERSIONED)):
            assert [(name, version) for name, version in self.pinned(text) if version != pins.get(name, version)] == []

    @staticmethod
    def pinned(text: str) -> list[tuple[str, str]]:
        return re.findall(r"\b([\w-]+)==(\d[\w.]*)", text)

    def test_documents_name_these_versions(self):
        named = {"NVRTC": toolchain.CUDA_VERSION, "TileLang": toolchain.PINS["tilelang"]}
        pages = set()
        for page in VERSIONED:
            text = page.read_text().partition("## What was tested")[0]  # what follows is a record
            for tool, version in re.findall(r"\b(NVRTC|TileLang)\s+(\d[\d.]*\d)", text):
                assert f"{named[tool]}.".startswith(f"{version}."), (page, tool, version)
                pages.add(page.name)
        assert pages >= {"CONTRIBUTING.md", "wheels.md"}

    def test_the_oldest_torch_is_decided_once(self):
        """CMakeLists.txt has the stable ABI's version, in both of its spellings; users' torch is at least that."""
        cmake = (ROOT / "CMakeLists.txt").read_text()
        major, minor = re.search(r"^set\(TORCH_TARGET (\d+)\.(\d+)\)$", cmake, re.MULTILINE).groups()
        assert f"set(TORCH_TARGET_VERSION 0x{int(major):02x}{int(minor):02x}{0:012x})" in cmake
        assert f'dependencies = ["torch>={major}.{minor}"]' in (ROOT / "pyproject.toml").read_text()

    @pytest.mark.parametrize("jobs", ("abc", "-1", "0", "1.5"))
    def test_how_many_jobs(self, jobs, monkeypatch):
        monkeypatch.setenv("MAX_JOBS", jobs)
        with pytest.raises(toolchain.BuildError, match=f"MAX_JOBS is '{jobs}', expected how many"):
            toolchain.max_jobs()
        monkeypatch.setenv("MAX_JOBS", "3")
        assert toolchain.max_jobs() == 3

    def test_compilers_that_do_not_do(self, tmp_path, monkeypatch):
        gxx = tmp_path / "g++"
        monkeypatch.setenv("CXX", str(gxx))
        for script, message in (
            (None, "CXX is '.*', which is no program: g"),
            ("echo __clang_major__ 10", "g\\+\\+ is g\\+\\+ 10, too old: g\\+\\+ 11 or newer is needed"),
            ("exit 1", "does not run"),
        ):
            if script:
                gxx.write_text(f"#!/bin/sh\n{script}\n")
                gxx.chmod(0o755)
            with pytest.raises(toolchain.BuildError, match=message):
                toolchain.find_compiler()
        gxx.write_text("#!/bin/sh\necho __clang_major__ 11\n")
        assert toolchain.find_compiler() == gxx
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(toolchain.BuildError, match=r"neither c\+\+ nor g\+\+ is on PATH"):
            toolchain.find_compiler()

    def test_a_full_disk(self, tmp_path, monkeypatch):
        assert toolchain.full_disk(tmp_path) == ""
        monkeypatch.setattr(toolchain.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
        assert toolchain.full_disk(tmp_path) == f": the disk of {tmp_path} is full, 3 MB are free"


# A test's tree runs this instead of the build: CMake writes two lines of a file, half a second apart.
STUB = """cmake_minimum_required(VERSION 3.26)
project(stub LANGUAGES NONE)
file(WRITE ${CMAKE_BINARY_DIR}/flash_qla/built.py "compiler = '${CMAKE_CXX_COMPILER}'")
add_custom_target(all_of_it ALL
  COMMAND ${CMAKE_COMMAND} -E echo begin >> ${CMAKE_SOURCE_DIR}/log COMMAND sleep 0.5
  COMMAND ${CMAKE_COMMAND} -E echo end >> ${CMAKE_SOURCE_DIR}/log COMMAND test ! -e ${CMAKE_SOURCE_DIR}/fail)
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("setuptools", "cmake", "ninja", "pybind11", "tilelang"))),
    reason="needs what the build needs (in the `test` extra)",
)
class TestDriver:
    """setup.py, in a tree whose build is the stub."""

    @pytest.fixture
    def tree(self, tmp_path) -> Path:
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
        shutil.copytree(ROOT / "build_tools", tmp_path / "build_tools")
        (tmp_path / "flash_qla").mkdir()
        shutil.copy(ROOT / "flash_qla/_version.py", tmp_path / "flash_qla")
        (tmp_path / "CMakeLists.txt").write_text(STUB)
        return tmp_path

    def start(self, tree: Path, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=tree, env=os.environ | environment, **pipes)

    def test_two_at_once(self, tree):
        """One waits for the other, says so, and both have built."""
        both = [self.start(tree) for _ in range(2)]
        outputs = [build.communicate()[0] for build in both]
        assert [build.returncode for build in both] == [0, 0], outputs
        assert (tree / "log").read_text().split() == ["begin", "end"] * 2
        assert sum(f"waiting for another build in {tree}/build\n" in output for output in outputs) == 1
        assert (tree / "flash_qla/built.py").is_file()

    def test_which_compilers_it_takes(self, tree, tmp_path):
        gxx = tmp_path / "other-g++"
        gxx.write_text("#!/bin/sh\necho __clang_major__ 12\n")
        gxx.chmod(0o755)
        for environment, compiler in (({"CUDA_HOME": "/nowhere"}, shutil.which("c++")), ({"CXX": str(gxx)}, str(gxx))):
            build = self.start(tree, **environment)
            output = build.communicate()[0]
            assert build.returncode == 0, output
            assert f"kernels by NVRTC {toolchain.CUDA_VERSION} from PyPI, C++ by {compiler}\n" in output
            assert compiler in (tree / "flash_qla/built.py").read_text()

    def test_failures_end_in_one_sentence(self, tree):
        (tree / "fail").touch()
        last = {"MAX_JOBS": "-1"}, "error: MAX_JOBS is '-1', expected how many compilers may run at a time, 1 or more"
        failing = {}, "error: the build failed, see above (cmake exited with status 1)"
        for environment, sentence in (last, failing):
            build = self.start(tree, **environment)
            output = build.communicate()[0]
            assert build.returncode == 1
            assert output.splitlines()[-1].startswith(sentence) and "Traceback" not in output
        (tree / "fail").unlink()
        assert self.start(tree).wait() == 0

    def test_a_tree_that_cannot_be_written(self, tree):
        (tree / "build").write_text("no folder")
        build = self.start(tree)
        (line,) = build.communicate()[0].splitlines()
        assert build.returncode == 1
        assert line.startswith(f"error: the build keeps its files in {tree}/build, which cannot be written (")

    def test_wrong_tilelang(self):
        code = (
            "from build_tools import toolchain\n"
            "toolchain.importlib.metadata.version = lambda name: '0.1.14'\n"
            "toolchain.check_tilelang()"
        )
        result = run([sys.executable, "-c", code])
        assert result.returncode != 0
        assert re.search(r"TileLang \d+\.\d+\.\d+ is needed, found 0\.1\.14", result.stderr)


class TestInstalled:
    def test_registry_holds_every_instance(self):
        from flash_qla import _C

        code = (
            "import json; from kernels_tl.instances import INSTANCES\n"
            "print(json.dumps([[i.name, i.kernel, architecture, i.spill_budget, i.measured, i.params]"
            " for i in INSTANCES for architecture in i.architectures]))"
        )
        listed = json.loads(run([sys.executable, "-c", code]).stdout)
        kernels = _C.kernels()
        assert [[kernel.name, kernel.kernel, kernel.architecture] for kernel in kernels] == [row[:3] for row in listed]
        for kernel, (*_, spill_budget, measured, params) in zip(kernels, listed, strict=True):
            assert kernel.params == params
            assert 0 < kernel.threads <= 1024
            if kernel.architecture.startswith("compute_"):  # PTX
                assert kernel.registers == kernel.spill_bytes == kernel.static_shared_bytes == 0
                continue
            assert kernel.spill_bytes <= spill_budget or kernel.architecture != measured
            assert 0 < kernel.registers <= 255
            assert kernel.registers * kernel.threads <= 65536
            most = 227 if kernel.architecture == "sm_90a" else 99
            assert kernel.static_shared_bytes + kernel.dynamic_shared_bytes <= most * 1024

    def test_drivers_of_cuda_12_load_the_code(self):
        """The kernels are in the library's archives as ELF files of the version (7) that they know."""
        from flash_qla import _C

        folder = next(Path(path) for path in importlib.util.find_spec("flash_qla").submodule_search_locations)
        library = (folder / "libflash_qla.so").read_bytes()
        elf_files, targets = Counter(), []
        for start in re.finditer(rb"[\xd8\x03]\x00\x00\x80\x00\xff{8}", library):  # of archive.CUBINS and archive.PTX
            contents = lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(library[start.start() :])
            elf_of_gpu = rb"\x7fELF\x02\x01\x01(.)(.).{9}\xbe\x00"  # OS, ABI version, then type and machine
            elf_files.update(re.findall(elf_of_gpu, contents, re.DOTALL))
            targets += re.findall(rb"^\.target (\w+)$", contents, re.MULTILINE)
        architectures = Counter(kernel.architecture for kernel in _C.kernels())
        # Blackwell's drivers, from CUDA 12.8 on, know a newer version.
        blackwell = architectures["sm_100"] + architectures["sm_120"]
        assert elf_files[b"\x41", b"\x08"] == blackwell
        assert elf_files[b"\x33", b"\x07"] == sum(architectures[arch] for arch in ("sm_80", "sm_90", "sm_90a"))
        ptx = {b"sm_80": architectures["compute_80"], b"sm_90": architectures["compute_90"]}
        assert Counter(targets) == ptx

    def test_build_info(self):
        import flash_qla
        from flash_qla import _C

        info = _C.build_info()
        assert info.version == flash_qla.__version__ == importlib.metadata.version("flash-qla-aot")
        assert info.cuda == toolchain.CUDA_VERSION
        assert info.torch_target == "2.10"

    def test_the_wheel_requires_torch_only(self):
        required = [line for line in importlib.metadata.requires("flash-qla-aot") if "extra ==" not in line]
        assert required == ["torch>=2.10"]

    def test_the_command_prints_the_registry(self, tmp_path):
        from flash_qla import _C

        command = [sys.executable, "-m", "flash_qla", "--kernels"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        for kernel in _C.kernels():
            registers = "" if kernel.architecture.startswith("compute_") else f"{kernel.registers} "
            row = rf"^{kernel.name} .* {kernel.architecture} .* {registers}"
            assert re.search(row, result.stdout, re.MULTILINE)


def test_ci_runs_the_command_of_the_readme():
    commands = re.findall(r"^pip install .* && pytest$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len(commands) == 1
    assert commands[0] in (ROOT / "README.md").read_text().splitlines()


def test_the_workflow_runs_what_there_is():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    named = re.findall(r"(?:tests/\w+\.py|\.ci/run)", workflow)
    assert ".ci/run" in named and len(named) > 5 and all((ROOT / name).is_file() for name in named)


def test_actions_are_pinned():
    """By commit, because a tag can move; the token of a run can only read, but for the job that makes a release."""
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        text = workflow.read_text()
        used = re.findall(r"\buses: (.*)", text)
        assert used and all(re.match(r"[\w/-]+@[0-9a-f]{40} # v\d", x) for x in used), used
        others, _, release = text.partition("\n  release:\n    if: startsWith(github.ref, 'refs/tags/v')\n")
        assert "\npermissions:\n  contents: read\n" in others and others.count("permissions:") == 1
        assert not re.search(r"^  \w+:$", release, re.MULTILINE)  # the last job


def test_linters_have_one_version():
    ci, hooks = (ROOT / ".ci/run").read_text(), (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in ("ruff", "clang-format"):
        version = re.search(rf"{tool}==([\d.]+)", ci).group(1)
        assert re.search(rf"{tool}(-pre-commit)?\n +rev: v{version}\n", hooks)


@pytest.mark.parametrize(("folder", "name"), (("a,b", "comma"), ("a;b", "semicolon")))
def test_paths_that_cmake_would_split(tmp_path, folder, name):
    """One sentence, before anything is built."""
    checkout = tmp_path / folder
    for part in ("build_tools", "flash_qla", "setup.py", "pyproject.toml", "README.md"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, checkout / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(source, checkout / part)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1] == (
        f"error: the path {checkout} holds a {name}, where CMake or the compiler would split it: move it"
    )
