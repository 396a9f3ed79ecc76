"""Sizes at which 32 bits or a grid's dimensions would not do."""

import accuracy
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import DHT_SCALE, Case, make_gradients, make_inputs, run_backward

import flash_qla

pytestmark = pytest.mark.gpu
whole_card = pytest.mark.whole_card

BF16 = torch.bfloat16
H_K, H_V, D = 4, 64, 128
LENGTHS = (270_016, 300)
LAST = LENGTHS[0]  # first token of the second sequence
T = sum(LENGTHS)
# A chunk that lies just before the element 2^31 of v, o and their gradients, and one near the end of its sequence
CHUNKS = (2**31 // (64 * H_V * D) - 2, LAST // 64 - 8)


def require_free(gigabytes: int):
    """For tests with whole_card."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory")


def randn(generator, *shape, dtype=BF16):
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def large_inputs(lengths: tuple[int, int] = LENGTHS, seed: int = 0) -> dict:
    """By default v has 2.2e9 elements, and the states at the chunks' starts 4.4e9: offsets need 64 bits."""
    T, generator = sum(lengths), torch.Generator("cuda").manual_seed(seed)
    return {
        "q": F.normalize(randn(generator, 1, T, H_K, D), dim=-1),
        "k": F.normalize(randn(generator, 1, T, H_K, D), dim=-1),
        "v": randn(generator, 1, T, H_V, D),
        "g": F.logsigmoid(randn(generator, 1, T, H_V, dtype=torch.float32)) / 16,
        "beta": randn(generator, 1, T, H_V, dtype=torch.float32).sigmoid(),
        "initial_state": randn(generator, 2, H_V, D, D, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, *lengths], device="cuda").cumsum(0),
    }


def part(inputs: dict, tokens: slice, initial_state: torch.Tensor) -> dict:
    """The call on some tokens of one sequence, which had this state before them."""
    return {
        **{name: inputs[name][:, tokens] for name in ("q", "k", "v", "g", "beta")},
        "initial_state": initial_state,
    }


