"""prefill_gated_delta_net, the region of a layer on states and windows in pools: by the bits of its parts, in pieces,
and against gated_delta_net. Its convolution alone is in test_convolution.py."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import test_region
import torch
from allpairspy import AllPairs
from poison import poisoned
from subprocesses import run_python
from trials import bits

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PARAMETERS = ("mixed", "z", "a", "b", "conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias")
WRITTEN = ("state_pool", "window_pool", "checkpoints", "window_checkpoints")


REGION = test_region.Case()


@dataclasses.dataclass(frozen=True)
class Case:
    region: test_region.Case = REGION
    pool_dtype: torch.dtype = FP32  # of states
    window_dtype: torch.dtype | None = None  # None: that of mixed
    memory: str = "apart"  # of the pools: "apart"; windows with "tokens first"; both of a slot in a "page"
    slots: str = "all"  # which sequences have a slot: "all", "some"; "shared": empty ones have slots of others
    other_slots: bool = False  # sequences start from slots that initial_state_indices names
    new_requests: bool = False  # some start from zero, by has_initial_state
    null_index: int = -1
    index_dtype: torch.dtype = torch.int32
    every: int = 0  # tokens between checkpoints
    kept: str = "rows"  # where checkpoints go: to "rows", to "slots", or to "few" of them
    out: str | None = None  # memory for y: "contiguous", "strided"
    flat: bool = False  # z and out without a dimension of heads
    slices: bool = False  # mixed and z are slices of one projection
    batch_invariant: bool = False


def memory_of(case: Case, states: torch.Tensor, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in the case's memory."""
    if case.memory == "tokens first":
        return states.clone(), windows.mT.contiguous().mT
    if case.memory == "apart":
        return states.clone(), windows.clone()
    sizes = [-(-x[0].numel() * x.element_size() // 16) * 16 for x in (windows, states)]
    pages = torch.zeros(len(states), sum(sizes), dtype=torch.uint8, device=states.device)
    parts = [
        page[:, : x[0].numel() * x.element_size()].view(x.dtype).unflatten(1, x.shape[1:]).copy_(x)
        for page, x in zip(pages.split(sizes, 1), (windows, states), strict=True)
    ]
    return parts[1], parts[0]


def make(case: Case, device: str, seed: int = 0) -> dict:
    """Arguments. Numbers that no call reads are NaN."""
    region, r, generator = case.region, random.Random(seed), torch.Generator().manual_seed(seed + 1)
    arguments, _ = test_region.make(region, device, seed)
    arguments = {x: y for x, y in arguments.items() if x not in ("initial_state", "initial_window", "auto_cp")}
    del arguments["output_final_state"]
    arguments.pop("state_v_first", None)
    lengths = (region.T,) * region.B if region.lengths is None else region.lengths
    N, null = len(lengths), case.null_index
    counts = [length // case.every if case.every else 0 for length in lengths]
    total = null + 1 + N + sum(counts) + 4
    slots = r.sample(range(null + 1, total), N + sum(counts) + 2)
    own_slots, checkpoint_slots, unused_slots = slots[:N], slots[N:-2], slots[-2:]
    real = [case.slots != "some" or r.random() < 0.7 for _ in lengths]
    indices = [slot if is_real else null - r.choice((0, 2)) for slot, is_real in zip(own_slots, real, strict=True)]
    has_state = [not case.new_requests or r.random() < 0.6 for _ in lengths]
    first = [r.choice([*unused_slots, null, own_slots[n]]) if case.other_slots else own_slots[n] for n in range(N)]
    if case.slots == "shared":
        occupied = [own_slots[n] for n in range(N) if lengths[n]]
        for n in (n for n in range(N) if not lengths[n] and occupied):
            own_slots[n] = indices[n] = r.choice(occupied)
            first[n], has_state[n] = (unused_slots[0] if case.other_slots else own_slots[n]), True

    def table(values) -> torch.Tensor:
        return torch.tensor(values, dtype=case.index_dtype, device=device)

    def randn(*shape, dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64).to(device, dtype)

    state, D = (region.H_v, region.V, region.K), arguments["mixed"].shape[2]
    window, window_dtype = (D, region.columns or region.W - 1), case.window_dtype or region.dtype
    states = randn(total, *state, dtype=FP32).to(case.pool_dtype)
    windows = randn(total, *window, dtype=window_dtype)
    read = {slot for slot, may_read, is_real in zip(first, has_state, real, strict=True) if may_read and is_real}
    for x in (states, windows):
        x[[slot for slot in range(total) if slot not in read]] = torch.nan
    arguments["state_pool"], arguments["window_pool"] = memory_of(case, states, windows)
    arguments |= {"state_indices": table(indices), "null_index": null, "batch_invariant": case.batch_invariant}
    if case.other_slots:
        arguments["initial_state_indices"] = table(first)
    if case.new_requests:
        arguments["has_initial_state"] = torch.tensor(has_state, dtype=torch.bool, device=device)
    if case.every:
        arguments["checkpoint_every"] = case.every
        if case.kept == "rows":
            arguments["checkpoints"] = randn(sum(counts), *state, dtype=FP32).to(case.pool_dtype)
            arguments["window_checkpoints"] = randn(sum(counts), *window, dtype=window_dtype)
        else:
            columns = max(counts, default=0) - (1 if case.kept == "few" else 0)
            rows = [[checkpoint_slots.pop() for _ in range(count)] for count in counts]
            rows = [[*row, *[null] * max(columns, 0)][: max(columns, 0)] for row in rows]
            arguments["checkpoint_indices"] = table(rows).reshape(N, max(columns, 0))
    if case.slices:
        mixed, z = arguments["mixed"], arguments["z"].flatten(2)
        mixed, z = torch.cat([mixed, z], -1).split([D, z.shape[2]], -1)
        arguments |= {"mixed": mixed, "z": z.unflatten(-1, (region.H_v, region.V))}
    if case.flat:
        arguments["z"] = arguments["z"].flatten(2)
    if case.out:
        step = 2 if case.out == "strided" else 1
        arguments["out"] = arguments["z"].new_full((*arguments["z"].shape, step), torch.nan)[..., 0]
    return arguments


def parts(
    mixed, z, a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, state_pool, window_pool, state_indices,
    num_k_heads, head_k_dim, checkpoints=None, window_checkpoints=None, out=None, **more,
):  # fmt: skip
    """The region by the functions of its parts."""
    norm = {x: more.pop(f"norm_{x}") for x in ("eps", "activation") if f"norm_{x}" in more}
    others = {x: more.pop(x) for x in ("scale", "max_seqlen", "allow_neg_eigval", "batch_invariant") if x in more}
    x = flash_qla.prefill_causal_conv1d(
        mixed, conv_weight, conv_bias, window_pool, state_indices, checkpoints=window_checkpoints, **more
    )
    H_k, K, H_v = num_k_heads, head_k_dim, a.shape[2]
    q, k, v = x.split([H_k * K, H_k * K, x.shape[2] - 2 * H_k * K], -1)
    inside = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"), True)
    o = flash_qla.prefill_gated_delta_rule(
        *(q.unflatten(-1, (H_k, K)), k.unflatten(-1, (H_k, K)), v.unflatten(-1, (H_v, -1)), a, b, state_pool),
        *(state_indices,),
        checkpoints=checkpoints, A_log=A_log, dt_bias=dt_bias, **inside, **others, **more,
    )  # fmt: skip
    return flash_qla.gated_rms_norm(o, z.reshape(o.shape), norm_weight, **norm).view(z.shape)


def written(arguments: dict) -> dict[str, torch.Tensor]:
    return {x: arguments[x] for x in WRITTEN if x in arguments}


def check(case: Case, device: str, seed: int = 0) -> None:
    """The call has the bits of its parts in y, in both pools and in all checkpoints."""
    arguments = make(case, device, seed)
    others = arguments | {x: y.clone() for x, y in written(arguments).items()}
    with poisoned(device):
        y, expected = flash_qla.prefill_gated_delta_net(**arguments), parts(**others)
    assert y is arguments["out"] if case.out else y.is_contiguous()
    assert y.shape == arguments["z"].shape and y.dtype == case.region.dtype
    assert torch.equal(bits(y), bits(expected))
    for name, x in written(others).items():
        assert torch.equal(bits(arguments[name]), bits(x)), name


def options(device: str) -> dict[str, tuple]:
    gpu, both = device == "cuda", (False, True)
    return {
        "shape": ({"lengths": (5, 0, 1, 2, 3, 70)}, {"lengths": (130, 0, 64, 200)}, {"lengths": ()}, {"lengths": None}),
        "sizes": ({}, {"H_k": 2, "H_v": 2, "K": 16, "V": 8}, {"H_v": 3, "V": 24}),
        "dtype": (BF16, FP16) if gpu else (BF16, FP16, FP32, FP64),
        "taps": ({}, {"columns": 4}, {"W": 3}, {"W": 2, "columns": 2}),
        "pool_dtype": (FP32, BF16, *(() if gpu else (FP64,))),
        "window_dtype": (None, FP32),
        "memory": ("apart", "tokens first", "page"),
        "slots": ("all", "some", "shared"),
        "other_slots": both,
        "new_requests": both,
        "null_index": (-1, 0, 2),
        "index_dtype": (torch.int32, torch.int64),
        "checkpoints": ((0, "rows"), (64, "rows"), (64, "slots"), (50, "few"), (2, "slots"), (1, "rows")),
        "out": (None, "contiguous", "strided"),
        "flat": both,
        "slices": both,
        "batch_invariant": both,
        "padding": (0, 3),
        "with_bias": both,
        "with_dt_bias": both,
        "scale": (None, 0.7),
        "max_seqlen": (None, 300),
        "allow_neg_eigval": both,
        "norm_activation": ("silu", "sigmoid"),
        "norm_eps": (1e-6, 1e-2),
    }


def case_of(row: dict) -> Case:
    row = dict(row)
    of_call = {x: row.pop(x) for x in ("scale", "max_seqlen", "allow_neg_eigval", "norm_activation", "norm_eps")}
    every, kept = row.pop("checkpoints")
    of_region = {x: row.pop(x) for x in ("padding", "dtype", "with_bias", "with_dt_bias")}
    of_region |= row.pop("shape") | row.pop("sizes") | row.pop("taps")
    of_region["padding"] *= of_region["lengths"] is not None
    return Case(test_region.Case(**of_region, options=tuple(of_call.items())), every=every, kept=kept, **row)


def draw(r: random.Random, device: str) -> Case:
    return case_of({name: r.choice(values) for name, values in options(device).items()})


def test_bits_of_the_parts(device):
    """With every pair of values of every two options."""
    values = options(device)
    failures = []
    for number, row in enumerate(AllPairs(list(values.values()))):
        case = case_of(dict(zip(values, row, strict=True)))
        try:
            check(case, device, number)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{case}\n{error}")
    assert not failures, "\n\n".join(failures)


CASES = (
    Case(),
    Case(test_region.Case(lengths=None, W=3), memory="page", new_requests=True),
    Case(test_region.Case(lengths=(3, 2, 0, 66, 1), columns=4), slots="some", other_slots=True, memory="tokens first"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gather_and_a_scatter(case):
    """gated_delta_net on the sequences' own states and windows; short sequences keep rows of their window."""
    case = dataclasses.replace(case, region=dataclasses.replace(case.region, dtype=FP64), pool_dtype=FP64)
    arguments = make(case, "cpu")
    slots = arguments["state_indices"].tolist()
    first = arguments.get("initial_state_indices", arguments["state_indices"]).tolist()
    has_state = arguments["has_initial_state"].tolist() if case.new_requests else [True] * len(slots)
    starts = [slot >= 0 and f >= 0 and k for slot, f, k in zip(slots, first, has_state, strict=True)]
    before = {x: arguments[x].clone() for x in ("state_pool", "window_pool")}

    def gathered(pool):
        return torch.stack([pool[f] if s else torch.zeros_like(pool[0]) for f, s in zip(first, starts, strict=True)])

    shared = {x: arguments[x] for x in (*PARAMETERS, "num_k_heads", "head_k_dim")}
    y, *finals = flash_qla.gated_delta_net(
        **shared, cu_seqlens=arguments.get("cu_seqlens"), output_final_state=True, state_v_first=True,
        initial_state=gathered(before["state_pool"]), initial_window=gathered(before["window_pool"]),
    )  # fmt: skip
    lengths = [case.region.T] * case.region.B if case.region.lengths is None else case.region.lengths
    actual = flash_qla.prefill_gated_delta_net(**arguments)
    begin = 0
    for n, length in enumerate(lengths):
        part = (n,) if case.region.lengths is None else (0, slice(begin, begin + length))
        expected = y[part] if slots[n] >= 0 else torch.zeros_like(y[part])
        torch.testing.assert_close(actual[part], expected, rtol=1e-10, atol=1e-10)
        begin += length
        for pool, final in zip(before.values(), finals, strict=True):
            if slots[n] >= 0 and (length or not starts[n]):
                pool[slots[n]] = final[n]
    torch.testing.assert_close(arguments["state_pool"], before["state_pool"], rtol=1e-10, atol=1e-10, equal_nan=True)
    assert torch.equal(bits(arguments["window_pool"]), bits(before["window_pool"]))


def piece(arguments: dict, parts: list[tuple[int, int]]) -> dict:
    """These tokens of each of two packed sequences."""
    tokens = {x: torch.cat([arguments[x][:, b:e] for b, e in parts], 1) for x in ("mixed", "z", "a", "b")}
    offsets = [0, *itertools.accumulate(e - b for b, e in parts)]
    return arguments | tokens | {"cu_seqlens": torch.tensor(offsets, device=arguments["mixed"].device)}


def test_pieces(device):
    """A prompt in two pieces, beside another sequence each time, has the bits of the whole one."""
    case = Case(test_region.Case(lengths=(200, 67)), batch_invariant=True)
    whole, arguments = make(case, device), make(case, device)
    expected = flash_qla.prefill_gated_delta_net(**whole)
    one = flash_qla.prefill_gated_delta_net(**piece(arguments, [(0, 128), (200, 264)]))
    two = flash_qla.prefill_gated_delta_net(**piece(arguments, [(128, 200), (264, 267)]))
    for x, y in ((one[:, :128], expected[:, :128]), (two[:, :72], expected[:, 128:200])):
        assert torch.equal(x, y)
    for x, y in ((one[:, 128:], expected[:, 200:264]), (two[:, 72:], expected[:, 264:])):
        assert torch.equal(x, y)
    for name in ("state_pool", "window_pool"):
        assert torch.equal(bits(arguments[name]), bits(whole[name])), name


@pytest.mark.parametrize("kept", ("slots", "rows"))
@pytest.mark.parametrize("every", (1, 50, 128))
def test_from_a_checkpoint(device, every, kept):
    """A call that starts from the state and the window of a checkpoint goes on with the bits of the call that wrote
    it, though the states are rounded."""
    case = Case(test_region.Case(lengths=(200,)), pool_dtype=BF16, every=every, kept=kept, batch_invariant=True)
    arguments = make(case, device)
    expected = flash_qla.prefill_gated_delta_net(**arguments)
    done, last = 100 // every * every or every, {x: arguments[x].clone() for x in ("state_pool", "window_pool")}
    index = done // every - 1
    if kept == "slots":
        first = {"initial_state_indices": arguments["checkpoint_indices"][:, index]}
    else:
        slot, first = arguments["state_indices"], {}
        for pool, rows in (("state_pool", "checkpoints"), ("window_pool", "window_checkpoints")):
            arguments[pool][slot] = arguments[rows][index]
    tokens = {x: arguments[x][:, done:] for x in ("mixed", "z", "a", "b")}
    tokens["cu_seqlens"] = torch.tensor([0, 200 - done], device=device)
    elsewhere = {"checkpoint_indices": arguments["checkpoint_indices"][:, :0]} if kept == "slots" else {}
    assert torch.equal(flash_qla.prefill_gated_delta_net(**arguments | tokens | first | elsewhere), expected[:, done:])
    for name, x in last.items():
        slot = arguments["state_indices"]
        assert torch.equal(bits(arguments[name][slot]), bits(x[slot])), name


# Errors


def wrong_arguments(arguments: dict) -> dict[str, dict]:
    """Text -> changes."""
    pool, windows, z, table = (arguments[x] for x in ("state_pool", "window_pool", "z", "state_indices"))
    checkpointing = {"checkpoint_every": 64, "checkpoints": pool.clone(), "window_checkpoints": windows.clone()}
    n, slots, D = len(table), len(windows), windows.shape[1]
    return {
        f"window_pool has shape [{slots}, {D}, 2], expected [{slots}, {D}, 3 or 4]": {"window_pool": windows[..., 1:]},
        f"window_pool has shape [{slots}, 3, {D}], expected [{slots}, {D}, 3 or 4]": {"window_pool": windows.mT},
        "window_pool has dtype float16, expected bfloat16, the dtype of mixed, or float32": {
            "window_pool": windows.half()
        },
        "state_pool has shape": {"state_pool": pool.mT.contiguous()},
        f"state_indices has 1 rows, expected {n}": {"state_indices": table[:1]},
        f"initial_state_indices has 1 rows, expected {n}": {"initial_state_indices": table[:1]},
        "has_initial_state has dtype int32, expected bool": {"has_initial_state": table},
        "checkpoint_every is 64 with 0 of checkpoint_indices and window_checkpoints": checkpointing
        | {"window_checkpoints": None},
        "checkpoint_every is 64 with 0 of checkpoint_indices and checkpoints": checkpointing | {"checkpoints": None},
        "checkpoint_every is -1, expected at least 0": checkpointing | {"checkpoint_every": -1},
        "checkpoint_indices or window_checkpoints is a tensor": checkpointing | {"checkpoint_every": 0},
        f"window_checkpoints has shape [{slots}, {D}, 2], expected [{slots}, {D}, 3]": checkpointing
        | {"window_checkpoints": windows[..., 1:].clone()},
        "out has shape": {"out": torch.empty_like(z[..., 1:])},
        "out has dtype float32, expected bfloat16, the dtype of z": {"out": z.float()},
        "window_pool shares memory with state_pool": {
            "window_pool": pool.view(BF16).flatten()[: windows.numel()].view(windows.shape)
        },
        "out shares memory with z": {"out": z},
        "norm_weight has shape": {"norm_weight": arguments["norm_weight"][1:]},
        "norm_eps is -1, expected at least 0": {"norm_eps": -1.0},
    }


@pytest.mark.usefixtures("errors_change_nothing")
def test_errors(device):
    """The texts name the caller's arguments; neither pool is written."""
    arguments = make(Case(slots="all"), device)
    for text, changes in wrong_arguments(arguments).items():
        with pytest.raises(RuntimeError) as error:
            flash_qla.prefill_gated_delta_net(**arguments | changes)
        assert f"flash_qla::prefill_gated_delta_net: {text}" in str(error.value)


def wrong_contents(arguments: dict) -> dict[str, dict]:
    slots, every = arguments["state_indices"], {"checkpoint_every": 64}
    n, most = len(slots), len(arguments["state_pool"]) - 1
    outside = torch.where(slots == slots[-1], most + 1, slots)
    table = slots[-1:].expand(n, 1)
    return {
        f"state_indices[{n - 1}] is {most + 1}, expected 0 to {most}": {"state_indices": outside},
        f"initial_state_indices[{n - 1}] is {most + 1}, expected 0 to {most}": {"initial_state_indices": outside},
        f"checkpoint_indices[{n - 1}, 0] is {slots[-1]}, which is written already": every
        | {"checkpoint_indices": table},
        "the number of a state of window_checkpoints is 0, expected 0 to -1": every
        | {"checkpoints": arguments["state_pool"].clone(), "window_checkpoints": arguments["window_pool"][:0]},
        "the number of a state of checkpoints is 0, expected 0 to -1": every
        | {"checkpoints": arguments["state_pool"][:0], "window_checkpoints": arguments["window_pool"].clone()},
        f"cu_seqlens[{n}] is 1000, expected at most T = ": {
            "cu_seqlens": torch.cat([arguments["cu_seqlens"][:-1], arguments["cu_seqlens"].new_tensor([1000])])
        },
    }


@pytest.mark.usefixtures("errors_change_nothing")
def test_wrong_contents():
    """The CPU looks at tables and offsets before it writes anything."""
    arguments = make(Case(), "cpu")
    for text, changes in wrong_contents(arguments).items():
        with pytest.raises(RuntimeError) as error:
            flash_qla.prefill_gated_delta_net(**arguments | changes)
        assert f"flash_qla::prefill_gated_delta_net: {text}" in str(error.value)


CHECKED = """
import sys
sys.path.insert(0, {tests!r})
import pytest, torch
import test_region_prefill as t
from unchanged import ErrorsChangeNothing
import flash_qla

arguments = t.make(t.Case(), {device!r})
spoiled = arguments["mixed"].clone()
spoiled[0, 3, 1] = torch.nan
wrong = t.wrong_contents(arguments) | {{"q[0, 3, 0, 1] is nan, expected a finite number": {{"mixed": spoiled}}}}
with ErrorsChangeNothing():
    for text, changes in wrong.items():
        with pytest.raises(RuntimeError) as error:
            flash_qla.prefill_gated_delta_net(**arguments | changes)
        assert text in str(error.value), (text, str(error.value))
    flash_qla.prefill_gated_delta_net(**arguments)
"""


def test_contents_are_checked(device):
    """FLASH_QLA_CHECK=1 finds wrong tables and numbers before either pool is written."""
    run_python(CHECKED.format(tests=str(Path(__file__).parent), device=device), FLASH_QLA_CHECK="1")


# PyTorch's machinery


@pytest.mark.parametrize("case", (Case(), Case(every=64, out="contiguous"), Case(every=64, kept="slots")), ids=str)
def test_compiled(case, device):
    """One graph, which writes the pools in place."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_qla.prefill_gated_delta_net, fullgraph=True, backend="aot_eager")
    arguments, others = make(case, device), make(case, device)
    assert torch.equal(compiled(**arguments), flash_qla.prefill_gated_delta_net(**others))
    for name, x in written(others).items():
        assert torch.equal(bits(arguments[name]), bits(x)), name


def test_autocast(device):
    """mixed and z are cast, windows keep their dtype."""
    case = Case(test_region.Case(dtype=BF16), window_dtype=FP32)
    arguments, others = make(case, device), make(case, device)
    expected = flash_qla.prefill_gated_delta_net(**others)
    with torch.autocast(device, BF16):
        y = flash_qla.prefill_gated_delta_net(**arguments | {x: arguments[x].float() for x in ("mixed", "z")})
    assert y.dtype == BF16 and torch.equal(y, expected)
    for name, x in written(others).items():
        assert torch.equal(bits(arguments[name]), bits(x)), name


@pytest.mark.gpu
def test_graph_with_other_lengths():
    """A captured call, replayed on other numbers, offsets and slots."""
    cases = [Case(test_region.Case(lengths=x, K=64, V=64)) for x in ((70, 3), (1, 72))]
    arguments, others = (make(case, "cuda", seed) for seed, case in enumerate(cases))
    expected = make(cases[1], "cuda", seed=1)
    flash_qla.prefill_gated_delta_net(**make(cases[0], "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = flash_qla.prefill_gated_delta_net(**arguments)
    for name, x in others.items():
        if torch.is_tensor(x):
            arguments[name].copy_(x)
    graph.replay()
    assert torch.equal(y, flash_qla.prefill_gated_delta_net(**expected))
    for name, x in written(expected).items():
        assert torch.equal(bits(arguments[name]), bits(x)), name
