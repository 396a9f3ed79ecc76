"""Pools of states: strides, views, lazy clones, and rows without tokens that name another's slot."""

import pytest
import test_prefill
import torch
from cases import Case
from every_op import WITH_POOL, make_call, op_of
from subprocesses import run_python

import flash_qla

pytestmark = pytest.mark.usefixtures("errors_change_nothing")

WINDOWS = ("window_pool", "window_checkpoints", "intermediate_windows")
STATES = ("state_pool", "checkpoints", "intermediate_states", "d_cache", "k_cache", "g_cache", *WINDOWS)


def arguments_of(name: str, device: str, **options) -> dict:
    return make_call(name, device, **options).arguments


def run(name: str, arguments: dict) -> torch.Tensor:
    return op_of(name)(**arguments)


@pytest.mark.parametrize("name", WITH_POOL)
@pytest.mark.parametrize("states", STATES)
def test_states_that_overlap(device, name, states):
    arguments = arguments_of(name, device)
    if states not in arguments:
        pytest.skip(f"{name} has no {states}")
    x = arguments[states]
    size, slots = x[0].numel(), x.shape[0]
    memory = torch.zeros((slots + 1) * size, device=device)
    shifted = memory.as_strided(x.shape, (size - 8, *x.stride()[1:]))
    wrong = [shifted] if slots > 1 else []
    if slots > 1:
        wrong.append(x[:1].expand_as(x))
    if states.startswith("intermediate"):
        wrong.append(x[:, :1].expand_as(x))
    assert wrong
    for overlapping in wrong:
        with pytest.raises(RuntimeError, match=f"{states} has shape .* and strides .* elements that do not overlap"):
            run(name, arguments | {states: overlapping})


@pytest.mark.parametrize("name", WITH_POOL)
def test_gaps_within_a_state(device, name):
    """Those between rows show in the strides of rows alone, if there is one head."""
    arguments = arguments_of(name, device, H_k=1, H_v=1)
    of_rows = [x for x in STATES if x in arguments and x not in WINDOWS and arguments[x].dim() >= 4]
    assert of_rows or name == "prefill_causal_conv1d"
    for states in of_rows:
        *outer, columns = arguments[states].shape
        for channels in (slice(columns), slice(None, None, 2)):
            x = arguments[states].new_zeros(*outer, 2 * columns)[..., channels]
            with pytest.raises(RuntimeError, match=f"{states} has strides .* contiguous"):
                run(name, arguments | {states: x})


@pytest.mark.parametrize("name", WITH_POOL)
def test_gaps_between_heads(device, name):
    arguments = arguments_of(name, device, H_k=2, H_v=2)
    for states in (x for x in STATES if x in arguments and x not in WINDOWS and arguments[x].dim() >= 4):
        *outer, rows, columns = arguments[states].shape
        x = arguments[states].new_zeros(*outer, rows + 1, columns)[..., :rows, :]
        with pytest.raises(RuntimeError, match=f"{states} has strides .* contiguous"):
            run(name, arguments | {states: x})


@pytest.mark.parametrize("name", WITH_POOL)
def test_strides_of_dimensions_of_size_1(device, name):
    """Any stride does there: the pool is contiguous."""
    for heads in ({"H_k": 1, "H_v": 1}, {}):
        arguments = arguments_of(name, device, **heads)
        expected = {x: arguments[x].clone() for x in STATES if x in arguments}
        o = run(name, arguments | expected)
        for dimension in (0, -3):
            pools = {x: arguments[x].clone() for x in expected}
            for x, pool in pools.items():
                if pool.shape[dimension] == 1:
                    strides = list(pool.stride())
                    strides[dimension] = 13
                    pools[x] = pool.as_strided(pool.shape, strides)
            assert torch.equal(run(name, arguments | pools), o)
            assert all(torch.equal(x, expected[states]) for states, x in pools.items())
    case = Case(lengths=(3,), H_k=1, H_v=1, K=8, V=8, state_v_first=True)
    arguments = test_prefill.make_arguments(case, device=device)
    small = torch.zeros(1, 8, 8, 8, device=device).transpose(0, 1)  # [8, 1, 8, 8]
    flash_qla.prefill_gated_delta_rule(
        **arguments | {"state_pool": small, "state_indices": torch.tensor([5], device=device)}
    )
    assert small[5].any() and not small[:5].any() and not small[6:].any()


@pytest.mark.parametrize("name", WITH_POOL)
def test_stride_of_a_single_slot(device, name):
    """No element has it: neither a multiple of 16 bytes nor the size of a state is asked for."""
    arguments = arguments_of(name, device)
    arguments["state_indices"] = torch.tensor([0, -1, -1, -1], device=device)
    states = {x: arguments[x][:1].clone() for x in STATES if x in arguments and "checkpoints" not in x}
    expected = {x: y.clone() for x, y in states.items()}
    o = run(name, arguments | expected)
    strided = {x: y.as_strided(y.shape, (13, *y.stride()[1:])) for x, y in states.items()}
    assert torch.equal(run(name, arguments | strided), o)
    assert all(torch.equal(strided[x], y) for x, y in expected.items())