@whole_card
def test_forward_of_more_than_2_31_elements():
    """The recurrence need not be run over all tokens to check the far end: the second sequence starts afresh there, and
    in the first h says from where to go on."""
    require_free(70)
    inputs = large_inputs()
    _, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, output_h=True)
    assert h.numel() > 2**32
    assert o[0, -64:].isfinite().all() and A[0, -64:].isfinite().all()
    assert (o.abs().amax(-1) > 0).all()  # every row was written, and none with garbage
    assert o.abs().amax() < 100

    name = "second sequence, beyond 2^31 elements"
    second = reference.gated_delta_rule(**part(inputs, slice(LAST, T), inputs["initial_state"][1:]))
    accuracy.check("o", o[:, LAST:], second.o, dtype=BF16, case=name)
    accuracy.check("final_state", final_state[1:], second.final_state, dtype=BF16, case=name)
    accuracy.check("h", h[:, LAST // 64 : LAST // 64 + 5], second.h, dtype=BF16, case=name)
    for chunk in CHUNKS:
        tokens = slice(chunk * 64, chunk * 64 + 256)
        expected = reference.gated_delta_rule(**part(inputs, tokens, h[0, chunk][None]))
        accuracy.check("o", o[:, tokens], expected.o, dtype=BF16, case=f"from chunk {chunk} of the first sequence")
    del o, A, h
    torch.cuda.empty_cache()
    o, final_state_again = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    accuracy.check("o", o[:, LAST:], second.o, dtype=BF16, case=name)
    accuracy.check(
        "final_state", final_state_again, final_state.double(), dtype=BF16, case="both functions, beyond 2^31 elements"
    )


@whole_card
def test_backward_of_more_than_2_31_elements():
    """Where the reference starts in the middle of the first sequence it takes the state from h; where it ends there,
    what follows is 768 tokens away from those that are compared, a decay of e^-38."""
    require_free(90)
    inputs = large_inputs()
    generator = torch.Generator("cuda").manual_seed(1)
    do = randn(generator, 1, T, H_V, D)
    dht = DHT_SCALE * randn(generator, 2, H_V, D, D, dtype=torch.float32)
    g_cumsum, A, _, h, _ = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, output_h=True)
    states = {chunk: h[0, chunk][None].clone() for chunk in CHUNKS}
    del h, _
    torch.cuda.empty_cache()
    actual = run_backward(inputs, do, dht, (g_cumsum, A))
    for name in ("dq", "dk", "dv"):  # every row was written, and none with garbage
        largest = actual[name].abs().amax(-1)
        assert largest.isfinite().all() and (largest > 0).all() and largest.max() < 100, name
    for name in ("db", "dg"):  # a sum may be zero, but not many are
        assert actual[name].isfinite().all() and (actual[name] == 0).float().mean() < 1e-4, name

    def compare(tokens: slice, initial_state, dht, compared: int, name: str):
        """The first `compared` of these tokens."""
        arguments = part(inputs, tokens, initial_state)
        expected = reference.gated_delta_rule_bwd(**arguments, do=do[:, tokens], dht=dht)
        for of in ("dq", "dk", "dv", "db", "dg"):
            x, y = actual[of][:, tokens][:, :compared], getattr(expected, of)[:, :compared]
            size = expected.sizes[of][:, :compared] if of in expected.sizes else None
            accuracy.check(of, x, y, dtype=BF16, case=name, size=size)
        return expected.dh0

    name = "second sequence, beyond 2^31 elements"
    dh0 = compare(slice(LAST, T), inputs["initial_state"][1:], dht[1:], LENGTHS[1], name)
    accuracy.check("dh0", actual["dh0"][1:], dh0, dtype=BF16, case=name)
    middle, end = CHUNKS
    compare(slice(end * 64, LAST), states[end], dht[:1], LAST - end * 64, "end of the first sequence")
    compare(slice(middle * 64, middle * 64 + 1024), states[middle], None, 256, "around 2^31 elements")


@whole_card
def test_many_sequences():
    """More sequences than the 65535 blocks of a grid's second dimension. Only the last 600 are compared."""
    lengths = (1, 0, 2) * 22_000
    case = Case(lengths=lengths, H_k=1, H_v=1, initial_state=None, dht=None, gate="logsigmoid")
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    actual = run_backward(inputs, **gradients)
    tail = {name: inputs[name][:, -600:] for name in ("q", "k", "v", "g", "beta")}
    tail["cu_seqlens"] = torch.tensor([0, *lengths[-600:]]).cumsum(0)
    expected = reference.gated_delta_rule(**tail)
    accuracy.check("o", o[:, -600:], expected.o, dtype=BF16, case="66000 sequences")
    accuracy.check("final_state", final_state[-600:], expected.final_state, dtype=BF16, case="66000 sequences")
    expected = reference.gated_delta_rule_bwd(**tail, do=gradients["do"][:, -600:])
    actual = {name: x[:, -600:] for name, x in actual.items()}
    g_cumsum = reference.chunk_cumsum(tail["g"], tail["cu_seqlens"])
    accuracy.check_gradients(actual, expected, dtype=BF16, case="66000 sequences", g_cumsum=g_cumsum)


@whole_card
@pytest.mark.parametrize("beyond", (-1, 0, 1))
def test_as_many_elements_as_32_bits_have(beyond):
    """v, o and their gradients have 2^31 elements, a token's fewer, or a token's more. The last sequence lies there."""
    require_free(60)
    T, last = 2**31 // (H_V * D) + beyond, 130
    inputs = large_inputs((T - last, last), seed=beyond + 1)
    do = randn(torch.Generator("cuda").manual_seed(beyond + 11), 1, T, H_V, D)
    tail, name = slice(T - last, T), f"2^31 + {beyond * H_V * D} elements"
    arguments = part(inputs, tail, inputs["initial_state"][1:])
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    expected = reference.gated_delta_rule(**arguments)
    accuracy.check("o", o[:, tail], expected.o, dtype=BF16, case=name)
    accuracy.check("final_state", final_state[1:], expected.final_state, dtype=BF16, case=name)
    assert (o.abs().amax(-1) > 0).all()  # every row was written
    del o
    actual = run_backward(inputs, do)
    expected = reference.gated_delta_rule_bwd(**arguments, do=do[:, tail])
    for of in ("dq", "dk", "dv", "db", "dg"):
        size = expected.sizes.get(of)
        accuracy.check(of, actual[of][:, tail], getattr(expected, of), dtype=BF16, case=name, size=size)


@whole_card
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("gap", (0, 2**31 + 8), ids=("slots side by side", "slots far apart"))
def test_decoding_from_a_pool_of_more_than_2_31_elements(dtype, gap):
    """Slots lie at both ends of the pool, and states after the tokens in rows at both ends of another pool. All other
    slots are unchanged."""
    require_free(50)
    torch.cuda.empty_cache()
    size = H_V * D * D
    stride = size + gap
    slots = 3 if gap else 2**31 // size + 5
    memory = torch.full((slots * stride - gap,), 7.0, device="cuda", dtype=dtype)
    pool = memory.as_strided((slots, H_V, D, D), (stride, D * D, D, 1))
    used = [0, slots - 1, 1] if gap else [0, slots - 1, 2**31 // size, 2**31 // size - 1]
    kept = torch.full((slots, 2, H_V, D, D), 7.0, device="cuda", dtype=dtype) if gap == 0 else None
    generator = torch.Generator("cuda").manual_seed(0)
    N = len(used)
    for slot in used:
        pool[slot].normal_(generator=generator)
    q, k = (randn(generator, N, 2, H_K, D) for _ in range(2))
    v, gates = randn(generator, N, 2, H_V, D), randn(generator, 2, N, 2, H_V, dtype=torch.float32)
    rates = torch.zeros(H_V, device="cuda")
    arguments = (q, k, v, *gates, rates, None)

    small = torch.stack([pool[slot] for slot in used])
    small_kept = None if kept is None else torch.full((N, 2, H_V, D, D), 7.0, device="cuda", dtype=dtype)
    indices = torch.tensor(used, device="cuda")
    options = {} if kept is None else {"intermediate_states": small_kept}  # or another kernel runs
    expected = flash_qla.decode_gated_delta_rule(*arguments, small, torch.arange(N, device="cuda"), **options)
    options = {} if kept is None else {"intermediate_states": kept, "intermediate_indices": indices}
    o = flash_qla.decode_gated_delta_rule(*arguments, pool, indices, **options)
    assert torch.equal(o, expected) and o.isfinite().all()
    for n, slot in enumerate(used):
        assert torch.equal(pool[slot], small[n])
        pool[slot] = 7
        if kept is not None:
            assert torch.equal(kept[slot], small_kept[n])
            kept[slot] = 7
    for x in (memory, kept):
        assert x is None or all((piece == 7).all() for piece in x.flatten().split(2**28))


@whole_card
@pytest.mark.parametrize("layout", ("tokens innermost", "batches apart"))
def test_copies_of_more_than_2_31_elements(layout):
    """Tokens that are copied first lie further apart than 32 bits count."""
    require_free(40)
    (B, T), generator = (2, 2**22), torch.Generator("cuda").manual_seed(0)
    mixed = randn(generator, B, T, 4 * D)  # one query/key head, two value heads
    assert mixed.numel() > 2**31
    far = {"tokens innermost": lambda: mixed.mT.contiguous().mT, "batches apart": lambda: F.pad(mixed, (0, 0, 0, 3))}
    gates = F.logsigmoid(randn(generator, B, T, 2, dtype=torch.float32)) / 16, torch.ones(B, T, 2, device="cuda")
    with torch.no_grad():
        expected = flash_qla.chunk_gated_delta_rule_packed(mixed, *gates, 1, D, use_qk_l2norm_in_kernel=True)[0]
        moved = far[layout]()[:, :T]
        o = flash_qla.chunk_gated_delta_rule_packed(moved, *gates, 1, D, use_qk_l2norm_in_kernel=True)[0]
    assert not moved.is_contiguous() and torch.equal(o, expected) and o[-1, -1].any()
