"""The kernels that run on every GPU from Ampere on, forced on a Hopper GPU, against the fp64 recurrence. `pytest -m gpu
--kernels portable` runs every other test with them."""

import pytest
import torch
from cases import ALL_INSIDE, Case, check_backward, check_forward, equal, make_inputs, parametrize, run_forwards

import flash_qla
from flash_qla.testing import forced_dispatch

BF16, FP16 = torch.bfloat16, torch.float16
RAW = {"g_dtype": BF16, "beta_dtype": BF16}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
LENGTHS = {"lengths": (70, 0, 130, 64, 1), "padding": 9}


@pytest.fixture(autouse=True)
def portable():
    with forced_dispatch(kernels="portable"):
        yield


CASES = (
    *(Case(T=T, dtype=dtype) for T in (1, 63, 64, 65, 200) for dtype in (BF16, FP16)),
    Case(B=2, T=130, gate="logsigmoid", state_v_first=True),
    Case(T=192, gate="underflow", state_scale=1e4),
    Case(T=130, gate="softplus", dtype=FP16, state_scale=5e3),
    Case(**LENGTHS, gate="logsigmoid", dtype=FP16, **L2NORM, **ALL_INSIDE, **RAW),
    Case(**LENGTHS, H_k=2, H_v=6, gate="logsigmoid", beta="two", strides="heads_first"),
    *(
        Case(K=K, V=V, **LENGTHS, gate="logsigmoid", dtype=dtype)
        for K, V in ((8, 8), (96, 192), (256, 136))
        for dtype in (BF16, FP16)
    ),
    Case(lengths=(), padding=3),
    Case(lengths=(0, 0), padding=65),
)


@pytest.mark.gpu
@parametrize(*CASES)
def test_forward(case):
    check_forward(case, "cuda")


@pytest.mark.gpu
@parametrize(*CASES)
def test_backward(case):
    check_backward(case, "cuda")


@pytest.mark.gpu
def test_a_split_sequence_gives_other_bits():
    """So the mode is no alias: Hopper's kernels split this sequence, the portable ones never."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has the portable kernels alone")
    inputs = make_inputs(Case(T=300, gate="logsigmoid"), "cuda")
    portable = run_forwards(inputs)
    with forced_dispatch(forward={"segment_chunks": 1}):
        assert equal(portable, run_forwards(inputs))
        with forced_dispatch(kernels="device"):
            assert not torch.equal(portable["o"], run_forwards(inputs)["o"])


def test_the_choice_of_kernels():
    wrong = pytest.raises(ValueError, match=r"kernels is 'ampere', expected 'portable', 'device' or None")
    with wrong, forced_dispatch(kernels="ampere"):
        pass
    portable = flash_qla._C.forward_dispatch(1, 8192, 1, 2, 4, portable=True)
    assert (portable.fused, portable.value_tile, portable.segment_chunks) == (False, 64, 0)
    assert portable.ctas == 4 * 2
