"""The causal depthwise convolution: causal_conv1d, its gradients, and prefill_causal_conv1d on windows in a pool."""

import dataclasses
import itertools

import pytest
import reference
import torch
from poison import poisoned

import flash_qla

ops = torch.ops.flash_qla


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] | None = None  # packed sequences, then `padding` tokens of none; None: B x T
    padding: int = 0
    B: int = 1
    T: int = 70
    D: int = 40
    W: int = 4
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None  # that of x
    state_dtype: torch.dtype | None = torch.float32  # None: no initial state
    columns: int | None = None  # of windows: W - 1
    bias: bool = True
    use_silu: bool = True
    cu_dtype: torch.dtype = torch.int32


LENGTHS = (2, 0, 65, 1, 3, 0, 130, 2, 64)  # boundaries inside tiles, and sequences shorter than the window
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASES = (
    Case(B=2, T=300),
    Case(LENGTHS, padding=9),
    Case(LENGTHS, padding=9, W=3, D=129, cu_dtype=torch.int64, state_dtype=BF16),
    Case(LENGTHS, W=2, use_silu=False, bias=False, columns=2),
    Case(LENGTHS, padding=3, dtype=FP16, columns=4, weight_dtype=FP32),
    Case(LENGTHS, dtype=FP32, D=36, columns=4),
    Case(LENGTHS, dtype=FP32, D=7, W=3, state_dtype=None, bias=False),
    Case(B=3, T=1, D=260, W=4),
    Case(B=3, T=2, D=30, W=4, use_silu=False),
    Case(B=2, T=0),
    Case((0, 0, 0), padding=5, columns=4),
    Case((), padding=5),
    Case(B=1, T=700, D=520, state_dtype=None),
    Case(tuple(range(12)), columns=4),  # whole steps of a lane, and others, before the end
)
BARS = {BF16: 3e-3, FP16: 4e-4, FP32: 2e-6, FP64: 1e-14}  # of y and dx; the sums are exact to the compute dtype
SUMS = {FP64: 1e-13}
SUM_BAR = 4e-6

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def make_inputs(case: Case, device: str, seed: int = 0) -> dict:
    """Arguments of the op causal_conv1d."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    packed = case.lengths is not None
    B, T = (1, sum(case.lengths) + case.padding) if packed else (case.B, case.T)
    N, columns = len(case.lengths) if packed else B, case.columns or case.W - 1
    weight_dtype = case.weight_dtype or case.dtype
    inputs = {"x": randn(B, T, case.D, dtype=case.dtype), "weight": randn(case.D, case.W, dtype=weight_dtype)}
    inputs |= {"bias": randn(case.D, dtype=weight_dtype) if case.bias else None, "use_silu": case.use_silu}
    state = None if case.state_dtype is None else randn(N, case.D, columns, dtype=case.state_dtype)
    offsets = list(itertools.accumulate(case.lengths, initial=0)) if packed else None
    cu_seqlens = torch.tensor(offsets, dtype=case.cu_dtype).to(device) if packed else None
    return inputs | {"initial_state": state, "cu_seqlens": cu_seqlens}


def make_gradients(case: Case, inputs: dict, seed: int = 1) -> dict:
    """dy, which is NaN in padding, and dht, [N, D, columns]."""
    generator = torch.Generator().manual_seed(seed)
    x, state, offsets = inputs["x"], inputs["initial_state"], inputs["cu_seqlens"]
    dy = torch.randn(x.shape, generator=generator).to(x)
    if offsets is not None:
        dy[:, offsets[-1] :] = torch.nan
    N = len(x) if offsets is None else len(offsets) - 1
    shape = (N, case.D, case.W - 1) if state is None else state.shape
    return {"dy": dy, "dht": torch.randn(shape, generator=generator).to(x.device, case.state_dtype or case.dtype)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel() or not expected.any():
        return float(actual.double().abs().sum())
    return float((actual.double() - expected).norm() / expected.norm())


def bar_of(name: str, dtype: torch.dtype) -> float:
    return BARS[dtype] if name in ("y", "dx") else SUMS.get(dtype, SUM_BAR)


def assert_close(actual: dict, expected: dict, dtype: torch.dtype):
    for name, x in expected.items():
        assert relative_error(actual[name], x) <= bar_of(name, dtype), name


def run_ops(inputs: dict, gradients: dict) -> dict:
    """The op and its backward."""
    results = ops.causal_conv1d(**inputs, output_final_state=True) + ops.causal_conv1d_bwd(**inputs, **gradients)
    return dict(zip(("y", "final_state", "dx", "dweight", "dbias", "dh0"), results, strict=True))


def run(inputs: dict, gradients: dict) -> dict:
    """The same over NaN."""
    with poisoned(inputs["x"].device.type):
        return run_ops(inputs, gradients)


def expected_of(inputs: dict, gradients: dict) -> dict:
    leaves = {x: y.double().requires_grad_() for x, y in inputs.items() if torch.is_tensor(y) and x != "cu_seqlens"}
    y, final_state = reference.causal_conv1d(**inputs | leaves)
    loss = (y * gradients["dy"].double().nan_to_num()).sum() + (final_state * gradients["dht"].double()).sum()
    loss = loss + 0 * sum(x.sum() for x in leaves.values())  # without sequences it depends on nothing
    grads = torch.autograd.grad(loss, list(leaves.values()))
    names = {"x": "dx", "weight": "dweight", "bias": "dbias", "initial_state": "dh0"}
    named = dict(zip((names[x] for x in leaves), grads, strict=True))
    return {"y": y.detach(), "final_state": final_state.detach()} | named


def ratios(case: Case, device: str = "cuda") -> dict[str, float]:
    """The errors of a call and of its gradients, as parts of their bars."""
    inputs = make_inputs(case, device)
    gradients = make_gradients(case, inputs)
    actual, expected = run(inputs, gradients), expected_of(inputs, gradients)
    return {name: relative_error(actual[name], x) / bar_of(name, case.dtype) for name, x in expected.items()}


def equal(actual: dict, expected: dict) -> bool:
    return all(torch.equal(actual[x], y) for x, y in expected.items())


@each_case
def test_reference(device, case):
    """Padding is NaN in x and dy, and gets zeros."""
    inputs = make_inputs(case, device)
    gradients = make_gradients(case, inputs)
    expected = expected_of(inputs, gradients)
    if case.padding:
        inputs["x"][:, -case.padding :] = torch.nan
    actual = run(inputs, gradients)
    assert_close(actual, expected, case.dtype)
    for of in ("y", "dx"):
        assert not case.padding or not actual[of][:, -case.padding :].any()
    assert actual["y"].dtype == actual["dx"].dtype == case.dtype
    assert actual["final_state"].dtype == (case.state_dtype or case.dtype)
    assert torch.equal(actual["final_state"].double(), expected["final_state"])  # rows are copied
    assert equal(run(inputs, gradients), actual)


@pytest.mark.parametrize("case", [dataclasses.replace(x, dtype=FP64, state_dtype=FP64) for x in CASES[:6]], ids=str)
def test_reference_in_fp64(case):
    inputs = make_inputs(case, "cpu")
    gradients = make_gradients(case, inputs)
    assert_close(run(inputs, gradients), expected_of(inputs, gradients), FP64)


@each_case
def test_autograd(device, case):
    """The functions' gradients are the op's, in the dtypes of their tensors."""
    inputs = make_inputs(case, device)
    gradients = make_gradients(case, inputs)
    expected = run(inputs, gradients)
    activation = "silu" if inputs.pop("use_silu") else None
    leaves = {x: y.clone().requires_grad_() for x, y in inputs.items() if torch.is_tensor(y) and x != "cu_seqlens"}
    y, final_state = flash_qla.causal_conv1d(**inputs | leaves, activation=activation, output_final_state=True)
    torch.autograd.backward((y, final_state), (gradients["dy"], gradients["dht"]))
    names = {"x": "dx", "weight": "dweight", "bias": "dbias", "initial_state": "dh0"}
    for x, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert torch.equal(leaf.grad, expected[names[x]].to(leaf.dtype)), x


def test_no_gradient_of_a_final_state(device):
    """And none of y: each alone is the other's zero."""
    inputs = make_inputs(CASES[1], device)
    gradients = make_gradients(CASES[1], inputs)
    x = inputs["x"].requires_grad_()
    for output in range(2):
        results = ops.causal_conv1d(**inputs, output_final_state=True)
        grad_outputs = list(gradients.values())
        (dx,) = torch.autograd.grad(results[output], x, grad_outputs[output])
        alone = gradients | {"dht": None} if output == 0 else gradients | {"dy": torch.zeros_like(x)}
        assert torch.equal(dx, run(inputs, alone)["dx"])
    assert flash_qla.causal_conv1d(x, inputs["weight"])[1] is None


