"""The bars of the tests: relative L2 error against the fp64 reference, with one bar for each tensor and dtype.

Bars. The forward's tolerance in bf16 is 5e-3 for o, the final state and h. A bf16 number is off by at most
u = 2^-8 = 3.9e-3 and by about 1.6e-3 on the average; on the way to o three to five such roundings add up in quadrature.
fp16 (u = 2^-11) has the same bar in units of its own u, an eighth of it. fp32 and fp64 exist on the CPU only, where
nothing is rounded to 16 bits; what adds up is the length of the sums and of the recurrence. A is one triangular
inverse, stored in the dtype of q: up to u for the stored value alone, so the same bar holds. The gate cumsum is fp32
whatever 16-bit dtype q has: 64 additions, each off by at most half an ulp of a partial sum.

Gradients have bars of 8e-3 (dq, dk, dv, dh0) and 1e-2 (db, dg, and their sums dA_log and ddt_bias) in bf16 and an
eighth of that in fp16: their way is the forward's and about as much again. In fp32 and fp64 the gates' cumulative sum
adds a part of its own, see gradient_bar.

A mean over everything hides one bad token among thousands, so each block of 64 tokens x 1 head (each head's state) must
also stay within BLOCK_FACTOR times the bar. One wrong token in a block is an error of 12%. db and dg have one number
per token and head, and 64 of them may be small against what they are differences of; their blocks are whole heads, and
each single number must be right to TOKEN_FACTOR times the bar, of its own size or the head's root mean square.

db and dg are dot products. Where few of them are compared their norm may be small by luck, while the rounding of their
terms is not; it counts as at least their `size`, what it would be for terms of random signs (reference.Gradients).
"""

from __future__ import annotations

import contextlib

import torch
from reference import Gradients, one_thread

