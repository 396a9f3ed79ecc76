"""Pools of 8 bits, float8_e4m3fn and float8_e5m2: their range and rounding. test_decode.py and test_prefill.py compare
all paths with the recurrence."""

import contextlib
import re

import pytest
import torch
from accuracy import FLOAT8, to_float8
from cases import forward_mode, on_meta
from every_op import make_call
from test_decode import Case, for_device, make_inputs
from test_prefill import MODES

from flash_qla import decode_gated_delta_rule, decode_gated_delta_rule_buffered, prefill_gated_delta_rule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = FLOAT8
# The largest numbers of both formats, the bounds between them and the numbers after them, and small numbers
VALUES = (448, 456, 464, 480, 1e5, 57344, 60000, 61440, 65536, 3e38, 2**-9, 2**-10, 1.5 * 2**-10, 2**-16, 2**-17, 0.3)

PATHS = ("one_token", "rows", *MODES)
of_paths = pytest.mark.parametrize(
    ("device", "path"),
    [
        *(("cpu", path) for path in ("rows", "wide")),  # decoding and prefill
        *(pytest.param("cuda", path, marks=pytest.mark.gpu) for path in PATHS),
    ],
)


def run(path: str, pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: float, beta: float) -> torch.Tensor:
    """S' = e^g S + beta k (v - e^g S^T k)^T, in place, for one token k [K], v [V] in each of the pool's states. Returns
    o with q = k."""
    N, H_v, V, K = pool.shape
    count = 1 if path == "one_token" else 2  # rows: the second token changes nothing
    k, v = k.expand(N, count, 1, K), v.expand(N, count, H_v, V).clone()
    gates, betas = (torch.zeros(N, count, H_v, device=pool.device) for _ in range(2))
    gates[:, 0], betas[:, 0], v[:, 1:] = g, beta, 0
    if path in ("one_token", "rows"):
        return decode_gated_delta_rule(
            *(k, k, v, gates, betas, None, None, pool), scale=1.0, use_qk_l2norm_in_kernel=False
        )
    slots = torch.arange(N, device=pool.device)
    with forward_mode(**MODES[path]) if pool.is_cuda else contextlib.nullcontext():
        return prefill_gated_delta_rule(k, k, v, gates, betas, pool, slots, scale=1.0)


@of_paths
@pytest.mark.parametrize("K", (128, 256))
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_saturation(path, dtype, K, device):
    """Numbers beyond the largest become the largest, and NaN stays NaN. Both formats round to the nearest even."""
    if K > 128 and path in MODES and path != "wide":
        pytest.skip("wide keys have one value tile, and no fused kernel")
    values = torch.tensor(VALUES).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(len(VALUES))
    v = torch.cat([values, torch.full((16,), torch.nan), torch.zeros(16)]).to(device, BF16)
    k = torch.zeros(K, device=device, dtype=BF16)
    k[K - 3] = 1
    pool = torch.zeros(2, 3, len(v), K, device=device, dtype=dtype)
    run(path, pool, k, v, 0.0, 1.0)
    expected = to_float8(v.float()[:, None] * k.float(), dtype).float()
    assert torch.equal(expected.isnan(), pool[0, 0].float().isnan())
    assert torch.equal(pool.float().nan_to_num(7), expected.nan_to_num(7).expand(pool.shape))
    assert pool.float().nan_to_num(0).abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("T", (1, 2))
def test_infinities(T, dtype, device):
    """An infinite state becomes the largest number, in e5m2 too."""
    pool = torch.zeros(1, 1, 16, 16, device=device, dtype=dtype)
    k = torch.ones(1, T, 1, 16, device=device, dtype=BF16)
    v = torch.full((1, T, 1, 16), torch.inf, device=device, dtype=BF16)
    v[..., 8:] *= -1
    gates = torch.zeros(1, T, 1, device=device)
    betas = gates.clone()
    betas[:, -1] = 1
    v[:, : T - 1] = 0
    decode_gated_delta_rule(k, k, v, gates, betas, None, None, pool, use_qk_l2norm_in_kernel=False)
    most = torch.finfo(dtype).max
    assert (pool[0, 0, :8].float() == most).all() and (pool[0, 0, 8:].float() == -most).all()


@of_paths
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_number_stays(path, dtype, device):
    """All finite numbers of both formats stay the same if they are read and written, in all places of a lane."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = values[values.float().isfinite()]
    indices = torch.randint(len(values), (3, 2, 72, 128), generator=torch.Generator().manual_seed(0))
    pool = values[indices].to(device)
    before = pool.float()
    o = run(path, pool, torch.ones(128, device=device, dtype=BF16), torch.ones(72, device=device, dtype=BF16), 0.0, 0.0)
    assert torch.equal(pool.float(), before)
    assert o.isfinite().all() and o.any()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("T", (1, 3, 12))
@pytest.mark.parametrize("K", (128, 256))
def test_outputs_do_not_depend_on_the_dtype(K, T, dtype, device):
    """The state is exact in fp16, and o is computed from the state before it is rounded: the same bits."""
    case = for_device(Case(K=K, V=72, T=T, state_dtype=dtype, dtype=BF16), device)
    inputs = make_inputs(case, device)
    wider = inputs | {"state_pool": inputs["state_pool"].to(FP16)}
    assert torch.equal(decode_gated_delta_rule(**inputs), decode_gated_delta_rule(**wider))


@pytest.mark.parametrize("meta", (False, True))
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_no_lagging_states(dtype, meta):
    arguments = make_call("decode_gated_delta_rule_buffered", "cpu").arguments
    arguments["state_pool"] = arguments["state_pool"].to(dtype)
    text = f"state_pool has dtype {str(dtype).removeprefix('torch.')}, expected bfloat16, float16, float32 or float64"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule_buffered(**on_meta(arguments) if meta else arguments)
