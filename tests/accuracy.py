"""What "correct" means here: relative L2 error against the fp64 reference, with one bar per tensor and dtype.

Bars. The forward's tolerance in bf16 is 5e-3 for o, the final state and h. A bf16 number is off by at most
u = 2^-8 = 3.9e-3 and by about 1.6e-3 on the average; on the way to o three to five such roundings add up in quadrature.
fp16 (u = 2^-11) has the same bar in units of its own u, an eighth of it. fp32 and fp64 exist on the CPU only, where
nothing is rounded to 16 bits; what adds up is the length of the sums and of the recurrence. A is one triangular
inverse, stored in the dtype of q: up to u for the stored value alone, so the same bar holds. The gate cumsum is fp32
whatever 16-bit dtype q has: 64 additions, each off by at most half an ulp of a partial sum.

A mean over everything hides one bad token among thousands, so each block of 64 tokens x 1 head (each head's state) must
also stay within BLOCK_FACTOR times the bar. One wrong token in a block is an error of 12%.
"""

from __future__ import annotations

import torch

BF16_BAR = 5e-3
BARS = {
    torch.bfloat16: BF16_BAR,
    torch.float16: BF16_BAR / 8,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
CUMSUM_BARS = {torch.float32: 64 * 2.0**-24, torch.float64: 64 * 2.0**-53}
BLOCK_FACTOR = 4
MIN_BLOCK = 256  # smaller blocks are a few numbers that may cancel; the bar over the whole tensor holds for them too

worst: dict[tuple[str, str, str], tuple[float, str]] = {}  # (tensor, dtype, device) -> (error, case)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected|_2 / |expected|_2; the plain |actual|_2 where expected is zero. NaN if anything is NaN."""
    difference = torch.linalg.vector_norm(actual.double() - expected).item()
    norm = torch.linalg.vector_norm(expected).item()
    return difference / norm if norm > 0 else difference


def worst_block(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Largest relative error over the leading dimension, and where.

    A block's norm counts as at least a hundredth of the mean block's: smaller ones are what cancellation or decay left.
    """
    actual, expected = actual.double().flatten(1), expected.flatten(1)
    difference = (actual - expected).norm(dim=1)
    norms = expected.norm(dim=1)
    floor = 0.01 * norms.square().mean().sqrt()
    error = difference / torch.maximum(norms, floor)
    error = torch.where(difference == 0, 0.0, error)
    index = int(error.nan_to_num(nan=float("inf")).argmax())
    return error[index].item(), index


def token_blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B * ceil(T / 64) * H, 64, D], zero-padded."""
    B, T, H, D = x.shape
    padding = -T % 64
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.reshape(B * ((T + padding) // 64), 64, H, D).transpose(1, 2).flatten(0, 1)


def state_blocks(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -3)


def check(
    name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, case: str, bar: float | None = None
):
    """Assert shape and accuracy of one output; dtype is that of q and picks the bar."""
    assert actual.shape == expected.shape, f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if bar is None:
        bar = CUMSUM_BARS[actual.dtype] if name == "g_cumsum" else BARS[dtype]
    if actual.numel() == 0:
        return
    error = relative_error(actual, expected)
    key = (name, str(dtype).removeprefix("torch."), actual.device.type)
    if not error <= worst.get(key, (-1.0, ""))[0]:
        worst[key] = (error, case)
    # "not <=" rather than ">": NaN must fail
    if not error <= bar:
        bad = (~actual.isfinite()).sum().item()
        raise AssertionError(
            f"{name}: relative L2 error {error:.3e} > {bar:.1e} ({bad} of {actual.numel()} not finite) [{case}]"
        )
    if not expected.any():
        assert not actual.any(), f"{name}: expected exactly zero [{case}]"
    blocks = token_blocks if name in ("o", "A") else state_blocks if name in ("h", "final_state") else None
    if blocks is not None:
        actual, expected = blocks(actual), blocks(expected)
        if actual[0].numel() >= MIN_BLOCK:
            error, index = worst_block(actual, expected)
            if not error <= BLOCK_FACTOR * bar:
                raise AssertionError(
                    f"{name}: relative L2 error {error:.3e} > {BLOCK_FACTOR * bar:.1e} "
                    f"in block {index} of {len(actual)} [{case}]"
                )


def worst_errors() -> list[dict]:
    """The largest error of each tensor, dtype and device in this session, and the case that had it."""
    rows = [
        {"device": device, "dtype": dtype, "tensor": name, "error": error, "case": case}
        for (name, dtype, device), (error, case) in worst.items()
    ]
    return sorted(rows, key=lambda row: (row["device"], row["dtype"], row["tensor"]))
