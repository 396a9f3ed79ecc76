"""Head dimensions other than 128: keys with fewer channels, values of several tiles of rows, the last one perhaps not
full. On a GPU all of it runs padded, in the kernels for keys of 128 or of 256; the CPU takes any. Wrong ones are in
test_errors.py."""

import dataclasses

import pytest
import torch
from cases import (
    ALL_INSIDE,
    Case,
    backward_mode,
    check_backward,
    check_forward,
    equal,
    forward_mode,
    make_arguments,
    parametrize,
    run_all,
    run_autograd,
    run_backward,
)

BF16, FP16 = torch.bfloat16, torch.float16
RAW = {"g_dtype": BF16, "beta_dtype": BF16}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
LENGTHS = {"lengths": (70, 0, 130, 64, 1), "padding": 9}
# Released models': 64/64, 64/128, OLMo-Hybrid's; FLA's default. The others are at the borders of tiles, of boxes of 64
# columns and of what is supported.
DIMS = (
    *((64, 64), (64, 128), (96, 192), (128, 256), (128, 512), (256, 512)),
    *((136, 64), (184, 72), (192, 192), (192, 384), (256, 256), (248, 8)),
    *((8, 8), (56, 72), (72, 64), (120, 136), (128, 64), (32, 256), (16, 320), (96, 128), (128, 120), (48, 512)),
)


def of_dims(*dims: tuple[int, int], **options) -> list[Case]:
    return [Case(K=K, V=V, **options) for K, V in dims]


CASES = (
    *of_dims(*DIMS, **LENGTHS),
    *of_dims(*DIMS, **LENGTHS, state_v_first=True, gate="logsigmoid", dtype=FP16, **L2NORM),
    *of_dims((96, 192), (64, 64), (192, 136), B=2, T=70, H_k=1, H_v=3, initial_state=None, dht=None),
    *of_dims((96, 192), (40, 40), (128, 384), **LENGTHS, H_v=6, gate="logsigmoid", **ALL_INSIDE, **RAW, **L2NORM),
    *of_dims((136, 200), (256, 128), **LENGTHS, H_v=6, gate="logsigmoid", **ALL_INSIDE, **RAW, **L2NORM),
    *of_dims((96, 192), (128, 256), **LENGTHS, gate="logsigmoid", beta="two", dtype=FP16, strides="heads_first"),
    *of_dims((256, 64), **LENGTHS, gate="logsigmoid", beta="two", dtype=FP16, strides="heads_first"),
    *of_dims((96, 192), (64, 64), (128, 256), (256, 256), lengths=(64, 64), beta="0", initial_state=BF16, dht=FP16),
    *of_dims((96, 192), (64, 64), (24, 200), (200, 24), T=1, strides="gaps", do_strides="expanded"),
    *of_dims((96, 192), (256, 64), lengths=(), padding=3),
    *of_dims((96, 192), (256, 64), lengths=(0, 0), padding=65),
)


@parametrize(*CASES)
def test_forward(device, case):
    check_forward(case, device)


@parametrize(*CASES)
def test_backward(device, case):
    check_backward(case, device)


@pytest.mark.gpu
@parametrize(
    *of_dims((96, 192), T=8192, H_k=30, H_v=30, gate="logsigmoid", **ALL_INSIDE, **RAW, **L2NORM),
    *of_dims((64, 64), T=8192, H_k=2, H_v=8, gate="logsigmoid"),
    *of_dims((96, 192), T=8192, H_k=1, H_v=2, gate="zero", state_v_first=True),
    *of_dims((128, 256), lengths=(4095, 3000, 64, 0, 1000), padding=100, H_k=8, H_v=8),
    *of_dims((64, 128), lengths=(1024,) * 8, H_k=8, H_v=32, dtype=FP16),
    *of_dims((256, 512), T=8192, H_k=6, H_v=6, gate="logsigmoid", **ALL_INSIDE, **RAW, **L2NORM),
    *of_dims((256, 256), lengths=(4095, 3000, 64, 0, 1000), padding=100, H_k=4, H_v=16),
    *of_dims((192, 384), T=8192, H_k=1, H_v=2, gate="zero", state_v_first=True, dtype=FP16),
)
def test_long_on_gpu(case):
    check_forward(case, "cuda")
    check_backward(case, "cuda")


MODES = {
    "narrow": (64, 0),
    "wide": (128, 0),
    "narrow_cut": (64, 2),
    "wide_cut": (128, 3),
    "fused": (128, 0, 1),
    "fused_segments": (128, 2, 1),
}
WIDE = ((256, 512), (136, 72), (192, 192))
SEGMENTED = {"lengths": (650, 0, 65, 1, 300), "padding": 9, "H_k": 1, "H_v": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ("softplus", "zero"))
@pytest.mark.parametrize("dims", ((96, 192), (64, 64), (128, 256), (40, 328), (56, 120)), ids=str)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_the_forward(mode, dims, gate):
    """Both value tiles, segments, and the one kernel, for whole sequences and for segments."""
    (case,) = of_dims(dims, **SEGMENTED, gate=gate)
    with forward_mode(*mode):
        check_forward(case, "cuda")
        check_forward(dataclasses.replace(case, dtype=FP16, state_v_first=True, initial_state=FP16), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ("softplus", "zero"))
@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("segment_chunks", (0, 1, 3))
def test_modes_of_the_forward_with_wide_keys(segment_chunks, dims, gate):
    """One tile, and no kernel that does everything."""
    (case,) = of_dims(dims, **SEGMENTED, gate=gate)
    with forward_mode(128, segment_chunks):
        check_forward(case, "cuda")
        check_forward(dataclasses.replace(case, dtype=FP16, state_v_first=True, initial_state=FP16), "cuda")


@pytest.mark.gpu
@pytest.mark.hopper
def test_wide_keys_have_one_value_tile():
    (case,) = of_dims((136, 64), **LENGTHS)
    with (
        forward_mode(64, 0),
        pytest.raises(RuntimeError, match="64 value rows, expected 128 with keys of 136 channels"),
    ):
        run_all(make_arguments(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ("softplus", "logsigmoid", "zero"))
@pytest.mark.parametrize("dims", ((96, 192), (64, 64), (128, 256), (40, 328), (56, 120), *WIDE), ids=str)
@pytest.mark.parametrize("segment_chunks", (0, 1, 3))
def test_modes_of_the_backward(segment_chunks, dims, gate):
    (case,) = of_dims(dims, **SEGMENTED, gate=gate)
    with backward_mode(segment_chunks):
        check_backward(case, "cuda")
        check_backward(dataclasses.replace(case, dtype=FP16, H_v=3, state_v_first=True), "cuda")


@pytest.mark.parametrize("dims", ((96, 192), (192, 136)), ids=str)
def test_autograd(device, dims):
    """The same bits as the low-level functions."""
    (case,) = of_dims(dims, **LENGTHS, **ALL_INSIDE, **RAW, **L2NORM)
    arguments = make_arguments(case, device)
    gradients = {name: arguments.pop(name) for name in ("do", "dht")}
    expected, actual = run_backward(arguments, **gradients), run_autograd(arguments, **gradients)
    assert equal({name: expected[name].to(x.dtype) for name, x in actual.items()}, actual)
