"""decode_gated_delta_net_buffered: the bits of its parts step by step, and the formula in float64."""

import re

import pytest
import torch
from accuracy import relative_error
from cases import on_meta
from test_decode_region import SLOTS, Case, copied, in_heads, launched, make, plain, same
from test_region import formula

import flash_qla

WRITTEN = ("window_pool", "state_pool", "d_cache", "k_cache", "g_cache")
TOKENS = ("mixed", "z", "a", "b")
BASE = Case()


def make_call(case: Case, device: str, L: int = 3, seed: int = 0, cache_dtype=None) -> dict:
    """The arguments of a step, with empty replay buffers of NaN; changes and keys in the compute dtype by default."""
    compute_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32

    def cache(*shape, dtype=cache_dtype or compute_dtype):
        return torch.full((SLOTS, *shape), torch.nan, dtype=dtype, device=device)

    caches = {"d_cache": cache(case.H_v, L, case.V), "k_cache": cache(case.H_k, L, case.K)}
    caches |= {"g_cache": cache(case.H_v, L, dtype=compute_dtype)}
    arguments = make(case, device, seed)
    return arguments | caches | {"write_pos": torch.zeros_like(arguments["state_indices"])}


def tokens_of(case: Case, device: str, t: int) -> dict:
    inputs = make(case, device, seed=t)
    return {name: inputs[name] for name in TOKENS}


def copy_of(call: dict) -> dict:
    return copied(call) | {name: call[name].clone() for name in WRITTEN[2:]}


def parts(arguments: dict) -> torch.Tensor:
    """decode_gated_delta_net_buffered by the functions of its parts."""
    x = plain(arguments)
    slots = {name: x[name] for name in ("state_indices", "null_index") if name in x}
    packed = flash_qla.prefill_causal_conv1d(
        x["mixed"], x["conv_weight"], x["conv_bias"], state_pool=x["window_pool"], **slots
    )
    H_v, V, K = x["state_pool"].shape[1:]
    keys = (packed.shape[2] - H_v * V) // 2
    q, k, v = packed.split([keys, keys, H_v * V], -1)
    names = ("A_log", "dt_bias", *WRITTEN[1:], "write_pos", "force_flush", "scale", "allow_neg_eigval")
    o = flash_qla.decode_gated_delta_rule_buffered(
        *(q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (H_v, V)), x["a"], x["b"]),
        **{name: x[name] for name in names if name in x},
        **slots,
    )
    norm = {name: x[f"norm_{name}"] for name in ("eps", "activation") if f"norm_{name}" in x}
    return flash_qla.gated_rms_norm(o, x["z"], x["norm_weight"], **norm)


CASES = (
    (BASE, {}),
    (Case(H_k=16, H_v=32, indices=(3,)), {}),
    (Case(indices=(2, -1, 5, 1), H_k=2, H_v=8, state_dtype=torch.bfloat16), {"cache_dtype": torch.bfloat16}),
    (Case(H_k=1, H_v=3, with_bias=False, with_dt_bias=False), {"L": 1}),
    (Case(K=64, V=72, W=2, int64=True), {"L": 5}),
    (Case(K=8, V=264, W=3, columns=3, columns_last=False), {}),
    (Case(dtype=torch.float16, state_dtype=torch.float16, by_key_heads=True), {"cache_dtype": torch.float16}),
    (Case(window_dtype=torch.float32, by_key_heads=True, H_k=4, H_v=8), {}),
    (Case(indices=(1, 3, 0), options=(("null_index", 0), ("allow_neg_eigval", True), ("scale", 0.7))), {}),
    (Case(options=(("norm_eps", 1e-2), ("norm_activation", "sigmoid"))), {}),
    (Case(indices=()), {}),
)


def check(case: Case, device: str, L: int = 3, seed: int = 0, cache_dtype=None) -> None:
    """Each step has the bits of the parts, and other slots stay as they are."""
    mine = make_call(case, device, L, seed, cache_dtype)
    theirs, before = copy_of(mine), copy_of(mine)
    for t in range(5):
        flush = torch.zeros_like(mine["write_pos"])
        flush[:1] = t == 3
        step = tokens_of(case, device, seed + t) | {"force_flush": flush}
        y, expected = flash_qla.decode_gated_delta_net_buffered(**mine | step), parts(theirs | step)
        assert same(y, expected) and y.isfinite().all()
        assert all(same(mine[name], theirs[name]) for name in WRITTEN)
        mine["write_pos"] = theirs["write_pos"] = torch.where(flush != 0, 0, (mine["write_pos"] + 1) % L)
    used = {i for i in case.indices if i > dict(case.options).get("null_index", -1)}
    untouched = [slot for slot in range(SLOTS) if slot not in used]
    assert all(same(mine[name][untouched], before[name][untouched]) for name in WRITTEN)


@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_parts(case, options, device):
    check(case, device, **options)