BF16_BAR = 5e-3
BARS = {
    torch.bfloat16: BF16_BAR,
    torch.float16: BF16_BAR / 8,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
CUMSUM_BARS = {torch.float32: 64 * 2.0**-24, torch.float64: 64 * 2.0**-53}
GRADIENT_BF16_BARS = {
    **dict.fromkeys(("dq", "dk", "dv", "dh0"), 8e-3),
    **dict.fromkeys(("db", "dg", "dA_log", "ddt_bias"), 1e-2),
}
BLOCK_FACTOR = 4
TOKEN_FACTOR = 16
MIN_BLOCK = 256  # smaller blocks are a few numbers that may cancel; the bar over the whole tensor holds for them too

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # dtypes of states in a pool

worst: dict[tuple[str, ...], dict] = {}  # (device, dtype, q's dtype, tensor) -> its row of worst_errors


def gradient_bar(name: str, dtype: torch.dtype, g_cumsum: torch.Tensor | None) -> float:
    """The bar of a gradient; dtype is that of q, g_cumsum the reference's, which 16 bits do without.

    The backward gets the gates as their cumulative sum b. What b_t - b_{t-1} gives back is off by half an ulp of b_t,
    at most 2^-24 |b_t| in fp32, and the decay e^{b_t - b_{t-1}} by as much of itself. Where |b| is large, little is
    remembered for more than a few tokens; over four of them such errors, added up in quadrature, are twice as large.
    In 16 bits this is nothing beside the rounding of q, k and v, as long as |b| stays in the thousands.
    """
    if dtype == torch.bfloat16:
        return GRADIENT_BF16_BARS[name]
    if dtype == torch.float16:
        return GRADIENT_BF16_BARS[name] / 8
    assert g_cumsum is not None, f"the bar of {name} in {dtype} follows the gates: g_cumsum is missing"
    half_ulp = torch.finfo(dtype).eps / 2
    finite = g_cumsum[g_cumsum.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return BARS[dtype] + 2 * half_ulp * largest


def bar_of(
    name: str, dtype: torch.dtype, stored: torch.dtype, g_cumsum: torch.Tensor | None
) -> tuple[float, torch.dtype]:
    """The bar of a tensor, and the dtype that determines it: that of q, unless the tensor is stored in `stored` with
    fewer digits than it was computed in. Where one rounding to `stored`, half an ulp, is above a gradient's bar, it
    comes on top."""
    if name == "g_cumsum":
        return CUMSUM_BARS[stored], stored
    if name not in GRADIENT_BF16_BARS:
        return BARS[dtype], dtype
    bar, half_ulp = gradient_bar(name, dtype, g_cumsum), torch.finfo(stored).eps / 2
    return (bar, dtype) if half_ulp <= bar else (bar + half_ulp, stored)


def smallest_norm(actual: torch.Tensor, elements: int) -> float:
    """The norm with every element at the smallest normal number. Smaller ones have no relative precision in the
    dtype."""
    return torch.finfo(actual.dtype).tiny * elements**0.5


def relative_error(actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor | None = None) -> float:
    """|actual - expected|_2 / |expected|_2. NaN if anything is NaN."""
    difference = torch.linalg.vector_norm(actual.double() - expected).item()
    norms = [torch.linalg.vector_norm(x).item() for x in (expected, size) if x is not None]
    return difference / max(*norms, smallest_norm(actual, actual.numel()))


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as a pool of 8 bits holds it: rounded to nearest. A number beyond the largest becomes the largest, also an
    infinity; NaN stays NaN."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def is_rounded(actual: torch.Tensor, expected: torch.Tensor, slack: float) -> bool:
    """Whether each number of 8 bits is some number near the expected one, rounded: off by at most `slack` of the root
    mean square before the rounding."""
    off = slack * expected.square().mean().sqrt()
    least, most = (to_float8(expected + sign * off, actual.dtype).double() for sign in (-1, 1))
    actual = actual.double()
    return bool(((least <= actual) & (actual <= most)).all())


def worst_block(actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor | None = None) -> tuple[float, int]:
    """Largest relative error over the leading dimension, and where.

    A block's norm counts as at least a hundredth of the mean block's: smaller ones are what cancellation or decay left.
    """
    difference = (actual.double() - expected).flatten(1).norm(dim=1)
    norms = expected.flatten(1).norm(dim=1)
    floor = (0.01 * norms.square().mean().sqrt()).clamp_min(smallest_norm(actual, actual[0].numel()))
    norms = torch.maximum(norms, floor)
    if size is not None:
        norms = torch.maximum(norms, size.flatten(1).norm(dim=1))
    return largest(difference / norms)


def worst_token(actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> tuple[float, int]:
    """Largest error of a number of [heads, T], relative to itself or its head's root mean square, and where."""
    least = torch.maximum(expected.square().mean(1, keepdim=True), size.square().mean(1, keepdim=True)).sqrt()
    norms = torch.maximum(expected.abs(), least).clamp_min(smallest_norm(actual, 1))
    return largest(((actual.double() - expected).abs() / norms).flatten())


def largest(errors: torch.Tensor) -> tuple[float, int]:
    index = int(errors.nan_to_num(nan=float("inf")).argmax())
    return errors[index].item(), index


def token_blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B * ceil(T / 64) * H, 64, D].

    The last block is the last 64 tokens, some of them a second time: a block of a few tokens is a few numbers that may
    cancel. Fewer tokens than 64 are padded with zeros.
    """
    T = x.shape[1]
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, max(0, 64 - T)))
    starts = [*range(0, T - 64, 64), max(0, T - 64)]
    return torch.stack([x[:, start : start + 64].transpose(1, 2) for start in starts], 1).flatten(0, 2)


def state_blocks(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -3)


def head_blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H] -> [B * H, T]."""
    return x.transpose(1, 2).flatten(0, 1)


def sum_blocks(x: torch.Tensor) -> torch.Tensor:
    """[H] -> [H, 1]."""
    return x[:, None]


BLOCKS = {
    **dict.fromkeys(("o", "A", "dq", "dk", "dv"), token_blocks),
    **dict.fromkeys(("h", "final_state", "dh0"), state_blocks),
    **dict.fromkeys(("db", "dg"), head_blocks),
    **dict.fromkeys(("dA_log", "ddt_bias"), sum_blocks),
}


TENSORS = {*BLOCKS, "g_cumsum"}
IN_THE_DTYPE_OF_Q = ("o", "A", "dq", "dk", "dv")


@one_thread()
def check(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype,
    case: object,
    size: torch.Tensor | None = None,
    g_cumsum: torch.Tensor | None = None,
):
    """Assert shape and accuracy of one output. Name and dtypes pick the bar: dtype is that of q, and g_cumsum is the
    reference's, for gradients in fp32 and fp64. case is the Case, or says which call this is."""
    case = str(case).strip()
    assert name in TENSORS, f"{name} is none of {', '.join(sorted(TENSORS))}"
    assert case and case not in TENSORS, f"{name}: {case!r} does not say which call this is"
    assert name not in IN_THE_DTYPE_OF_Q or actual.dtype == dtype, f"{name} is {actual.dtype}, and q {dtype} [{case}]"
    assert actual.shape == expected.shape, f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    bar, determined_by = bar_of(name, dtype, actual.dtype, g_cumsum)
    if actual.numel() == 0:
        return
    infinite = expected.isinf()
    if infinite.any():  # -inf in g_cumsum
        assert torch.equal(actual[infinite].double(), expected[infinite]), f"{name}: expected infinities [{case}]"
        actual, expected = actual.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)
    error = relative_error(actual, expected, size)
    dtypes = (str(x).removeprefix("torch.") for x in (determined_by, dtype))
    record(dict(zip(ROW, (actual.device.type, *dtypes, name, error, bar, case), strict=True)))
    # "not <=" rather than ">": NaN must fail
    if not error <= bar:
        bad = (~actual.isfinite()).sum().item()
        raise AssertionError(
            f"{name}: relative L2 error {error:.3e} > {bar:.1e} ({bad} of {actual.numel()} not finite) [{case}]"
        )
    if not expected.any():
        assert not actual.any(), f"{name}: expected exactly zero [{case}]"
    if name not in BLOCKS:
        return
    actual, expected, size = (x if x is None else BLOCKS[name](x) for x in (actual, expected, size))
    if actual[0].numel() >= MIN_BLOCK:
        error, index = worst_block(actual, expected, size)
        if not error <= BLOCK_FACTOR * bar:
            raise AssertionError(
                f"{name}: relative L2 error {error:.3e} > {BLOCK_FACTOR * bar:.1e} "
                f"in block {index} of {len(actual)} [{case}]"
            )
    if size is not None:
        error, index = worst_token(actual, expected, size)
        if not error <= TOKEN_FACTOR * bar:
            head, token = divmod(index, actual.shape[1])
            raise AssertionError(
                f"{name}: error {error:.3e} > {TOKEN_FACTOR * bar:.1e} at token {token} of head {head} [{case}]"
            )


@one_thread()
def check_gradients(actual: dict, expected: Gradients, *, dtype: torch.dtype, case: object, g_cumsum: torch.Tensor):
    """Every gradient in `actual`, by name, against the reference's; g_cumsum is that of the reference too."""
    for name, x in actual.items():
        expected_gradient = getattr(expected, name)
        check(name, x, expected_gradient, dtype=dtype, case=case, size=expected.sizes.get(name), g_cumsum=g_cumsum)
        # dg sums over pairs of tokens in the chunk form, and may come to zero by cancellation only.
        if name != "dg":
            assert not x[expected_gradient == 0].any(), f"{name}: expected exactly zero in some elements [{case}]"


def compare(actual: dict, expected: dict, sizes: dict, *, dtype: torch.dtype, case: object) -> tuple[dict, list[str]]:
    """The relative L2 errors by name, and in words those that are over their bars."""
    errors, misses = {}, []
    for name, x in actual.items():
        expected_tensor, size = expected[name], sizes.get(name)
        errors[name] = relative_error(x, expected_tensor, size) if x.numel() else 0.0
        try:
            check(name, x, expected_tensor, dtype=dtype, case=case, size=size, g_cumsum=expected["g_cumsum"])
        except AssertionError as miss:
            misses.append(str(miss))
    return errors, misses


@contextlib.contextmanager
def not_measured():
    """Checks inside the block, such as those of planted errors, do not count among the worst."""
    before = dict(worst)
    try:
        yield
    finally:
        worst.clear()
        worst.update(before)


ROW = ("device", "dtype", "q_dtype", "tensor", "error", "bar", "case")


def record(row: dict) -> None:
    """Keep a row, of this process or of another, if its error is the largest of its device, dtypes and tensor."""
    key = tuple(row[name] for name in ROW[:4])
    if key not in worst or not row["error"] <= worst[key]["error"]:
        worst[key] = row


def worst_errors() -> list[dict]:
    """The largest error of this session for each device, dtype that determines the bar, dtype of q and tensor, with its
    bar and its case."""
    return [worst[key] for key in sorted(worst)]


def table(rows: list[dict]) -> list[str]:
    """The rows for people, under a line that names the columns."""
    columns = "{device:6} {dtype:8} {q_dtype:8} {tensor:11} {error:8} {bar:8} {case}"
    formatted = [{**row, "error": f"{row['error']:.2e}", "bar": f"{row['bar']:.2e}"} for row in rows]
    return [columns.format(**row) for row in (dict(zip(ROW, ROW, strict=True)) | {"q_dtype": "q"}, *formatted)]