def test_gradcheck():
    for case in (CASES[1], CASES[3], Case(B=2, T=2, columns=4)):
        case = dataclasses.replace(case, dtype=FP64, D=3, lengths=case.lengths and (3, 0, 1, 6), state_dtype=FP64)
        inputs = make_inputs(case, "cpu")
        leaves = [x for x in ("x", "weight", "bias", "initial_state") if inputs[x] is not None]

        def function(*tensors, inputs=inputs, leaves=leaves):
            return ops.causal_conv1d(**inputs | dict(zip(leaves, tensors, strict=True)), output_final_state=True)

        assert torch.autograd.gradcheck(function, [inputs[x].requires_grad_() for x in leaves])


@pytest.mark.parametrize("W", (2, 3, 4))
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("wide", (False, True))
def test_pieces_are_the_whole(device, W, dtype, wide):
    """A sequence in pieces, whose windows are handed on, has the bits of the whole one."""
    case = Case(B=2, T=150, W=W, dtype=dtype, state_dtype=dtype, columns=W if wide else W - 1, D=44)
    inputs = make_inputs(case, device)
    y, final_state = ops.causal_conv1d(**inputs, output_final_state=True)
    parts, window = [], inputs["initial_state"]
    for part in inputs["x"].split([1, 1, 0, 2, 3, 64, 1, 70, 8], 1):
        of_part = inputs | {"x": part, "initial_state": window}
        out, window = ops.causal_conv1d(**of_part, output_final_state=True)
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), y) and torch.equal(window, final_state)


