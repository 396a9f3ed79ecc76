"""decode_gated_delta_net with drafts: against the formula in float64, along each token's path from the first state."""

import dataclasses
import random
import re

import pytest
import test_decode_region
import torch
from accuracy import relative_error
from cases import on_meta
from test_decode_region import SLOTS, copied, launched, plain, same
from test_region import formula

import flash_qla


@dataclasses.dataclass(frozen=True)
class Case(test_decode_region.Case):
    """`indices` are the slots of windows, and of states if there is one each."""

    indices: tuple[int, ...] = (4, 0, 6, 2)
    T: int = 4
    lengths: tuple[int, ...] = ()  # packed sequences of so many tokens; else T each
    accepted: tuple[int, ...] = ()  # with states in slots of their own, as vLLM has them
    parents: tuple[int, ...] = ()  # of each sequence
    kept_rows: tuple[int, ...] = ()  # of states and windows after tokens, as SGLang has them
    kept: tuple[str, ...] = ("states", "windows")  # which of them; windows alone are in the sequences' order
    sliding: bool = False  # whether the windows of a row share memory
    update_state: bool = True
    with_convolution: bool = True
    with_write_indices: bool = True  # with `accepted`
    steps: int = 4  # of tables and of kept states and windows


def slide(windows: torch.Tensor) -> torch.Tensor:
    """The windows of all steps over one memory, with the last column of each; those of the first step entirely."""
    steps = windows.unbind(1)
    memory = torch.cat([steps[0], *(window[..., -1:] for window in steps[1:])], -1)
    return memory.unfold(2, windows.shape[-1], 1).transpose(1, 2)


def make(case: Case, device: str, seed: int = 0) -> dict:
    shape = {"indices": case.indices if not case.lengths else (0,), "T": sum(case.lengths) or case.T}
    one = dataclasses.replace(case, **shape)
    x, N = test_decode_region.make(one, device, seed), len(case.indices)
    generator = torch.Generator().manual_seed(seed + 1)

    def table(values):
        return torch.tensor(values, dtype=torch.int64 if case.int64 else torch.int32, device=device)

    def randn(*shape, like):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device).to(like.dtype)

    windows, states = x["window_pool"], x["state_pool"]
    (_, D, columns), state = windows.shape, states.shape[1:]
    slots = SLOTS
    x["state_indices"] = table(case.indices)
    if case.lengths:
        x["cu_seqlens"] = table([sum(case.lengths[:n]) for n in range(N + 1)])
    if case.accepted:
        slots, columns = N * case.steps + 3, case.W - 2 + case.steps
        permutation = torch.randperm(slots - 1, generator=generator)[: N * case.steps] + 1
        indices = permutation.view(N, case.steps)
        indices[torch.tensor(case.indices) < 0] = -1
        x["state_indices"] = table(indices.tolist())
        if case.with_write_indices:
            x["write_indices"] = x["state_indices"]
        x["num_accepted_tokens"] = table(case.accepted)
        x["state_pool"] = randn(slots, *state, like=states)
        x["window_pool"] = randn(slots, D, columns, like=windows)
        if not case.columns_last:
            x["window_pool"] = x["window_pool"].mT.contiguous().mT
    if case.kept_rows:
        rows = max(case.kept_rows) + 2
        x["intermediate_indices"] = table(case.kept_rows)
        x["intermediate_states"] = randn(rows, case.steps, *state, like=states)
        x["intermediate_windows"] = randn(rows, case.steps, D, case.W - 1, like=windows)
        if case.sliding:
            x["intermediate_windows"] = slide(x["intermediate_windows"])
        for name in {"states", "windows"} - {*case.kept}:
            del x[f"intermediate_{name}"]
        if "states" not in case.kept:
            del x["intermediate_indices"]
    if case.parents:
        x["parents"] = table([case.parents] * N)
    if not case.with_convolution:
        x |= dict.fromkeys(("conv_weight", "conv_bias", "window_pool", "intermediate_windows"))
    return x | {"update_state": case.update_state}


