"""Kernels without a GPU: tests of the GPU run on the CPU, in emulation (emulator/build.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "build/kernels"

# Quick tests of each file, which together launch every kernel. The emulator has no streams and no graphs, and runs in
# one process.
SELECTED = {
    "test_every_op.py": "(order and not mode) or (outside and not prefill) or (layout and ready) or any_strides",
    "test_decode.py": "not (opcheck or compile)",
    "test_decode_buffered.py": "not (opcheck or compile or graph)",
    "test_decode_gpu.py": "not (graph or reported or many)",
    "test_float8.py": "not opcheck",
    "test_prefill.py": "first_slot or (a_hit and not wide_keys) or (wide_keys and 80-) or a_warp_sorts"
    " or (test_checkpoints and not wide_keys) or (test_kernels and 64-64)",
    "test_prefill_gpu.py": "not (graph or reported or many)",
    "test_forward.py": "tiny_vectors or keys_that_are_alike",
    "test_backward.py": "tiny_vectors",
    "test_backward_isolation.py": "of_one_kind",
    "test_resets.py": "test_beta_of_zero and hard",
    "test_head_dims.py": "test_autograd or (test_modes_of_the_forward and fused and 328 and softplus)",
    "test_context_parallel.py": "((threshold or left_out or bound_knows) and fused and not backward) or scans"
    " or (picks and 64-128-3) or (more_maps and not 256) or (device_cuts and 330 and 128-1)"
    " or (more_sequences and 300 and fused and not segment1)",
    "test_begin_finish.py": "decayed or negligible or (recurrence and (tiny or l2norm or zero and (184 or 192)))",
    "test_max_seqlen.py": "launched",
    "test_region.py": "bits or slices or final or saves",
    "test_decode_region.py": "",
    "test_decode_region_drafts.py": "",
    "test_region_prefill.py": "bits or pieces or checkpoint or errors",
    "test_convolution.py": "not (compile or opcheck or many or autocast)",
    "test_large_states.py": "(rows and (fused or cut) and (two or raw)) or (reset and 3-) or wide or maps"
    " or (prefill and bfloat16 and (fused or narrow))",
    "test_pairs.py": "not (contents or chunk and (many or long or one))",
    "test_fuzz.py": "draws_of_regions",
    "test_norm.py": "not (opcheck or compile or graph or in_place or large_tensors or errors or every_time)",
}


def sms_of(file: str) -> str:
    """The SMs of the GPU that a file's tests run on. With few SMs a CTA has several tiles in short calls."""
    return "4" if file in ("test_pairs.py", "test_norm.py") else "132"


@pytest.mark.parametrize("sms", ("132", "4"))
def test_in_emulation(package, sms):
    check_in_emulation(package, {x: expression for x, expression in SELECTED.items() if sms_of(x) == sms}, sms)


def check_in_emulation(package: str, files: dict[str, str], sms: str, *options: str, **environment: str) -> None:
    """Runs the selected tests of each file. All pass, at least one of each file."""
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "plugin", "-p", "no:cacheprovider", "-m", "gpu"]
    path = os.pathsep.join([package, str(TESTS.parent / "emulator")])
    selected = " or ".join(f"({file} and ({expression or file}))" for file, expression in files.items())
    result = subprocess.run(
        [*command, *options, *(TESTS / file for file in files), "-k", selected],
        env=os.environ | {"PYTHONPATH": path, "FLASH_QLA_QUIET": "1", "EMULATED_SMS": sms} | environment,
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    passed = set(re.findall(r"^tests/(\w+\.py)::.* PASSED", result.stdout, re.MULTILINE))
    assert passed == files.keys() and "FAILED" not in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("arguments", "status"),
    (
        ("--kernel segment_scan --shape 130+0+64", 0),
        ("--kernel portable_forward --shape 130+0+64", 0),
        ("--kernel portable_scan --shape 130+0+64", 0),
        ("--kernel portable_token_gradients --shape 1x70 --heads 1x2", 0),
        ("--kernel token_gradients --shape 1x70 --heads 1x2", 0),
        ("--kernel decode_buffered --shape 2x1", 0),
        ("--kernel decode_region --shape 2x1", 0),
        ("--kernel decode_region_drafts --shape 2x3", 0),
        ("--kernel causal_conv1d_backward --shape 130+0+64", 0),
        ("--kernel segment_scan --shape 1x70 --mode fused=1", 1),
    ),
)
def test_one_kernel(package, arguments, status):
    """`python -m emulator` launches the kernel and finds it right; or says that nothing launches it."""
    command = [sys.executable, "-m", "emulator", *arguments.split()]
    result = subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kernel = arguments.split()[1]
    assert result.returncode == status and "MISS" not in result.stdout, result.stdout
    pattern = rf"^{kernel} was not launched" if status else rf"^{kernel}_\w+ +\d+x"
    assert re.search(pattern, result.stdout, re.MULTILINE), result.stdout