def slices(x, left: int = 8, right: int = 8):
    wide = x.new_full((*x.shape[:-1], left + x.shape[-1] + right), torch.nan)
    wide[..., left : left + x.shape[-1]] = x
    return wide[..., left : left + x.shape[-1]]


LAYOUTS = {
    "slices": slices,
    "slices of aligned rows": lambda x: slices(x, 8, 8 + -x.shape[-1] % 8),
    "odd slices": lambda x: slices(x, 3, 2),
    "channels before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens before batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd start": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case", (Case(B=2, T=70), Case(LENGTHS, padding=3, dtype=FP32), Case(LENGTHS, D=33, dtype=FP16)), ids=str
)
def test_layouts(device, layout, case):
    """The same bits in any layout of x, dy and windows. dweight and dbias may be summed by other tiles."""
    inputs = make_inputs(case, device)
    gradients = make_gradients(case, inputs)
    expected = run(inputs, gradients)
    change = LAYOUTS[layout]
    moved = {"x": change(inputs["x"]), "initial_state": slices(inputs["initial_state"].mT).mT}
    moved |= {"weight": slices(inputs["weight"]), "bias": slices(inputs["bias"])}
    actual = run(inputs | moved, {"dy": change(gradients["dy"]), "dht": slices(gradients["dht"])})
    for name in ("y", "final_state", "dx", "dh0"):
        assert torch.equal(actual[name], expected[name]), name
    for name in ("dweight", "dbias"):
        assert relative_error(actual[name], expected[name].double()) <= SUM_BAR


def test_weight_of_a_module(device):
    """[D, 1, W], as of torch.nn.Conv1d, whose results are the same."""
    inputs = make_inputs(Case(B=2, T=30, dtype=FP32, state_dtype=None, D=24), device)
    inputs["x"].requires_grad_()
    conv = torch.nn.Conv1d(24, 24, 4, groups=24, padding=3).to(device)
    y, _ = flash_qla.causal_conv1d(inputs["x"], conv.weight, conv.bias)
    expected = torch.nn.functional.silu(conv(inputs["x"].mT)[..., :30]).mT
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(out.sum(), (inputs["x"], conv.weight, conv.bias)) for out in (y, expected))
    for actual_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-4, atol=1e-4)