WRITTEN = ("window_pool", "state_pool", "intermediate_windows", "intermediate_states")


def is_sliding(windows: torch.Tensor) -> bool:
    return windows.stride(1) == windows.stride(3)


def expected(x: dict) -> dict:
    """y, and what the op writes, in float64, from q, k, v and o in the tokens' dtype: where o is small, because q and
    the keys before it are nearly orthogonal, its norm makes their rounding large."""
    y, N = torch.zeros(plain(x)["z"].shape, dtype=torch.float64), x["state_indices"].shape[0]
    tokens = {name: plain(x)[name].double().cpu() for name in ("mixed", "z", "a", "b")}
    parameters = ("conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias")
    shared = {name: None if x[name] is None else x[name].double().cpu() for name in parameters}
    shared["rounded"] = lambda y: y.to(x["mixed"].dtype).double()
    shared |= {name: x[name] for name in ("scale", "norm_eps", "norm_activation", "allow_neg_eigval") if name in x}
    before = {name: x[name].double().cpu() for name in WRITTEN if x.get(name) is not None}
    after = {name: tensor.clone() for name, tensor in before.items()}
    if x.get("intermediate_windows") is not None and is_sliding(x["intermediate_windows"]):
        after["intermediate_windows"] = slide(after["intermediate_windows"])
    tables = ("state_indices", "num_accepted_tokens", "write_indices", "intermediate_indices", "parents", "cu_seqlens")
    at = {name: x[name].tolist() for name in tables if name in x}
    V, K = x["state_pool"].shape[2:]
    H_v = x["state_pool"].shape[1]
    H_k = (tokens["mixed"].shape[-1] - H_v * V) // (2 * K)
    W, windows, pool = 4 if shared["conv_weight"] is None else shared["conv_weight"].shape[-1], None, None
    for n in range(N):
        row, begin, end = n, 0, tokens["z"].shape[1]
        if "cu_seqlens" in at:
            row, begin, end = 0, *at["cu_seqlens"][n : n + 2]
        slots = at["state_indices"][n]
        slots = slots if isinstance(slots, list) else [slots]
        accepted = at["num_accepted_tokens"][n] if "num_accepted_tokens" in at else 1
        if slots[accepted - 1] <= x.get("null_index", -1) or begin == end:
            continue
        pool = before.get("window_pool")
        if pool is not None:
            first = accepted - 1 if "num_accepted_tokens" in at else pool.shape[2] - (W - 1)
            windows = pool[slots[0]][None, :, first : first + W - 1]
        states = before["state_pool"][slots[accepted - 1]][None]
        for t in range(end - begin):
            path = [t]
            while path[0] >= 0:
                path.insert(0, at["parents"][n][path[0]] if "parents" in at else path[0] - 1)
            of_path = {name: tensor[row, begin:end][path[1:]][None] for name, tensor in tokens.items()}
            outputs, [state], window = formula(
                **of_path,
                **shared,
                num_k_heads=H_k,
                head_k_dim=K,
                state_v_first=True,
                initial_state=states,
                initial_window=windows,
            )
            y[row, begin + t] = outputs[0, -1]
            if "write_indices" in at:
                after["state_pool"][at["write_indices"][n][t]] = state
            elif x["update_state"] and t == end - begin - 1:
                after["state_pool"][slots[accepted - 1]] = state
            intermediate_row = at["intermediate_indices"][n] if "intermediate_indices" in at else n
            for name, value in (("intermediate_states", state), ("intermediate_windows", window)):
                if name in after and intermediate_row >= 0 and t < after[name].shape[1] and value is not None:
                    after[name][intermediate_row, t] = value[0] if "windows" in name else value
            if windows is not None and x["update_state"] and t == end - begin - 1:
                rows = torch.cat([windows[0], tokens["mixed"][row, begin:end][path[1:]].mT], -1)
                if "num_accepted_tokens" in at:
                    after["window_pool"][slots[0]][:, : W - 2 + t + 1] = rows[:, 1:]
                else:
                    after["window_pool"][slots[0]] = torch.cat([pool[slots[0]], rows[:, W - 1 :]], -1)[
                        :, -pool.shape[2] :
                    ]
    return {"y": y} | after