def test_every_kernel_has_a_call():
    sys.path.append(str(TESTS.parent))
    from emulator.__main__ import KERNELS as CALLS
    from kernels_tl.instances import INSTANCES

    assert CALLS.keys() == {instance.kernel for instance in INSTANCES}


def test_a_driver_that_refuses_the_kernels(package):
    """The error names the kernel, the driver, and what to do. An environment makes the emulated driver older."""
    code = """
import torch, flash_qla
x, g = torch.zeros(1, 3, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 3, 1)
flash_qla.chunk_gated_delta_rule(x, x, x, g, g)
"""
    for driver, text in (("12020", "supports CUDA up to 12.2: install NVIDIA driver 575"), ("12090", None)):
        environment = os.environ | {"PYTHONPATH": package, "EMULATED_DRIVER": driver}
        command = [sys.executable, "-P", "-c", code]
        result = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert (result.returncode != 0) == bool(text), result.stderr
        if text:
            last = result.stderr.splitlines()[-1]
            assert re.search(r"RuntimeError: flash_qla: kernel \w+: loading the code failed: ", last) and text in last


# Two threads of a CTA, one after the other; what is between a write and a read decides.
TWO_THREADS = """
#include "emulator.h"
using namespace emulator;
int main(int, char** arguments) {
  const int mode = arguments[1][0] - '0';
  char* const byte = dynamic_shared + 64;
  Meeting meeting;
  const auto be = [](unsigned thread) {
    thread_index = {thread, 0, 0};
    thread_of_cluster = thread;
  };
  races::begin_cta(128);
  be(0);
  races::write(byte, 4);
  if (mode == 2 || mode == 3) {
    races::fence();
  }
  races::arrive(&meeting);
  be(1);
  races::arrive(&meeting);
  races::complete(&meeting, 0);
  if (mode != 0) {
    races::pass(&meeting, 0);
  }
  if (mode == 1) {
    races::read(byte, 4);
  } else {
    races::store(byte, 4);  // by TMA
    races::commit(races::Engine::kStores);
    if (mode == 2) {
      races::wait(races::Engine::kStores, 0);
    }
    races::write(byte, 4);
  }
}
"""
RACES = ("not behind the write", None, None, "a write is not behind a read", "no fence between a write and")


@pytest.mark.build
def compile_program(folder: Path, source: str) -> Path:
    """A program of the emulator's functions."""
    sys.path.append(str(TESTS.parent))
    from build_tools.toolchain import find_toolkit

    (folder / "main.cpp").write_text(source)
    sources = [*(TESTS.parent / "emulator").glob("*.cpp"), folder / "main.cpp"]
    folders = [TESTS.parent / "emulator/include", *find_toolkit().include]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-w", "-DEMULATOR_RACES", "-DUSE_CUDA"]
    command += [f"-I{folder}" for folder in folders]
    subprocess.run([*command, *sources, "-ldl", "-lpthread", "-o", folder / "main"], check=True)
    return folder / "main"


def test_races(tmp_path):
    """Found: a read without the barrier, a store without the fence, a write before the store has read."""
    program = compile_program(tmp_path, TWO_THREADS)
    for mode, race in enumerate(RACES):
        result = subprocess.run([program, str(mode)], stderr=subprocess.PIPE, text=True)
        assert (result.returncode == 0) == (race is None), (mode, result)
        assert race is None or race in result.stderr


# Three copies, of which the third is in no group
COPIES = """
#include <cstring>
#include "emulator.h"
using namespace emulator;
int main() {
  alignas(16) static char from[3][16];
  char (*const to)[16] = reinterpret_cast<char (*)[16]>(dynamic_shared);
  std::memset(from, 1, sizeof from);
  std::memset(to, 0, sizeof from);
  races::begin_cta(128);
  thread_index = {0, 0, 0};
  thread_of_cluster = 0;
  for (int i = 0; i < 3; ++i) {
    copy_piece(to[i], from[i], true, 16);
    if (i < 2) {
      commit_copies();
    }
  }
  const auto arrived = [&] { return (to[0][0] == 1) + 10 * (to[1][0] == 1) + 100 * (to[2][0] == 1); };
  const int before = arrived();
  wait_for_copies(1);
  const int first = arrived();
  wait_for_copies(0);
  return before == 0 && first == 1 && arrived() == 11 ? 0 : 1;
}
"""


def test_copies_arrive_when_they_are_waited_for(tmp_path):
    """Not before, or a kernel that waits too little would be right."""
    subprocess.run([compile_program(tmp_path, COPIES)], check=True)