def test_extreme_numbers(device):
    """Nothing overflows in the sigmoid, and an infinity stays in its sequence and its W tokens."""
    x = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 1e4], dtype=FP32, device=device)
    x = x[None, :, None].repeat(1, 1, 4)
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 4, device=device)
    y, _ = flash_qla.causal_conv1d(x, weight)
    dx = ops.causal_conv1d_bwd(x, weight, None, torch.ones_like(x))[0]
    leaf = x.double().requires_grad_()
    expected = torch.nn.functional.silu(leaf)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=2e-6, atol=1e-35)
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=1e-7)
    case = Case((40, 30), D=8, state_dtype=None)
    inputs = make_inputs(case, device)
    finite = ops.causal_conv1d(**inputs)[0]
    inputs["x"][0, 36] = torch.inf
    y = ops.causal_conv1d(**inputs)[0]
    others = [*range(36), *range(40, 70)]
    assert torch.equal(y[:, others], finite[:, others]) and not y[:, 36:40].isfinite().any()


def test_autocast(device):
    """Casts x, as a product's factors; windows keep their dtype."""
    inputs = make_inputs(Case(B=2, T=30, dtype=FP32), device)
    with torch.autocast(device, BF16):
        y, state = ops.causal_conv1d(**inputs, output_final_state=True)
    assert y.dtype == BF16 and state.dtype == FP32
    assert torch.equal(y, ops.causal_conv1d(**inputs | {"x": inputs["x"].bfloat16()})[0])


# Pools

SLOTS = 11
POOLS = {
    "contiguous": lambda pool: pool,
    "tokens before channels": lambda pool: pool.mT.contiguous().mT,
    "in pages": lambda pool: slices(pool.flatten(1)).unflatten(1, pool.shape[1:]),
}


def make_pool(case: Case, device: str, layout: str = "contiguous") -> torch.Tensor:
    pool = torch.randn(SLOTS, case.D, case.columns or case.W - 1, generator=torch.Generator().manual_seed(5))
    return POOLS[layout](pool.to(device, case.state_dtype))


@pytest.mark.parametrize("layout", POOLS)
@pytest.mark.parametrize(
    "case",
    (
        Case(LENGTHS, padding=3),
        Case(LENGTHS, W=3, D=33, state_dtype=BF16, columns=3),
        Case(LENGTHS, dtype=FP16, columns=4),
        Case(B=9, T=2, dtype=FP32),
        Case(B=9, T=0),
    ),
    ids=str,
)
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
def test_pool(device, layout, case, index_dtype):
    """A call on a pool is the call on its windows. Null slots and flags that are False start from zeros; null slots and
    slots of no sequence keep their contents."""
    inputs = make_inputs(case, device)
    pool, inputs["initial_state"] = make_pool(case, device, layout), None
    slots = [4, 9, 0, 7, -1, 2, 10, 5, -3]
    flags = [True, True, False, True, True, False, True, True, True]
    starts = (
        pool[slots] * torch.tensor([s >= 0 and f for s, f in zip(slots, flags, strict=True)]).to(pool)[:, None, None]
    )
    y, windows = ops.causal_conv1d(**inputs | {"initial_state": starts}, output_final_state=True)
    after = pool.clone()
    for n, slot in enumerate(slots):
        if slot >= 0:
            after[slot] = windows[n]
    del inputs["initial_state"]
    use_silu = inputs.pop("use_silu")
    with poisoned(device):
        actual = flash_qla.prefill_causal_conv1d(
            **inputs,
            state_pool=pool,
            state_indices=torch.tensor(slots).to(device, index_dtype),
            has_initial_state=torch.tensor(flags).to(device),
            activation="silu" if use_silu else None,
        )
    assert torch.equal(actual, y) and torch.equal(pool, after)


def test_empty_sequences_share_slots(device):
    """A sequence without tokens changes nothing, so its slot may be another sequence's."""
    case = Case((5, 0, 0), state_dtype=BF16)
    inputs = make_inputs(case, device)
    pool = make_pool(case, device)
    _, windows = ops.causal_conv1d(**inputs | {"initial_state": pool[[3, 3, 4]]}, output_final_state=True)
    after = pool.clone()
    after[3] = windows[0]
    arguments = {x: inputs[x] for x in ("x", "weight", "bias", "cu_seqlens")}
    slots = torch.tensor([3, 3, 4]).to(device)
    flash_qla.prefill_causal_conv1d(**arguments, state_pool=pool, state_indices=slots)
    assert torch.equal(pool, after)