@pytest.mark.parametrize("by_key_heads", (False, True))
def test_formula(by_key_heads, device):
    """Five steps of two sequences, the last of which writes the states."""
    case = Case(indices=(5, 2), by_key_heads=by_key_heads)
    call = make_call(case, device, L=4)
    steps = [tokens_of(case, device, t) for t in range(5)]
    flat = [plain(call | step) for step in steps]
    expected, state, window, *_ = formula(
        **{name: torch.cat([x[name] for x in flat], 1).double() for name in TOKENS},
        **{x: call[x].double() for x in ("conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias")},
        num_k_heads=case.H_k,
        head_k_dim=case.K,
        state_v_first=True,
        initial_state=call["state_pool"][[5, 2]].double(),
        initial_window=call["window_pool"][[5, 2]].double(),
        output_final_state=True,
    )
    y = []
    for t, step in enumerate(steps):
        flush = torch.full_like(call["write_pos"], t == 4)
        y.append(flash_qla.decode_gated_delta_net_buffered(**call | step, force_flush=flush))
        call["write_pos"] = (call["write_pos"] + 1) % 4
    assert relative_error(torch.cat(y, 1), expected) < 6e-3
    assert relative_error(call["state_pool"][[5, 2]], state) < 6e-3
    assert torch.equal(call["window_pool"][[5, 2]].double(), window)


def test_out(device):
    call = make_call(BASE, device)
    expected = flash_qla.decode_gated_delta_net_buffered(**copy_of(call))
    for memory in (torch.full_like(expected, torch.nan), torch.full_like(expected.mT, torch.nan).mT):
        assert flash_qla.decode_gated_delta_net_buffered(**copy_of(call), out=memory) is memory
        assert same(memory, expected)


@pytest.mark.gpu
def test_kernels(tmp_path):
    """Nothing is copied between the parts. Rows by key heads of z, which a projection gives, are read in place."""
    call = make_call(BASE, "cuda")
    by_key_heads = make(Case(by_key_heads=True), "cuda")["z"]
    assert in_heads(by_key_heads, 4).shape == call["z"].shape and not by_key_heads.is_contiguous()
    for i, z in enumerate((call["z"], by_key_heads)):
        (tmp_path / str(i)).mkdir()
        names = launched(lambda z=z: flash_qla.decode_gated_delta_net_buffered(**call | {"z": z}), tmp_path / str(i))
        kernels = ("causal_conv1d", "decode_buffered", "gated_rms_norm", "conv_windows")
        assert len(names) == 4 and all(map(str.startswith, names, kernels)), names


WRONG = {
    "mixed has 2 tokens of each sequence, expected 1": {"mixed": (3, 2, 1024)},
    "mixed has 1000 channels, expected 2 H_k K + H_v V": {"mixed": (3, 1, 1000)},
    "z has shape": {"z": (3, 1, 4, 64)},
    "conv_weight has shape": {"conv_weight": (1024, 5)},
    "norm_weight has shape": {"norm_weight": (64,)},
    "window_pool has 6 slots, expected 7, those of state_pool": {"window_pool": (SLOTS - 1, 1024, 3)},
    "state_indices has 2 dimensions": {"state_indices": (3, 1)},
    "d_cache has shape": {"d_cache": (SLOTS - 1, 4, 3, 128)},
    "k_cache has shape": {"k_cache": (SLOTS, 4, 3, 128)},
    "write_pos has 2 rows, expected 3": {"write_pos": (2,)},
    "force_flush has 2 rows, expected 3": {"force_flush": (2,)},
    "out has shape": {"out": (3, 1, 4, 64)},
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text, device, errors_change_nothing):
    call = make_call(BASE, device)
    [(name, shape)] = WRONG[text].items()
    like = call["write_pos"] if name == "force_flush" else call.get(name, call["z"])
    wrong = call | {name: torch.zeros(shape, dtype=like.dtype, device=device)}
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_qla.decode_gated_delta_net_buffered(**wrong)
    with pytest.raises(RuntimeError):  # the fake names a part's argument
        flash_qla.decode_gated_delta_net_buffered(**on_meta(wrong))


@pytest.mark.parametrize(
    ("name", "values"), (("state_indices", (4, 0, SLOTS)), ("state_indices", (4, 0, 4)), ("write_pos", (0, 0, 3)))
)
def test_errors_of_contents(name, values, errors_change_nothing):
    with pytest.raises(RuntimeError, match=rf"{name}\[2\]"):
        flash_qla.decode_gated_delta_net_buffered(**make_call(BASE, "cpu") | {name: torch.tensor(values)})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "text"),
    ((Case(K=136), "head dimension K = 136"), (Case(dtype=torch.float32), "dtype float32, expected bfloat16 or")),
)
def test_not_on_a_gpu(case, text, errors_change_nothing):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_qla.decode_gated_delta_net_buffered(**make_call(case, "cuda"))