DRAFTS = {"lengths": (4, 2, 1, 0, 3), "indices": (4, 0, 6, 2, 3), "accepted": (1, 3, 2, 1, 4)}
TREE = {"parents": (-1, 0, 0, 1), "update_state": False, "kept_rows": (2, -1, 0, 1)}
CASES = (
    Case(**DRAFTS),
    Case(**DRAFTS, by_key_heads=True, columns_last=False, state_dtype=torch.bfloat16, int64=True),
    Case(lengths=(4, 3), indices=(1, -1), accepted=(2, 1), with_convolution=False, dtype=torch.float16),
    Case(lengths=(4, 3), indices=(1, 5), accepted=(3, 1), with_write_indices=False),
    Case(**TREE),
    Case(**TREE, H_k=2, H_v=8, state_dtype=torch.float16, by_key_heads=True),
    Case(**TREE | {"parents": (-1, 0, 1, 2)}, columns=4, with_convolution=False),
    Case(kept_rows=(0, 2, 1, 3), steps=2),
    Case(kept_rows=(0, 2, 1, 3), with_bias=False, with_dt_bias=False, K=64, V=72),
    *(Case(kept_rows=(0, 1, 2, 3), kept=(kept,)) for kept in ("states", "windows")),
    Case(kept_rows=(0, 2, 1, 3), sliding=True, update_state=False),
    # Without tokens a sequence may have the slot and the row of another
    Case(lengths=(4, 1, 0, 2), indices=(4, 0, 4, 2), kept_rows=(0, 2, 2, 3), sliding=True, columns_last=False),
    Case(**TREE | {"kept_rows": (0, 1, 2, 3)}, kept=("windows",)),
    Case(lengths=(8, 1, 7), indices=(3, 5, 0), columns=4, K=120, V=264, H_k=1, H_v=1, kept_rows=(3, 0, 1), steps=8),
    Case(lengths=(3, 2), indices=(1, 0), state_dtype=torch.float8_e4m3fn, options=(("null_index", 0),)),
    Case(
        T=8, H_k=1, H_v=4, indices=(1, 1), update_state=False, options=(("norm_activation", "sigmoid"), ("scale", 0.7))
    ),
    Case(T=3, indices=(4, 1), by_key_heads=True, with_convolution=False),
    Case(T=2, H_k=1, H_v=3, state_dtype=torch.bfloat16, options=(("allow_neg_eigval", True), ("norm_eps", 1e-2))),
    # A full card: half as many CTAs of a cluster would have too many rows each.
    Case(T=2, indices=(4, 0, 6, 2, 1, 3, 5), H_k=10, H_v=30, K=64),
)
# Bytes of a number -> the most relative error
BARS = {8: 1e-9, 4: 5e-4, 2: 4e-3, 1: 6e-2}


def draw(r: random.Random, sizes: dict) -> Case:
    """A case of these sizes."""
    kind, N, steps = r.choice(("slots", "rows", "tree", "plain")), r.randint(1, 5), r.randint(1, 8)
    packed = kind == "slots" or (kind != "tree" and r.random() < 0.5)
    indices = tuple(-1 if r.random() < 0.1 else slot for slot in r.sample(range(SLOTS), N))
    fields = sizes | {"indices": indices, "T": steps, "steps": steps, "W": 4, "columns": r.choice((3, 4))}
    fields |= {x: r.random() < 0.5 for x in ("by_key_heads", "columns_last", "with_bias", "with_dt_bias", "int64")}
    fields |= {"with_convolution": r.random() < 0.8, "update_state": kind != "tree" and r.random() < 0.7}
    states = (torch.float32, torch.bfloat16, torch.float16)
    fields["state_dtype"] = r.choice((*states, torch.float8_e5m2) if fields["K"] % 16 == 0 else states)
    fields["options"] = (("allow_neg_eigval", r.random() < 0.5), ("norm_activation", r.choice(("silu", "sigmoid"))))
    if packed:
        fields["lengths"] = (*(r.randint(0, steps) for _ in range(N - 1)), steps)
    if kind == "slots":
        fields["accepted"] = tuple(r.randint(1, steps) for _ in range(N))
        fields["with_write_indices"] = r.random() < 0.8
    if kind in ("rows", "tree"):
        rows = r.sample(range(N + 2), N)
        fields["kept_rows"] = tuple(-1 if r.random() < 0.1 else row for row in rows)
        choices = (("states",), ("states", "windows"), ("windows",))
        fields["kept"] = r.choice(choices if fields["with_convolution"] else choices[:1])
        if fields["kept"] == ("windows",):
            fields["kept_rows"] = tuple(range(N))
        fields["sliding"] = kind == "rows" and "windows" in fields["kept"] and r.random() < 0.5
    if kind == "tree":
        fields["parents"] = tuple(r.randint(-1, t - 1) for t in range(steps))
    return Case(**fields)