def test_null_index_and_rows_of_checkpoints(device):
    """No row is null."""
    case = Case(B=2, T=6, state_dtype=BF16)
    inputs = make_inputs(case, device)
    arguments = {x: inputs[x] for x in ("x", "weight", "bias")} | {"state_indices": torch.tensor([4, 5]).to(device)}
    kept = []
    for null_index in (-1, 3):
        kept.append(torch.full((6, case.D, 3), torch.nan, dtype=BF16, device=device))
        options = {"null_index": null_index, "checkpoint_every": 2, "checkpoints": kept[-1]}
        flash_qla.prefill_causal_conv1d(**arguments, **options, state_pool=make_pool(case, device))
    assert torch.equal(*kept)


def test_null_index(device):
    """Slots up to null_index are null."""
    case = Case(B=3, T=5, state_dtype=BF16)
    inputs = make_inputs(case, device)
    pool, before = make_pool(case, device), make_pool(case, device)
    arguments = {x: inputs[x] for x in ("x", "weight", "bias")}
    slots = torch.tensor([0, 1, 2]).to(device)
    flash_qla.prefill_causal_conv1d(**arguments, state_pool=pool, state_indices=slots, null_index=0)
    changed = (pool != before).flatten(1).any(1)
    assert changed.tolist() == [False, True, True] + [False] * (SLOTS - 3)


def windows_after(rows: torch.Tensor, columns: int, tokens: int) -> torch.Tensor:
    """The window after so many tokens. rows: the initial window, then the tokens, [D, columns + T]."""
    return rows[:, tokens : tokens + columns]


