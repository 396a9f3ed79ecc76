"""decode_gated_delta_net: beside its parts, and against the formula in float64."""

import dataclasses
import re

import pytest
import torch
from accuracy import relative_error
from test_region import formula

import flash_qla

SLOTS = 7


@dataclasses.dataclass(frozen=True)
class Case:
    indices: tuple[int, ...] = (4, 0, 6)  # the slot of each sequence
    T: int = 1
    H_k: int = 2
    H_v: int = 4
    K: int = 128
    V: int = 128
    W: int = 4
    columns: int = 0  # of windows; 0: W - 1
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    window_dtype: torch.dtype | None = None  # that of tokens by default
    columns_last: bool = True  # else windows are [slots, columns, D] in memory
    by_key_heads: bool = False  # q, k, v and z of a key head follow each other; so do a and b
    with_bias: bool = True
    with_dt_bias: bool = True
    int64: bool = False
    options: tuple[tuple[str, object], ...] = ()


def make(case: Case, device: str, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    N, T, H_k, H_v, K, V = len(case.indices), case.T, case.H_k, case.H_v, case.K, case.V
    D, group = 2 * H_k * K + H_v * V, H_v // H_k

    def randn(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    if case.by_key_heads:
        tokens = randn(N, T, H_k, 2 * K + 2 * group * V)
        gates = randn(N, T, H_k, 2 * group)
        b, a = gates.split([group, group], -1)
        mixed, z = tokens.split([2 * K + group * V, group * V], -1)
        z = z.unflatten(-1, (group, V))
    else:
        tokens = randn(N, T, D + H_v * V + 2 * H_v)
        mixed, z, b, a = tokens.split([D, H_v * V, H_v, H_v], -1)
        z = z.unflatten(-1, (H_v, V))
    columns, of_windows = case.columns or case.W - 1, case.window_dtype or case.dtype
    windows = randn(SLOTS, D, columns, dtype=of_windows)
    if not case.columns_last:
        windows = windows.mT.contiguous().mT
    parameters = torch.float64 if case.dtype == torch.float64 else torch.float32
    return {
        **{"mixed": mixed, "z": z, "a": a, "b": b},
        "conv_weight": randn(D, case.W),
        "conv_bias": randn(D) if case.with_bias else None,
        "norm_weight": randn(V, dtype=parameters),
        "A_log": randn(H_v, dtype=parameters),
        "dt_bias": randn(H_v, dtype=parameters) if case.with_dt_bias else None,
        "window_pool": windows,
        "state_pool": randn(SLOTS, H_v, V, K).to(case.state_dtype),
        "state_indices": torch.tensor(case.indices, dtype=torch.int64 if case.int64 else torch.int32, device=device),
        **dict(case.options),
    }


def in_heads(x: torch.Tensor, rank: int) -> torch.Tensor:
    """With value heads in one dimension."""
    return x.flatten(2, 3) if x.dim() > rank else x


def packed(mixed: torch.Tensor, K: int) -> torch.Tensor:
    """q, k and v of all heads one after the other."""
    return torch.cat([x.flatten(2) for x in mixed.split([K, K, mixed.shape[-1] - 2 * K], -1)], -1)


def plain(arguments: dict) -> dict:
    """The same without key heads as a dimension."""
    a, mixed = arguments, arguments["mixed"]
    if mixed.dim() == 4:
        mixed = packed(mixed, a["state_pool"].shape[-1])
    return a | {"mixed": mixed, "z": in_heads(a["z"], 4), "a": in_heads(a["a"], 3), "b": in_heads(a["b"], 3)}


def parts(arguments: dict) -> torch.Tensor:
    """decode_gated_delta_net by the functions of its parts."""
    x = plain(arguments)
    pools = {name: x[name] for name in ("state_indices", "null_index") if name in x}
    tokens = flash_qla.prefill_causal_conv1d(
        x["mixed"], x["conv_weight"], x["conv_bias"], state_pool=x["window_pool"], **pools
    )
    rule = {name: x[name] for name in ("A_log", "dt_bias", "state_pool", "scale", "allow_neg_eigval") if name in x}
    o = flash_qla.decode_gated_delta_rule_packed(tokens, x["a"], x["b"], **rule, **pools)
    norm = {name: x[f"norm_{name}"] for name in ("eps", "activation") if f"norm_{name}" in x}
    return flash_qla.gated_rms_norm(o, x["z"], x["norm_weight"], **norm)


def copied(arguments: dict) -> dict:
    """The same with pools of their own, in the same layout."""
    pools = {}
    for name in ("window_pool", "state_pool"):
        if (x := arguments[name]) is not None:
            pools[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return arguments | pools


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


BASE = Case()
CASES = (
    BASE,
    Case(indices=(3,)),
    Case(H_k=16, H_v=32),
    Case(indices=(2, -1, 5, 1), H_k=2, H_v=8),
    Case(H_k=1, H_v=1, with_bias=False),
    Case(H_k=1, H_v=3, with_dt_bias=False),  # a CTA of the cluster has no rows
    Case(H_k=1, H_v=16, V=128),  # several turns
    Case(H_k=2, H_v=2, V=32),  # a cluster of one CTA
    Case(K=64, V=72, W=2),
    Case(K=8, V=264, W=3, columns=3),
    Case(K=120, V=512, H_k=1, H_v=2, columns=4),
    Case(dtype=torch.float16, state_dtype=torch.bfloat16, columns_last=False),
    Case(state_dtype=torch.bfloat16, window_dtype=torch.float32),
    Case(dtype=torch.float16, state_dtype=torch.float16, by_key_heads=True),
    Case(state_dtype=torch.float8_e4m3fn),
    Case(state_dtype=torch.float8_e5m2, H_k=1, H_v=8, int64=True),
    Case(by_key_heads=True, H_k=4, H_v=8, columns_last=False, int64=True),
    Case(indices=(1, 3, 0), options=(("null_index", 0), ("allow_neg_eigval", True), ("scale", 0.7))),
    Case(options=(("norm_eps", 1e-2), ("norm_activation", "sigmoid"))),
    # by parts on a GPU:
    Case(K=192, V=64),
    Case(V=20 * 8 + 4, K=16),
    Case(T=3, by_key_heads=True),
    Case(H_k=1, H_v=32, V=128),
)


# Bytes of a number -> the most relative error that another rounding of sums in fp32 gives. On the CPU: none.
BARS = {8: 0, 4: 1e-6, 2: 3e-4, 1: 5e-3}


def check(case: Case, device: str, seed: int = 0) -> None:
    """Results agree with those of the parts, and other slots stay as they are."""
    arguments = make(case, device, seed)
    mine, theirs = copied(arguments), copied(arguments)
    y, expected = flash_qla.decode_gated_delta_net(**mine), parts(theirs)
    assert same(mine["window_pool"], theirs["window_pool"])
    for x, other in ((y, expected), (mine["state_pool"], theirs["state_pool"])):
        assert relative_error(x.float(), other.float()) <= (BARS[x.element_size()] if device == "cuda" else 0)
        assert x.isfinite().all() if x.element_size() > 1 else True
    used = {i for i in case.indices if i > dict(case.options).get("null_index", -1)}
    untouched = [slot for slot in range(SLOTS) if slot not in used]
    for name in ("window_pool", "state_pool"):
        assert same(mine[name][untouched], arguments[name][untouched]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts(case, device):
    if device == "cuda" and case.V % 8:
        pytest.skip("no such value dimension on the GPU")
    check(case, device)


@pytest.mark.parametrize("name", ("a", "b", "z", "mixed"))
def test_one_by_key_heads(name, device):
    """Each tensor may have either form, whatever the others have."""
    flat, x = make(Case(H_k=2, H_v=4), device), make(Case(H_k=2, H_v=4), device)
    if name == "mixed":
        q, k, v = x["mixed"].split([2 * 128, 2 * 128, 4 * x["z"].shape[3]], -1)
        x["mixed"] = torch.cat([y.unflatten(-1, (2, -1)) for y in (q, k, v)], -1)
    else:
        x[name] = x[name].unflatten(2, (2, 2))
    expected, y = flash_qla.decode_gated_delta_net(**flat), flash_qla.decode_gated_delta_net(**x)
    assert torch.equal(expected.flatten(2), y.flatten(2)) and torch.equal(flat["state_pool"], x["state_pool"])


@pytest.mark.parametrize("case", (BASE, Case(T=3), Case(int64=True)), ids=str)
def test_a_table_of_slots(case, device):
    """[N, S], or a column of one: column 0 has the slots of windows and states, whatever is in the others."""
    arguments = make(case, device)
    slots = arguments["state_indices"]
    table = torch.stack([slots, slots.flip(0), slots + 100], 1)
    expected = copied(arguments)
    y = flash_qla.decode_gated_delta_net(**expected)
    for indices in (table, table.mT.contiguous().mT, table[:, 0]):
        actual = copied(arguments) | {"state_indices": indices}
        assert same(flash_qla.decode_gated_delta_net(**actual), y)
        assert all(same(actual[name], expected[name]) for name in ("window_pool", "state_pool"))


def launched(call, folder) -> list[str]:
    """The kernels that a call launches. In the emulator PyTorch's are named after their operators."""
    if torch.cuda.get_device_name() == "emulated":
        with pytest.MonkeyPatch.context() as patch, torch.profiler.profile() as profile:
            patch.setenv("EMULATED_LAUNCHES", str(folder / "launches"))
            call()
        of_torch = [x.name for x in profile.events() if x.name in ("aten::copy_", "aten::fill_", "aten::zero_")]
        return of_torch + [line.split()[0] for line in (folder / "launches").read_text().splitlines()]
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [x.name for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.hopper
def test_one_kernel(tmp_path):
    """Also with slices, rows by key heads and windows of either layout."""
    for i, case in enumerate((BASE, Case(by_key_heads=True, columns_last=False))):
        arguments = make(case, "cuda")
        (tmp_path / str(i)).mkdir()
        names = launched(lambda arguments=arguments: flash_qla.decode_gated_delta_net(**arguments), tmp_path / str(i))
        assert len(names) == 1 and names[0].startswith("decode_region"), names


def test_formula(device):
    """Four steps of two sequences."""
    case = Case(indices=(5, 2))
    arguments = make(case, device)
    steps = [make(case, device, seed) for seed in range(4)]
    tokens = {name: torch.cat([plain(x)[name] for x in steps], 1).double() for name in ("mixed", "z", "a", "b")}
    shared = {x: arguments[x].double() for x in ("conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias")}
    expected, *_ = formula(
        **tokens,
        **shared,
        num_k_heads=case.H_k,
        head_k_dim=case.K,
        state_v_first=True,
        initial_state=arguments["state_pool"][[5, 2]].double(),
        initial_window=arguments["window_pool"][[5, 2]].double(),
    )
    of_step = [{name: x[name] for name in ("mixed", "z", "a", "b")} for x in steps]
    y = torch.cat([flash_qla.decode_gated_delta_net(**arguments | x) for x in of_step], 1)
    assert relative_error(y, expected) < 6e-3


def test_a_sequence_does_not_depend_on_its_batch(device):
    case = Case(indices=(6, 1, 3, 0), H_k=2, H_v=8)
    arguments = make(case, device)
    together = copied(arguments)
    y = flash_qla.decode_gated_delta_net(**together)
    for n in range(4):
        alone = copied(arguments)
        one = {x: alone[x][n : n + 1] for x in ("mixed", "z", "a", "b", "state_indices")}
        assert same(flash_qla.decode_gated_delta_net(**alone | one), y[n : n + 1])
        for name in ("window_pool", "state_pool"):
            slot = case.indices[n]
            assert same(alone[name][slot], together[name][slot]), name


def test_out(device):
    arguments = make(BASE, device)
    expected = flash_qla.decode_gated_delta_net(**copied(arguments))
    for memory in (torch.full_like(expected, torch.nan), torch.full_like(expected.mT, torch.nan).mT):
        assert flash_qla.decode_gated_delta_net(**copied(arguments), out=memory) is memory
        assert same(memory, expected)


def test_windows_and_states_in_one_page(device):
    """As engines have them: a slot's window, then its state."""
    arguments = make(Case(), device)
    _, D, columns = arguments["window_pool"].shape
    _, H_v, V, K = arguments["state_pool"].shape
    window, state = 2 * D * columns, 4 * H_v * V * K
    page = torch.zeros(SLOTS, window + state, dtype=torch.uint8, device=device)
    pools = {
        "window_pool": page[:, :window].view(torch.bfloat16).unflatten(1, (D, columns)),
        "state_pool": page[:, window:].view(torch.float32).unflatten(1, (H_v, V, K)),
    }
    for name, pool in pools.items():
        pool.copy_(arguments[name])
    expected = copied(arguments)
    assert same(flash_qla.decode_gated_delta_net(**arguments | pools), flash_qla.decode_gated_delta_net(**expected))
    for name, pool in pools.items():
        assert same(pool, expected[name])


WRONG = {
    "mixed has 1000 channels, expected 2 H_k K + H_v V": {"mixed": (3, 1, 1000)},
    "mixed has 6 key heads, expected a divisor": {"mixed": (3, 1, 2048)},
    "mixed has 2 dimensions, expected 3 or 4": {"mixed": (3, 1024)},
    "z has shape": {"z": (3, 1, 4, 64)},
    "a has shape": {"a": (3, 1, 2)},
    "b has shape [3, 1, 1, 4], expected [3, 1, 2, 2] ([B, T, H_k, H_v / H_k])": {"b": (3, 1, 1, 4)},
    "conv_weight has shape": {"conv_weight": (1024, 5)},
    "norm_weight has shape": {"norm_weight": (64,)},
    "window_pool has shape": {"window_pool": (SLOTS, 1024, 2)},
    "window_pool has 6 slots, expected 7, those of state_pool": {"window_pool": (SLOTS - 1, 1024, 3)},
    "state_pool has": {"state_pool": (SLOTS, 4, 128)},
    "state_indices has 2 rows, expected 3": {"state_indices": (2,)},
    "A_log has shape": {"A_log": (2,)},
    "out has shape": {"out": (3, 1, 4, 64)},
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text, device, errors_change_nothing):
    arguments = make(BASE, device)
    [(name, shape)] = WRONG[text].items()
    like = arguments.get(name, arguments["z"])
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_qla.decode_gated_delta_net(**arguments | {name: torch.zeros(shape, dtype=like.dtype, device=device)})


def test_errors_of_contents(errors_change_nothing):
    arguments = make(BASE, "cpu")
    for indices in ((4, 0, SLOTS), (4, 0, 4)):
        with pytest.raises(RuntimeError, match=r"state_indices\[2\]"):
            flash_qla.decode_gated_delta_net(**arguments | {"state_indices": torch.tensor(indices)})
