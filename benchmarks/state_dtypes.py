"""Errors of decoding by the dtype of the pool's states, against the fp64 recurrence, as tokens go by.

    python benchmarks/state_dtypes.py --out benchmarks/results/state_dtypes_cpu.json
    python benchmarks/state_dtypes.py --device cuda --tokens 1,64,512,4096

Sequences start from zero states and decode one token at a time with decode_gated_delta_rule, so a state is rounded to
the pool's dtype at every token. The relative L2 errors are those of the last token's o and of the state after it: over
all sequences and heads, and of the head with the largest error. Inputs are bf16, the l2norm is inside. The same inputs
on every device.

Gates are those of a layer's usual start, from which it learns: g = -A softplus(a + dt_bias) with A of each head from
(0, 16], and softplus(dt_bias) from 1e-3 to 1e-1, log-uniform. A head's half-life is between a token and thousands of
tokens.
"""

from __future__ import annotations

import math

import common
import torch
import torch.nn.functional as F
from accuracy import relative_error

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
K = V = 128


def make_inputs(B: int, H_k: int, H_v: int, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Arguments of decode_gated_delta_rule for all tokens, [B, tokens, ..], and the parameters of the gate."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(least, most):
        return least + (most - least) * torch.rand(H_v, generator=generator)

    dt = uniform(math.log(1e-3), math.log(1e-1)).exp()
    inputs = {
        "q": randn(B, tokens, H_k, K).bfloat16(),
        "k": randn(B, tokens, H_k, K).bfloat16(),
        "v": randn(B, tokens, H_v, V).bfloat16(),
        "a": randn(B, tokens, H_v).bfloat16(),
        "b": randn(B, tokens, H_v).bfloat16(),
        "A_log": (16 * (1 - torch.rand(H_v, generator=generator))).log(),
        "dt_bias": dt + (-(-dt).expm1()).log(),  # the inverse of softplus
    }
    return {name: x.to(device) for name, x in inputs.items()}


BY_TOKEN = ("q", "k", "v", "a", "b")


def token_of(inputs: dict, t: int) -> dict[str, torch.Tensor]:
    return {name: x[:, t : t + 1] if name in BY_TOKEN else x for name, x in inputs.items()}


class Recurrence:
    """The truth: o and the state in fp64, token by token."""

    def __init__(self, inputs: dict):
        B, _, H_v, _ = inputs["v"].shape
        self.inputs, self.group = inputs, H_v // inputs["q"].shape[2]
        self.state = torch.zeros(B, H_v, V, K, dtype=torch.float64, device=inputs["v"].device)

    def step(self, t: int) -> torch.Tensor:
        q, k, v, a, b = (self.inputs[name][:, t].double() for name in BY_TOKEN)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(self.group, 1) for x in (q, k))
        rate, bias = self.inputs["A_log"].double().exp(), self.inputs["dt_bias"].double()
        self.state *= (-rate * F.softplus(a + bias)).exp()[..., None, None]
        known = torch.einsum("bhvk,bhk->bhv", self.state, k)
        self.state += torch.einsum("bhv,bhk->bhvk", b.sigmoid()[..., None] * (v - known), k)
        return torch.einsum("bhvk,bhk->bhv", self.state, q) * K**-0.5


def errors(name: str, actual: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    heads = zip(actual.unbind(1), expected.unbind(1), strict=True)
    worst = max(relative_error(x, y) for x, y in heads)
    return {name: relative_error(actual, expected), f"{name}_of_worst_head": worst}


@torch.no_grad()
def measure(package: str, options):
    from flash_qla import __version__, decode_gated_delta_rule

    H_k, H_v = options.heads
    counts = sorted(options.tokens)
    inputs = make_inputs(options.batch, H_k, H_v, counts[-1], options.device)
    dtypes = options.state_dtypes.split(",")
    shape = (options.batch, H_v, V, K)
    pools = {x: torch.zeros(shape, device=options.device).to(DTYPES[x]) for x in dtypes}
    truth = Recurrence(inputs)
    for t in range(counts[-1]):
        expected, token = truth.step(t), token_of(inputs, t)
        outputs = {x: decode_gated_delta_rule(**token, state_pool=pool)[:, 0] for x, pool in pools.items()}
        if t + 1 not in counts:
            continue
        for dtype in dtypes:
            cell = {"package": package, "version": __version__, "device": options.device, "heads": f"{H_k}x{H_v}"}
            cell |= {"batch": options.batch, "state_dtype": dtype, "tokens": t + 1}
            cell |= errors("o", outputs[dtype], expected) | errors("state", pools[dtype], truth.state)
            yield cell


def report(cells: list[dict]) -> None:
    for of_dtype in DTYPES:
        for cell in cells:
            if cell["state_dtype"] == of_dtype:
                errors = [cell[x] for x in ("o", "o_of_worst_head", "state", "state_of_worst_head")]
                print(f"{of_dtype} {cell['tokens']:>5} tokens: o {errors[0]:.2e} (worst head {errors[1]:.2e}),"
                      f" state {errors[2]:.2e} (worst head {errors[3]:.2e})")  # fmt: skip


def make_parser():
    parser = common.argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split("x"))), default=(4, 8))
    parser.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], default=[1, 64, 512, 4096])
    parser.add_argument("--state-dtypes", default=",".join(DTYPES))
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report)