@pytest.mark.parametrize("kept", ("rows", "slots", "few"))
@pytest.mark.parametrize("every", (1, 2, 3, 5, 64))
@pytest.mark.parametrize(
    "case",
    (
        Case(LENGTHS, padding=3, D=130),
        Case((3, 1, 0, 2) * 10, D=8),
        Case(LENGTHS, W=3, columns=3, dtype=FP16, state_dtype=FP16),
        Case(B=9, T=7, W=2),
    ),
    ids=str,
)
def test_checkpoints(device, case, every, kept):
    """Windows after `every` tokens, after twice as many, and so on; sequences without checkpoints start from shared
    slots. In the pool the last checkpoint of the others goes to the slot that they started from. Rows and columns
    beyond the checkpoints stay as they are."""
    inputs = make_inputs(case, device)
    lengths = list(case.lengths) if case.lengths else [case.T] * case.B
    counts, N = [length // every for length in lengths], len(lengths)
    columns = case.columns or case.W - 1
    total = 4 * N + sum(counts)
    pool = torch.randn(total, case.D, columns, generator=torch.Generator().manual_seed(5)).to(device, case.state_dtype)
    pool = POOLS["in pages"](pool)
    first = [n if counts[n] else N + n % 2 for n in range(N)]
    first[4] = first[lengths.index(0) if 0 in lengths else 4] = -1  # an empty sequence's window is zero then
    final_slots = [2 * N + n for n in range(N)]
    final_slots[3] = -2
    checkpoint_slots, free = [], iter(range(4 * N, total))
    for n, count in enumerate(counts):
        checkpoint_slots.append([next(free) for _ in range(count)])
        if count and first[n] == n:
            checkpoint_slots[n][-1] = n  # where it started
    x = inputs["x"][0] if case.lengths else inputs["x"].flatten(0, 1)
    before, after, rows, begin = pool.clone(), pool.clone(), [], 0
    initial = torch.zeros(N, case.D, columns, dtype=case.state_dtype, device=device)
    width = max(max(counts) + (-1 if kept == "few" else 1), 0)
    for n, length in enumerate(lengths):
        if final_slots[n] >= 0 and first[n] >= 0:
            initial[n] = before[first[n]]
        known = torch.cat([initial[n], x[begin : begin + length].mT.to(case.state_dtype)], 1)
        begin += length
        checkpoints = [windows_after(known, columns, (j + 1) * every) for j in range(counts[n])]
        rows += checkpoints if final_slots[n] >= 0 else [torch.zeros_like(initial[n])] * counts[n]
        if final_slots[n] >= 0 and (length or first[n] < 0):
            after[final_slots[n]] = windows_after(known, columns, length)
        for j, window in enumerate(checkpoints[:width]):
            if kept != "rows" and final_slots[n] >= 0:
                after[checkpoint_slots[n][j]] = window
    y, _ = ops.causal_conv1d(**inputs | {"initial_state": initial})
    arguments = {name: inputs[name] for name in ("x", "weight", "bias", "cu_seqlens")}
    arguments |= {"state_indices": torch.tensor(final_slots), "initial_state_indices": torch.tensor(first)}
    if kept == "rows":
        arguments["checkpoints"] = actual_rows = torch.zeros(sum(counts) + 1, case.D, columns, dtype=case.state_dtype)
        arguments["checkpoints"] = actual_rows = actual_rows.to(device).mT.contiguous().mT
    else:
        table = 3 * N + torch.arange(N)[:, None].repeat(1, width)  # of no checkpoint
        for n, slots in enumerate(checkpoint_slots):
            table[n, : len(slots)] = torch.tensor(slots[:width])
        arguments["checkpoint_indices"] = table
    arguments = {name: x.to(device) if torch.is_tensor(x) else x for name, x in arguments.items()}
    with poisoned(device):
        actual = flash_qla.prefill_causal_conv1d(**arguments, state_pool=pool, checkpoint_every=every)
    assert torch.equal(actual, y) and torch.equal(pool, after)
    if kept == "rows":
        assert torch.equal(actual_rows, torch.stack([*rows, torch.zeros_like(initial[0])]))


def test_checkpoints_beside_the_window_they_start_from(device):
    """The last window replaces the initial one. The first checkpoints still need columns of that one."""
    case = Case((5, 1, 2), state_dtype=BF16)
    inputs = make_inputs(case, device)
    arguments = {x: inputs[x] for x in ("x", "weight", "bias", "cu_seqlens")} | {"checkpoint_every": 1}
    pool, apart = make_pool(case, device), make_pool(case, device)
    kept, expected = (torch.zeros(8, case.D, 3, dtype=BF16, device=device) for _ in range(2))
    first, last = torch.tensor([3, 4, 5], device=device), torch.tensor([6, 7, 0], device=device)
    flash_qla.prefill_causal_conv1d(**arguments, state_pool=pool, state_indices=first, checkpoints=kept)
    of_apart = {"state_pool": apart, "state_indices": last, "initial_state_indices": first, "checkpoints": expected}
    flash_qla.prefill_causal_conv1d(**arguments | of_apart)
    assert torch.equal(kept, expected) and torch.equal(pool[first], apart[last])


# Errors


def on_pool(inputs: dict, **changes) -> None:
    arguments = {x: inputs[x] for x in ("x", "weight", "bias", "cu_seqlens")}
    pool = make_pool(Case(D=8, state_dtype=BF16), inputs["x"].device)
    slots = torch.tensor([1, 2], device=inputs["x"].device)
    flash_qla.prefill_causal_conv1d(**arguments | {"state_pool": pool, "state_indices": slots} | changes)


WRONG = {
    "x has 2 dimensions (shape [5, 8]), expected 3 ([B, T, D])": {"x": torch.zeros(5, 8)},
    "x has dtype int64, expected bfloat16, float16, float32 or float64": {"x": torch.zeros(1, 5, 8).long()},
    "x has 0 channels, expected 1 to 2147483647": {"x": torch.zeros(1, 5, 0)},
    "x has batch size 2, expected 1 with cu_seqlens": {"x": torch.zeros(2, 5, 8, dtype=BF16)},
    "weight has shape [8, 5], expected [8, W] or [8, 1, W], W from 2 to 4": {"weight": torch.zeros(8, 5)},
    "weight has shape [8, 1], expected [8, W]": {"weight": torch.zeros(8, 1)},
    "weight has shape [7, 4], expected [8, W]": {"weight": torch.zeros(7, 4)},
    "weight has shape [8, 2, 4], expected [8, W]": {"weight": torch.zeros(8, 2, 4)},
    "weight has dtype float16, expected bfloat16, the dtype of x, or float32": {"weight": torch.zeros(8, 4).half()},
    "bias has shape [7], expected [8] ([D])": {"bias": torch.zeros(7)},
    "bias has dtype float64, expected bfloat16, the dtype of x, or float32": {"bias": torch.zeros(8).double()},
    "initial_state has shape [2, 8, 2], expected [2, 8, 3 or 4]": {"initial_state": torch.zeros(2, 8, 2)},
    "initial_state has shape [3, 8, 3], expected [2, 8, 3 or 4]": {"initial_state": torch.zeros(3, 8, 3)},
    "initial_state has dtype float16, expected": {"initial_state": torch.zeros(2, 8, 3).half()},
    "cu_seqlens has dtype float32, expected int32 or int64": {"cu_seqlens": torch.zeros(3)},
    "cu_seqlens has shape [0], expected at least one offset": {"cu_seqlens": torch.zeros(0).long()},
}
WRONG_GRADIENTS = {
    "dy has shape [1, 4, 8], expected [1, 5, 8] ([B, T, D], like x)": {"dy": torch.zeros(1, 4, 8)},
    "dht has shape [2, 8, 4], expected [2, 8, 3] ([N, D, columns], like the final state)": {
        "dht": torch.zeros(2, 8, 4)
    },
    "dy has dtype int64, expected": {"dy": torch.zeros(1, 5, 8).long()},
    "dht has dtype int64, expected": {"dht": torch.zeros(2, 8, 3).long()},
}
WRONG_POOLS = {
    "state_pool has shape [11, 8, 2], expected [11, 8, 3 or 4]": {"state_pool": torch.zeros(11, 8, 2)},
    "state_pool has 2 dimensions": {"state_pool": torch.zeros(11, 8)},
    "state_pool has dtype float16": {"state_pool": torch.zeros(11, 8, 3).half()},
    "state_indices has 3 rows, expected 2": {"state_indices": torch.tensor([1, 2, 3])},
    "state_indices has dtype float32": {"state_indices": torch.zeros(2)},
    "has_initial_state has dtype int64, expected bool": {"has_initial_state": torch.tensor([1, 0])},
    "has_initial_state has shape [3], expected [2]": {"has_initial_state": torch.ones(3).bool()},
    "initial_state_indices has 3 rows, expected 2": {"initial_state_indices": torch.tensor([1, 2, 3])},
    "checkpoints has shape [2, 8, 4], expected [2, 8, 3]": {
        "checkpoint_every": 2,
        "checkpoints": torch.zeros(2, 8, 4, dtype=BF16),
    },
    "checkpoints has dtype float16, expected bfloat16": {
        "checkpoint_every": 2,
        "checkpoints": torch.zeros(2, 8, 3).half(),
    },
    "checkpoint_every is 2 with 0 of checkpoint_indices and checkpoints, expected one of them": {"checkpoint_every": 2},
    "checkpoint_indices has 1 dimensions": {"checkpoint_every": 2, "checkpoint_indices": torch.tensor([1, 2])},
}


def small_inputs(device) -> dict:
    return make_inputs(Case((2, 3), D=8, state_dtype=BF16), device)


def to(device, changes: dict) -> dict:
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in changes.items()}