def check(case: Case, device: str, seed: int = 0) -> None:
    arguments = make(case, device, seed)
    inputs = copied(arguments)
    for name in WRITTEN[2:]:
        if arguments.get(name) is not None:
            inputs[name] = slide(arguments[name]) if case.sliding and "windows" in name else arguments[name].clone()
    results = {"y": flash_qla.decode_gated_delta_net(**inputs)} | {name: inputs.get(name) for name in WRITTEN}
    for name, x in expected(arguments).items():
        if "window" in name:
            assert torch.equal(results[name].cpu().double(), x), name
            continue
        size = case.dtype.itemsize if name == "y" else results[name].element_size()
        assert relative_error(results[name].double(), x.to(device)) < BARS[size], name
        untouched = x == (torch.zeros(()) if name == "y" else arguments[name].cpu().double())
        assert torch.equal(results[name].cpu().double()[untouched], x[untouched]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula(case, device):
    check(case, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula_in_float64(case):
    check(dataclasses.replace(case, dtype=torch.float64, state_dtype=torch.float64), "cpu")


@pytest.mark.gpu
@pytest.mark.hopper
def test_one_kernel(tmp_path):
    for i, case in enumerate((Case(**DRAFTS), Case(**TREE), CASES[2], test_decode_region.Case(T=3))):
        arguments = (make if isinstance(case, Case) else test_decode_region.make)(case, "cuda")
        (tmp_path / str(i)).mkdir()
        names = launched(lambda arguments=arguments: flash_qla.decode_gated_delta_net(**arguments), tmp_path / str(i))
        assert len(names) == 1 and names[0].startswith("decode_region_drafts"), names


def test_drafts_that_are_accepted(device):
    """Two steps of drafts, of which a part is accepted, give what one step of the accepted tokens gives."""
    case = Case(lengths=(4, 4), indices=(1, 2), accepted=(1, 1))
    first, second = make(case, device), make(case, device, seed=1)
    pools = {name: first[name] for name in ("window_pool", "state_pool", "state_indices", "write_indices")}
    y = flash_qla.decode_gated_delta_net(**first)
    second |= pools | {x: first[x] for x in ("conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias")}
    second["num_accepted_tokens"] = torch.tensor([2, 4], dtype=torch.int32, device=device)
    later = flash_qla.decode_gated_delta_net(**second)
    for n, accepted in enumerate((2, 4)):
        tokens = {}
        for name in ("mixed", "z", "a", "b"):
            of_both = first[name][:, 4 * n : 4 * n + accepted], second[name][:, 4 * n : 4 * n + 4]
            tokens[name] = torch.cat(of_both, 1)
        start = make(case, device)
        slot = start["state_indices"][n, :1].long()
        alone = start | tokens | {"window_pool": start["window_pool"][..., :3], "state_indices": slot}
        alone |= dict.fromkeys(("cu_seqlens", "num_accepted_tokens", "write_indices"))
        whole = flash_qla.decode_gated_delta_net(**alone)
        both = torch.cat([y[:, 4 * n : 4 * n + accepted], later[:, 4 * n : 4 * n + 4]], 1)
        assert relative_error(both.double(), whole.double()) < 5e-3


def test_a_sequence_does_not_depend_on_its_batch(device):
    case = Case(lengths=(4, 2, 3, 1), accepted=(1, 3, 2, 1), H_v=8)
    arguments = make(case, device)
    together = copied(arguments)
    y, begin = flash_qla.decode_gated_delta_net(**together), 0
    for n, length in enumerate(case.lengths):
        alone = copied(arguments)
        one = {name: alone[name][:, begin : begin + length] for name in ("mixed", "z", "a", "b")}
        one |= {name: alone[name][n : n + 1] for name in ("state_indices", "write_indices", "num_accepted_tokens")}
        one["cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32, device=device)
        assert same(flash_qla.decode_gated_delta_net(**alone | one), y[:, begin : begin + length])
        slots = arguments["write_indices"][n, :length].long()
        for name in ("window_pool", "state_pool"):
            changed = slots[:1] if name == "window_pool" else slots
            assert same(alone[name][changed], together[name][changed]), name
        begin += length


def test_tokens_of_no_sequence(device):
    arguments = make(Case(lengths=(2, 3), indices=(1, 4)), device)
    arguments["cu_seqlens"] = arguments["cu_seqlens"].clamp(max=4)
    y = flash_qla.decode_gated_delta_net(**arguments, out=torch.full_like(plain(arguments)["z"], torch.nan))
    assert y[:, :4].isfinite().all() and not y[:, 4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("outside", (3, 2**31 - 1, -2))
def test_kept_rows_outside(outside):
    """They keep nothing, not in the memory around the rows either."""
    results = []
    for row in (outside, -1):
        arguments = make(Case(kept_rows=(3, 0, 2, 1), update_state=False), "cuda")
        memories = {name: arguments[name] for name in WRITTEN[2:]}
        arguments |= {name: memory[1:4] for name, memory in memories.items()}
        arguments["intermediate_indices"] = torch.tensor((row, 0, 2, 1), dtype=torch.int32, device="cuda")
        y = flash_qla.decode_gated_delta_net(**arguments)
        results.append((y, *memories.values()))
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
def test_more_accepted_tokens_than_columns():
    """As many as there are columns: the next column belongs to another sequence."""
    results = []
    for accepted in (4, 99):
        arguments = make(Case(lengths=(4, 2, 3), indices=(4, 5, 6), accepted=(1, 3, 4)), "cuda")
        arguments["num_accepted_tokens"].fill_(accepted)
        y = flash_qla.decode_gated_delta_net(**arguments)
        results.append((y, arguments["state_pool"], arguments["window_pool"]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("by_key_heads", (False, True))
def test_strides_of_tokens(by_key_heads, device):
    """Any, also of channels: bits as with contiguous tokens."""
    for case in (Case(**DRAFTS, by_key_heads=by_key_heads), Case(T=2, indices=(1, 4), by_key_heads=by_key_heads)):
        arguments = make(case, device)
        strided = copied(arguments)
        for name in ("mixed", "z", "a", "b"):
            strided[name] = torch.repeat_interleave(arguments[name], 2, -1)[..., ::2]
        assert same(flash_qla.decode_gated_delta_net(**strided), flash_qla.decode_gated_delta_net(**arguments))


WRONG = {
    "window_pool is None, expected a tensor with conv_weight": {"window_pool": None},
    "conv_bias is a tensor, expected None without conv_weight": {"conv_weight": None},
    "window_pool has 5 columns, expected at least 6 with num_accepted_tokens": {"window_pool": (19, 1024, 5)},
    "parents is a tensor, expected None with num_accepted_tokens": {"parents": (4, 4)},
    "window_pool has dtype float64, expected bfloat16": {"window_pool": (19, 1024, 6, torch.float64)},
    "intermediate_windows has shape": {"intermediate_windows": (3, 4, 1024, 4)},
    "intermediate_windows has dtype float32, expected bfloat16": {
        "intermediate_windows": (3, 4, 1024, 3, torch.float32)
    },
    "write_indices has 3 dimensions": {"write_indices": (4, 4, 1)},
    "num_accepted_tokens has": {"num_accepted_tokens": (3,)},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fake_takes_what_the_op_takes(case):
    arguments = on_meta(make(case, "cpu"))
    y = flash_qla.decode_gated_delta_net(**arguments)
    assert y.shape == plain(arguments)["z"].shape and y.dtype == case.dtype


@pytest.mark.parametrize("on", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu), "meta"))
@pytest.mark.parametrize("text", WRONG)
def test_errors(text, on, errors_change_nothing):
    device = "cpu" if on == "meta" else on
    arguments = make(Case(lengths=(4, 2, 1, 3), accepted=(1, 1, 1, 1)), device)
    [(name, shape)] = WRONG[text].items()
    wrong = None
    if shape is not None:
        like = arguments.get(name, arguments["state_indices"] if name == "parents" else arguments["mixed"])
        dtype = shape[-1] if isinstance(shape[-1], torch.dtype) else like.dtype
        wrong = torch.zeros([x for x in shape if isinstance(x, int)], dtype=dtype, device=device)
    arguments |= {name: wrong}
    if on == "meta":  # a part's fake has its own name for an argument
        text = text.partition(" ")[2]
    with pytest.raises(RuntimeError, match=re.escape(text)):
        flash_qla.decode_gated_delta_net(**on_meta(arguments) if on == "meta" else arguments)


@pytest.mark.parametrize("on", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu), "meta"))
def test_windows_of_a_tree_do_not_slide(on, errors_change_nothing):
    arguments = make(Case(**TREE | {"kept_rows": (0, 1, 2, 3)}), "cpu" if on == "meta" else on)
    arguments = on_meta(arguments) if on == "meta" else arguments
    arguments["intermediate_windows"] = slide(arguments["intermediate_windows"])
    with pytest.raises(RuntimeError, match="intermediate_windows share memory from step to step"):
        flash_qla.decode_gated_delta_net(**arguments)


def test_sliding_windows_apart_from_all_else(errors_change_nothing):
    """Rows of windows that share memory with each other, or with another argument, are refused as before."""
    arguments = make(Case(kept_rows=(0, 2, 1, 3), sliding=True), "cpu")
    rows, _, D, columns = arguments["intermediate_windows"].shape
    memory = arguments["window_pool"].new_zeros(rows * D * (columns + 3))
    one_row = memory[: D * (columns + 3)].view(1, D, -1).expand(rows, -1, -1)
    with pytest.raises(RuntimeError, match=r"intermediate_windows has shape .* expected elements that do not overlap"):
        flash_qla.decode_gated_delta_net(
            **arguments | {"intermediate_windows": one_row.unfold(2, columns, 1).transpose(1, 2)}
        )
    pool = arguments["window_pool"]
    both = pool.new_zeros(pool.numel() + memory.numel())
    shared = {"window_pool": both[-pool.numel() - 1 : -1].view(pool.shape)}
    shared["intermediate_windows"] = both[: memory.numel()].view(rows, D, -1).unfold(2, columns, 1).transpose(1, 2)
    with pytest.raises(RuntimeError, match="shares memory with"):
        flash_qla.decode_gated_delta_net(**arguments | shared)


def test_errors_of_contents(errors_change_nothing):
    arguments = make(Case(**DRAFTS), "cpu")
    for name, index, value in (
        ("num_accepted_tokens", 1, 5),
        ("state_indices", (2, 1), 99),
        ("write_indices", (0, 3), 99),
        ("cu_seqlens", 2, 1),
    ):
        table = arguments[name].clone()
        table[index] = value
        with pytest.raises(RuntimeError, match=rf"{name}\["):
            flash_qla.decode_gated_delta_net(**arguments | {name: table})
    arguments = make(Case(**TREE), "cpu")
    table = arguments["intermediate_indices"].fill_(1)
    with pytest.raises(RuntimeError, match=r"intermediate_indices\["):
        flash_qla.decode_gated_delta_net(**arguments | {"intermediate_indices": table})
