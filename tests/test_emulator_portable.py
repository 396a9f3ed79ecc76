"""The kernels that every GPU from Ampere on has, in emulation: forced, and on GPUs of other compute capabilities."""

import os
import subprocess
import sys

import pytest
from test_emulator import check_in_emulation

pytestmark = pytest.mark.long

# Tests that run with --kernels portable, mostly in one mode of the dispatch, because these kernels follow only splits
PORTABLE = {
    "test_portable.py": "",
    "test_prefill.py": "(first_slot and not wide) or (test_checkpoints and narrow and (float8 or 80-))",
    "test_float8.py": "not (opcheck or fused or cut)",
    "test_head_dims.py": "test_autograd",
    "test_begin_finish.py": "(recurrence and (tiny or l2norm or zero and (184 or 192) or 100)) or one_half"
    " or negligible",
    "test_context_parallel.py": "(more_scans and tile64) or (left_out and tile64) or (device_cuts and 330 and 128-0)",
    "test_large_states.py": "(prefill and bfloat16 and (narrow or cut)) or (reset and 3-) or maps",
}
# Of a GPU of another compute capability
ON_OTHER_GPUS = {
    "test_portable.py": "65",
    "test_begin_finish.py": "recurrence and tiny",
    "test_decode.py": "test_tree_in_slots",
    "test_convolution.py": "test_pieces_are_the_whole",
    "test_norm.py": "test_dtypes_of_the_weight",
}


def test_portable_kernels(package):
    check_in_emulation(package, PORTABLE, "132", "--kernels", "portable")


@pytest.mark.parametrize("capability", ("8.0", "8.6", "10.0", "11.0", "12.0"))
def test_other_gpus(package, capability):
    """They take these kernels by themselves, and 11.0 their PTX. What a GPU has no kernels for raises before anything
    is launched: with deferred state writes below 9.0."""
    options = ("--kernels", "portable")
    check_in_emulation(package, ON_OTHER_GPUS, "132", *options, EMULATED_CAPABILITY=capability)
    code = """
import torch, flash_qla
x, a, slots = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 1), torch.zeros(1, dtype=torch.int32)
flash_qla.chunk_gated_delta_rule(x, x, x, a, a)
flash_qla.decode_gated_delta_rule_buffered(
    x, x, x, a, a, None, None, torch.zeros(1, 1, 128, 128), slots,
    d_cache=torch.zeros(1, 1, 4, 128), k_cache=x.new_zeros(1, 1, 4, 128), g_cache=torch.zeros(1, 1, 4), write_pos=slots,
)
"""
    environment = os.environ | {"PYTHONPATH": package, "EMULATED_CAPABILITY": capability}
    command = [sys.executable, "-P", "-c", code]
    result = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    words = "its kernels were compiled for sm_90, sm_100, sm_120, compute_90, but this GPU has compute capability"
    assert (result.returncode != 0) == capability.startswith("8"), result.stderr
    if result.returncode != 0:
        assert f"decode_gated_delta_rule_buffered: {words} {capability}" in result.stderr, result.stderr