@pytest.mark.usefixtures("errors_change_nothing")
def test_errors(device):
    """The same texts on both devices, and from the fakes; nothing has been written."""
    inputs = small_inputs(device)
    gradients = make_gradients(Case((2, 3), D=8, state_dtype=BF16), inputs)

    def check(function, text, **arguments):
        with pytest.raises(RuntimeError) as raised:
            function(**arguments)
        assert text in str(raised.value)
        meta = {x: y.to("meta") if torch.is_tensor(y) else y for x, y in arguments.items()}
        with pytest.raises(RuntimeError) as raised:
            function(**meta)
        assert text in str(raised.value)

    for text, change in WRONG.items():
        check(ops.causal_conv1d, text, **inputs | to(device, change))
    for text, change in WRONG_GRADIENTS.items():
        check(ops.causal_conv1d_bwd, text, **inputs | gradients | to(device, change))
    for text, change in WRONG_POOLS.items():
        with pytest.raises(RuntimeError) as raised:
            on_pool(inputs, **to(device, change))
        assert text in str(raised.value)
    with pytest.raises(ValueError, match="activation is 'gelu', expected 'silu', 'swish' or None"):
        flash_qla.causal_conv1d(inputs["x"], inputs["weight"], activation="gelu")
    with pytest.raises(TypeError, match="causal_conv1d: weight is of type list"):
        flash_qla.causal_conv1d(inputs["x"], [1.0])


@pytest.mark.usefixtures("errors_change_nothing")
def test_wrong_contents():
    """The CPU looks at offsets and tables."""
    inputs = small_inputs("cpu")
    for offsets, text in (
        ([1, 2, 5], "cu_seqlens[0] is 1, expected 0"),
        ([0, 3, 2], "cu_seqlens[2] is 2, expected at least cu_seqlens[1] = 3"),
        ([0, 3, 6], "cu_seqlens[2] is 6, expected at most T = 5"),
    ):
        with pytest.raises(RuntimeError) as raised:
            ops.causal_conv1d(**inputs | {"cu_seqlens": torch.tensor(offsets)})
        assert text in str(raised.value)
    for slots, text in (
        ([1, 11], "state_indices[1] is 11, expected 0 to 10"),
        ([1, 1], "state_indices[1] is 1, which is written already"),
    ):
        with pytest.raises(RuntimeError) as raised:
            on_pool(inputs, state_indices=torch.tensor(slots))
        assert text in str(raised.value)