@pytest.mark.parametrize("name", WITH_POOL)
def test_lazy_clones(device, name):
    """Written like any tensor: what they were cloned from stays as it is."""
    arguments = arguments_of(name, device)
    bases = {x: arguments[x] for x in STATES if x in arguments}
    before = {x: y.clone() for x, y in bases.items()}
    expected = {x: y.clone() for x, y in bases.items()}
    o = run(name, arguments | expected)
    clones = {x: torch._lazy_clone(y) for x, y in bases.items()}
    assert torch.equal(run(name, arguments | clones), o)
    for x, base in bases.items():
        assert torch.equal(clones[x], expected[x]) and torch.equal(base, before[x])


MEMORY = """
import resource, torch, flash_qla
torch.set_num_threads(1)
ops = torch.ops.flash_qla

def few(*shape):
    return torch.zeros(1, 1, *shape).expand(1, 200_000, *shape)

def zeros(*shape):
    return torch.zeros(1, 40_000, *shape)

def say(megabytes, op, *arguments):
    # Of a call that may take this much more memory than there is by now
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.RLIM_INFINITY))
    try:
        op(*arguments)
        print("> nothing")
    except RuntimeError as error:
        print(">", error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

{body}
"""


def out_of_memory(body: str) -> list[str]:
    output = run_python(MEMORY.format(body=body), FLASH_QLA_QUIET="1", MALLOC_ARENA_MAX="1")
    messages = [line[2:] for line in output.splitlines() if line.startswith("> ")]
    for message in messages:
        assert message.startswith("CPU out of memory. ") and "(flash_qla" in message, message
        assert not any(word in message for word in ("parallel_for", "bad_alloc", ".cpp", ".h:"))
    return messages


def test_no_memory_for_the_states_of_many_tokens():
    """200 GB, in a thread: a sentence, and not the name of a function of PyTorch's."""
    (message,) = out_of_memory("""
q, v, g, pool = few(1, 512), few(1, 512), few(1), torch.zeros(1, 1, 512, 512)
say(1 << 12, ops.decode_gated_delta_rule, q, q, v, g, g, g[0, 0], None, pool, torch.zeros(1, dtype=torch.int64))
""")
    assert "flash_qla::decode_gated_delta_rule" in message


def test_no_memory_for_the_passes():
    """Neither for outputs nor for what a thread works in."""
    outputs, states, scratch = out_of_memory("""
q, g = zeros(1, 64), zeros(1)
g_cumsum, A, o, _, _ = ops.chunk_gated_delta_rule_fwd(q, q, q, g, g)
say(1, ops.chunk_gated_delta_rule, q, q, q, g, g)
say(30, ops.chunk_gated_delta_rule_bwd, q, q, q, g_cumsum, g, A, o)
x, y = torch.zeros(1, 64, 1, 4096), torch.zeros(1, 64, 1, 2048)
say(12, ops.chunk_gated_delta_rule, x, x, y, x[..., 0], x[..., 0])
""")
    assert "Tried to allocate 9.77 MiB." in outputs and "(flash_qla::chunk_gated_delta_rule, float32 [1, " in outputs
    assert states.endswith("(flash_qla::chunk_gated_delta_rule_bwd)")
    assert scratch.endswith("(flash_qla::chunk_gated_delta_rule)")


def test_no_memory_for_lists_of_sequences():
    body = """
x, g, pool = torch.zeros(3_000_000, 1, 1, 1), torch.zeros(3_000_000, 1, 1), torch.zeros(1, 1, 1, 1)
nothing = torch.full((3_000_000,), -1)
say(20, ops.decode_gated_delta_rule, x, x, x, g, g, g[0, 0], None, pool, nothing)
say(20, ops.prefill_gated_delta_rule, x, x, x, g, g, pool, nothing)
"""
    assert len(out_of_memory(body)) == 2


@pytest.mark.parametrize(
    "dtype", (torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex64, torch.uint16, torch.bits8), ids=str
)
@pytest.mark.parametrize("argument", ("g", "q", "state_pool", "has_initial_state", "cu_seqlens"))
def test_dtypes_that_no_op_takes(argument, dtype):
    """A sentence that names them, whatever the stable ABI knows of them."""
    arguments = arguments_of("prefill_gated_delta_rule", "cpu")
    arguments["has_initial_state"] = torch.zeros(4, dtype=torch.bool)
    wrong = torch.empty(arguments[argument].shape, dtype=dtype)
    with pytest.raises(RuntimeError, match=rf"flash_qla::prefill_gated_delta_rule: {argument} has dtype \w+, expected"):
        run("prefill_gated_delta_rule", arguments | {argument: wrong})


@pytest.mark.parametrize(
    "dtype", (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bits8, torch.int64, torch.qint8), ids=str
)
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd"))
def test_dtypes_of_no_state(name, dtype):
    arguments = arguments_of(name, "cpu") | {"state_dtype": dtype}
    with pytest.raises(RuntimeError, match=f"flash_qla::{name}: state_dtype is {dtype}, expected bfloat16, float16"):
        getattr(flash_qla, name)(**arguments)
