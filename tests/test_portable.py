"""The kernels that run on every GPU from Ampere on, forced on a Hopper GPU, against the fp64 recurrence. `pytest -m gpu
--kernels portable` runs every other test with them."""

import itertools

import pytest
import torch
from accuracy import relative_error
from begin_finish import BEGIN, by_name
from cases import ALL_INSIDE, Case, check_backward, check_forward, make_inputs, parametrize, run_forwards

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


# In splits of so many chunks: gates that keep all states, some and none; a caller's state in another layout; wide keys
SPLIT = (
    (1, Case(T=330, gate="tiny", H_k=1, H_v=2)),
    (2, Case(T=330, gate="underflow", state_scale=1e4, dtype=FP16, H_k=1, H_v=2)),
    (2, Case(lengths=(330, 0, 64, 200, 65), padding=9, gate="logsigmoid", dtype=FP16, **L2NORM, **ALL_INSIDE, **RAW)),
    (1, Case(B=2, T=200, gate="tiny", K=96, V=72, H_k=1, H_v=3, state_v_first=True, initial_state=BF16)),
    (1, Case(T=200, gate="tiny", K=200, V=136, H_k=1, H_v=1, beta="two")),
)
of_splits = pytest.mark.parametrize(("chunks", "case"), SPLIT, ids=str)


@pytest.mark.gpu
@of_splits
def test_split_forward(chunks, case):
    with forced_dispatch(forward={"segment_chunks": chunks}):
        check_forward(case, "cuda")


@pytest.mark.gpu
@of_splits
def test_split_backward(chunks, case):
    with forced_dispatch(backward={"segment_chunks": chunks}):
        check_backward(case, "cuda")


@pytest.mark.gpu
def test_values_in_two_parts():
    """A map adds values to states almost in fp32. With a key of its own for each token nothing else is rounded."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(64, 64, generator=generator).to("cuda", BF16)
    k, gates = torch.eye(64, 128, device="cuda", dtype=BF16), torch.full((1, 64, 1), 0.3, device="cuda")
    tokens = {name: x[None, :, None] for name, x in (("q", k), ("k", k), ("v", v))}
    maps, _, _ = by_name(BEGIN[0], tokens | {"g": 0 * gates, "beta": gates, "map_sequences": [0]})
    Z, M = maps[0, 0].double().split([64, 128])
    betas = gates[0, 0, 0].double()
    assert relative_error(Z[:, :64], betas * v.double().mT) < 1e-4
    assert relative_error(M.diagonal(), 1 - betas * (torch.arange(128, device="cuda") < 64)) < 1e-4


@pytest.mark.gpu
def test_kernels_and_splits_have_bits_of_their_own():
    """So no mode is an alias of another."""
    inputs = make_inputs(Case(T=200, H_k=1, H_v=1, gate="tiny"), "cuda")
    outputs = [run_forwards(inputs)["o"]]
    with forced_dispatch(forward={"segment_chunks": 1}):
        outputs.append(run_forwards(inputs)["o"])
        if torch.cuda.get_device_capability() == (9, 0):
            with forced_dispatch(kernels="device"):
                outputs.append(run_forwards(inputs)["o"])
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(outputs, 2))


def test_the_choice_of_kernels():
    wrong = pytest.raises(ValueError, match=r"kernels is 'ampere', expected 'portable', 'device' or None")
    with wrong, forced_dispatch(kernels="ampere"):
        pass


@pytest.mark.parametrize("ask", (flash_qla._C.forward_dispatch, flash_qla._C.backward_dispatch))
def test_long_sequences_are_split_where_they_leave_sms_idle(ask):
    def segment_chunks(B, T, heads, **more):
        return ask(B, T, B, heads // 2, heads, varlen=False, portable=True, **more).segment_chunks

    assert 4 <= segment_chunks(1, 32768, 8) <= 128
    assert segment_chunks(1, 32768, 8, auto_cp=False) == 0
    assert segment_chunks(8, 4096, 64) == segment_chunks(1, 256, 8) == segment_chunks(64, 1024, 8) == 0


def test_thousands_of_sequences_are_left_whole():
    """Their maps would take gigabytes."""
    lengths = {"T": 221503, "N": 4096, "H_k": 16, "H_v": 16, "K": 256, "V": 256}
    calls = [flash_qla._C.forward_dispatch(1, **lengths, portable=True, auto_cp=auto_cp) for auto_cp in (True, False)]
    assert calls[0].segment_chunks == 0 and calls[0].workspace_bytes == calls[1].workspace_bytes


def test_one_path():
    """Whatever a mode asks of Hopper's kernels."""
    whole = flash_qla._C.forward_dispatch(8, 512, 8, 32, 64, varlen=False, portable=True)
    assert (whole.fused, whole.value_tile, whole.segment_chunks, whole.ctas) == (False, 64, 0, 8 * 64 * 2)
    with forced_dispatch(forward={"fused": 1, "value_tile": 128, "segment_chunks": 2}):
        split = flash_qla._C.forward_dispatch(8, 512, 8, 32, 64, varlen=False, portable=True)
    assert (split.fused, split.value_tile, split.segment_chunks, split.ctas) == (False, 64, 2, 8 * 4 * 64 * 2)