@pytest.mark.usefixtures("errors_change_nothing")
def test_a_pool_overlaps_nothing(device):
    inputs = small_inputs(device)
    pool = torch.zeros(1, 8, 3, dtype=BF16, device=device).expand(11, 8, 3)
    with pytest.raises(RuntimeError, match="state_pool"):
        on_pool(inputs, state_pool=pool)
    x = torch.zeros(11 * 8 * 3, dtype=BF16, device=device)
    with pytest.raises(RuntimeError, match="state_pool"):
        on_pool(inputs | {"x": x[:40].view(1, 5, 8)}, state_pool=x.view(11, 8, 3))


@pytest.mark.gpu
def test_float64_is_the_cpus():
    inputs = make_inputs(Case(dtype=FP64), "cuda")
    with pytest.raises(RuntimeError, match="x has dtype float64, expected bfloat16, float16 or float32 on a GPU"):
        ops.causal_conv1d(**inputs)


@pytest.mark.gpu
def test_wrong_offsets_touch_nothing_else():
    """Where the host does not look: each token is written, and nothing is read outside."""
    case = Case((100, 100, 100), D=24)
    inputs = make_inputs(case, "cuda")
    gradients = make_gradients(case, inputs)
    for offsets in ([0, 100, 50, 300], [-7, 100, 2**31 - 1, 9], [0, -1, -(2**31), 500], [300, 200, 100, 0]):
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32).cuda()
        for x in run(inputs, gradients).values():
            assert x.isfinite().all(), offsets


# PyTorch's machinery


@pytest.mark.parametrize("case", (CASES[0], CASES[1], CASES[3], CASES[6]), ids=str)
def test_opcheck(device, case):
    inputs = make_inputs(case, device)
    gradients = make_gradients(case, inputs) | {"dy": torch.ones_like(inputs["x"])}
    for output_final_state in (False, True):
        arguments = inputs | {"output_final_state": output_final_state}
        leaves = {x: y.requires_grad_() for x, y in inputs.items() if torch.is_tensor(y) and x != "cu_seqlens"}
        torch.library.opcheck(ops.causal_conv1d.default, (), arguments | leaves)
    inputs = {x: y.detach() if torch.is_tensor(y) else y for x, y in inputs.items()}
    torch.library.opcheck(ops.causal_conv1d_bwd.default, (), inputs | gradients)


def test_opcheck_of_a_pool(device):
    inputs = small_inputs(device)
    arguments = {x: inputs[x] for x in ("x", "weight", "bias", "use_silu", "cu_seqlens")}
    arguments |= {"state_pool": make_pool(Case(D=8, state_dtype=BF16), device)}
    arguments |= {"state_indices": torch.tensor([1, 2]).to(device)}
    torch.library.opcheck(ops.prefill_causal_conv1d.default, (), arguments)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compile(device, dynamic):
    """One graph, forward and backward, with the bits of the plain call."""
    torch._dynamo.reset()

    def step(x, weight, bias, state):
        y, window = flash_qla.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True)
        return y * 2, window

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (30, 41):
        inputs = make_inputs(Case(B=2, T=T), device)
        results = []
        for function in (step, compiled):
            leaves = [inputs[x].clone().requires_grad_() for x in ("x", "weight", "bias", "initial_state")]
            y, window = function(*leaves)
            results.append((y, window, *torch.autograd.grad((y.float().sum() + window.sum()), leaves)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("B, T, D", ((1, 8192, 1536), (3, 1000, 8192), (1, 40000, 136)))
def test_many_tiles(B, T, D):
    """Sizes that fill a card: CTAs with whole tiles, and sums over many of them."""
    case = Case(B=B, T=T, D=D, state_dtype=BF16)
    inputs = make_inputs(case, "cuda")
    gradients = make_gradients(case, inputs)
    actual = run(inputs, gradients)
    assert_close(actual, expected_of(inputs, gradients), BF16)
    assert equal(run(inputs, gradients), actual)
