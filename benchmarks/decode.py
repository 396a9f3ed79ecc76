"""Decoding from a pool of states by flash_qla, FLA, SGLang, vLLM and attn-gym, same inputs, a process per package.

    python benchmarks/decode.py --out benchmarks/results/decode_h200.json
    python benchmarks/decode.py --tokens 4 --heads 16x32 --batches 64,256 --packages flash_qla,sglang
    python benchmarks/decode.py --tokens 1,4 --keep every --packages flash_qla,sglang,vllm
    python benchmarks/decode.py --keep lagging --steps 8,16,32 --packages flash_qla,sglang
    python benchmarks/decode.py --tokens 1,4 --keep plain --state-dtypes fp32 --packages flash_qla,fla

Raw bf16 gates and betas, the l2norm inside. Sequences are at random slots of a pool with twice as many slots. A sample
is the replay of a CUDA graph. Its calls take several pools in turn, so that no state is in the L2 cache when its turn
comes; q, k, v and the gates may be. Medians over samples, in microseconds a call.

  --keep last    the state after the last token goes back to its slot: a sequence reads one state and writes one
  --keep every   the state after each token is kept: by vLLM in slots, by SGLang in a buffer, by flash_qla in both ways
  --keep lagging every --steps-th state goes back, and steps in between to a backlog (flash_qla, SGLang). A sample is
                 whole cycles, so times and bytes are those of an average step. The functions of --keep last run, too.
                 flash_qla's changes are in fp32; on bf16 states also in bf16 ("rounded"), as SGLang's function has them
  --keep plain   no pool: a state for each sequence, [V, K] or [K, V], and ready gates, as FLA's and transformers'
                 functions have them; the last state goes to a new tensor, in flash_qla also to where it came from

All functions of a package run, and the fastest one counts. FLA's function takes no slots, so it has only --keep
plain. The bytes are those of the states that are read and written, of the inputs and of o. The floor is the time of a
copy of so many bytes (common.ceilings).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import common
import reference
import torch
import torch.nn.functional as F
from accuracy import relative_error
from common import FLA_TRITON, argument_parser, ceilings, parse_heads, print_comparison, run, spread, time_graph

ROTATED_BYTES = 200e6  # a sample touches states of so many bytes before it returns to one: four times the L2 cache
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATE_DTYPES |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # only flash_qla's functions take these
SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0}
REPLAY_MODULE = "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm"
REPLAY = "fused_recurrent_linear_replayssm_decode"
PACKED, UPDATE = "fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update"


@dataclass
class Case:
    H_k: int
    H_v: int
    batch: int
    tokens: int  # tokens of a sequence
    keep: str  # last, every, plain, lagging
    state_dtype: torch.dtype
    steps: tuple[int, ...] = ()  # with lagging: lengths of a cycle
    head_dims: tuple[int, int] = common.HEAD_DIMS
    pools: int = 0  # 0: as many as ROTATED_BYTES needs

    def __post_init__(self):
        generator = torch.Generator(common.DEVICE).manual_seed(31 * self.batch + self.tokens)

        def randn(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, generator=generator, device=common.DEVICE, dtype=dtype)

        B, T = self.batch, self.tokens
        self.K, self.V = K, V = self.head_dims
        shapes = ((self.H_k, K), (self.H_k, K), (self.H_v, V))
        self.mixed = randn(B * T, sum(map(math.prod, shapes)))
        parts = self.mixed.split([math.prod(shape) for shape in shapes], -1)
        self.q, self.k, self.v = (x.view(B, T, *shape) for x, shape in zip(parts, shapes, strict=True))
        self.a, self.b = randn(B, T, self.H_v), randn(B, T, self.H_v)
        self.A_log, self.dt_bias = randn(2, self.H_v, dtype=torch.float32).unbind()
        self.g, self.beta = F.logsigmoid(self.a.float()), self.b.float().sigmoid()
        self.cu_seqlens = torch.arange(B + 1, device=common.DEVICE, dtype=torch.int32) * T
        # vLLM does not use slot 0. A sequence has a slot for each token, and starts from the first one.
        slots = B if self.keep == "plain" else 2 * B * self.slots_of_sequence + 1
        if self.keep == "plain":
            table = torch.arange(B)[:, None].int()
        else:
            shuffled = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(slots)) + 1
            table = shuffled[: B * self.slots_of_sequence].view(B, -1).int()
        self.table = table.to(common.DEVICE)
        self.slots = self.table[:, 0].contiguous()
        state_bytes = B * self.H_v * V * K * self.state_dtype.itemsize
        self.bytes = state_bytes * (1 + (T if keep_every(self) else 1)) + self.io_bytes()
        self.pools = self.pools or max(1, math.ceil(ROTATED_BYTES / state_bytes))
        drawn_in = torch.bfloat16 if self.state_dtype.itemsize == 1 else self.state_dtype
        self.pool = randn(self.pools, slots, self.H_v, V, K, dtype=drawn_in).to(self.state_dtype)
        self.o = torch.empty_like(self.v, memory_format=torch.contiguous_format)
        self.kept = None  # the states after all tokens, beside the pool
        if keep_every(self):
            self.kept = torch.zeros(self.pools, B, T, self.H_v, V, K, device=common.DEVICE, dtype=self.state_dtype)

    @property
    def slots_of_sequence(self) -> int:
        return self.tokens if keep_every(self) else 1

    def io_bytes(self) -> int:
        raw = (self.a, self.b, self.A_log, self.dt_bias, self.slots)
        gates = (self.g, self.beta) if self.keep == "plain" else raw
        return sum(x.numel() * x.element_size() for x in (self.mixed, self.v, *gates))

    def states(self, i: int, state_v_first: bool) -> torch.Tensor:
        """A pool's numbers as states of this layout."""
        return self.pool[i] if state_v_first else self.pool[i].view(*self.pool.shape[1:3], self.K, self.V)

    def packed(self, name: str) -> torch.Tensor:
        """q, k, v as [1, tokens, ...]; a and b as [tokens, H_v]."""
        x = getattr(self, name).flatten(0, 1)
        return x if name in ("a", "b") else x[None]


def keep_every(case) -> bool:
    return case.keep == "every" and case.tokens > 1


@dataclass
class Lagging:
    """Decoding that writes a state at the last of `steps` steps: (number of a pool, step) -> o.

    function takes the state pool and, by name, d_cache, k_cache, g_cache and write_pos.
    """

    function: Callable
    case: Case
    steps: int
    change_dtype: torch.dtype
    key_dtype: torch.dtype

    def __post_init__(self):
        case, L = self.case, self.steps
        pools, slots = case.pool.shape[:2]

        def backlogs(dtype, *shape):
            return torch.zeros(pools, slots, *shape, device=common.DEVICE, dtype=dtype)

        self.backlogs = {
            "d_cache": backlogs(self.change_dtype, case.H_v, L, case.V),
            "k_cache": backlogs(self.key_dtype, case.H_k, L, case.K),
            "g_cache": backlogs(torch.float32, case.H_v, L),
        }
        self.positions = torch.arange(L, device=common.DEVICE, dtype=torch.int32)[:, None].expand(L, case.batch)
        self.positions = self.positions.contiguous()

    def __call__(self, i: int, step: int = 0) -> torch.Tensor:
        backlog = {name: x[i] for name, x in self.backlogs.items()}
        return self.function(self.case.pool[i], **backlog, write_pos=self.positions[step])

    @property
    def keep(self) -> str:
        return f"L={self.steps}"

    @property
    def bytes(self) -> float:
        """Of an average step: (L - 1) / 2 steps of a backlog are read, (L - 1) / L of a step is written."""
        case, L = self.case, self.steps
        state = case.H_v * case.V * case.K * case.state_dtype.itemsize
        step = (
            case.H_v * case.V * self.change_dtype.itemsize + case.H_k * case.K * self.key_dtype.itemsize + 4 * case.H_v
        )
        return case.io_bytes() + case.batch * (state * (1 + 1 / L) + step * ((L - 1) / 2 + (L - 1) / L))


# The functions of each package by name: (number of a pool) -> o, or a Lagging.


LAYOUTS = {"V-first": {"state_v_first": True}, "K-first": {"state_v_first": False}}


def plain_calls(case: Case, function: Callable) -> dict[str, Callable]:
    """FLA's function, or one with its arguments, with ready gates on states of both layouts."""
    options = {"g": case.g, "beta": case.beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    call = partial(function, case.q, case.k, case.v, **options)
    return {
        layout: lambda i, options=options: call(initial_state=case.states(i, **options), **options)[0]
        for layout, options in LAYOUTS.items()
    }


def flash_qla_calls(case: Case) -> dict[str, Callable]:
    from flash_qla import decode_gated_delta_rule, decode_gated_delta_rule_packed

    if case.keep == "plain":
        from flash_qla.integrations.fla import fused_recurrent_gated_delta_rule

        call = partial(decode_gated_delta_rule, case.q, case.k, case.v, case.g, case.beta, None, None)
        in_place = {
            f"{layout} in place": lambda i, options=options: call(case.states(i, **options), **options)
            for layout, options in LAYOUTS.items()
        }
        return in_place | plain_calls(case, fused_recurrent_gated_delta_rule)
    gates = (case.a, case.b, case.A_log, case.dt_bias)
    call = partial(decode_gated_delta_rule, case.q, case.k, case.v, *gates)
    if keep_every(case):
        return {
            "in slots": lambda i: call(case.pool[i], case.table, write_indices=case.table),
            "in a buffer": lambda i: call(
                case.pool[i], case.slots, update_state=False, intermediate_states=case.kept[i]
            ),
        }
    calls = {"decode": lambda i: call(case.pool[i], case.slots)}
    if case.tokens == 1:
        gates = (case.packed("a"), case.packed("b"), case.A_log, case.dt_bias)
        calls["packed"] = lambda i: decode_gated_delta_rule_packed(case.mixed, *gates, case.pool[i], case.slots)
    for steps in case.steps:
        function = partial(buffered, case)
        calls[f"buffered {steps}"] = Lagging(function, case, steps, torch.float32, torch.bfloat16)
        if case.state_dtype == torch.bfloat16:  # changes as SGLang's function keeps them
            calls[f"rounded {steps}"] = Lagging(function, case, steps, torch.bfloat16, torch.bfloat16)
    return calls


def buffered(case: Case, pool: torch.Tensor, **backlog) -> torch.Tensor:
    from flash_qla import decode_gated_delta_rule_buffered

    gates = (case.a, case.b, case.A_log, case.dt_bias)
    return decode_gated_delta_rule_buffered(case.q, case.k, case.v, *gates, pool, case.slots, **backlog)


def fla_calls(case: Case) -> dict[str, Callable]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return plain_calls(case, fused_recurrent_gated_delta_rule) if case.keep == "plain" else {}


def packed_call(function: Callable, case: Case, pools=None) -> Callable:
    """One token, as both engines' layers call it. `pools` are those of the case by default."""
    pools = case.pool if pools is None else pools
    options = {
        "mixed_qkv": case.mixed,
        "a": case.packed("a"),
        "b": case.packed("b"),
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "scale": case.K**-0.5,
        "out": case.o,
        "ssm_state_indices": case.slots,
        "use_qk_l2norm_in_kernel": True,
    }
    return lambda i: function(initial_state=pools[i], **options)[0]


def replay(case: Case, pool: torch.Tensor, **backlog) -> torch.Tensor:
    """SGLang's function for states that lag. Its caches have the dtype of the states."""
    function = getattr(importlib.import_module(REPLAY_MODULE), REPLAY)
    return packed_call(partial(function, **backlog), case, [pool])(0)


def update_options(case: Case) -> dict:
    options = {name: case.packed(name).contiguous() for name in ("q", "k", "v", "a", "b")}
    options |= {"A_log": case.A_log, "dt_bias": case.dt_bias, "cu_seqlens": case.cu_seqlens}
    return options | {"use_qk_l2norm_in_kernel": True}


def sglang_calls(case: Case) -> dict[str, Callable]:
    if case.keep == "plain":
        return {}
    ops = "sglang.kernels.ops.attention"
    update = getattr(importlib.import_module(f"{ops}.linear.fused_sigmoid_gating_recurrent"), UPDATE)
    options = update_options(case) | SOFTPLUS | {"initial_state_indices": case.slots, "is_kda": False}
    if keep_every(case):
        options |= {"disable_state_update": True, "cache_steps": case.tokens, "retrieve_parent_token": None}
        options["intermediate_state_indices"] = torch.arange(case.batch, device=common.DEVICE, dtype=torch.int32)
        return {
            "update": lambda i: update(
                initial_state_source=case.pool[i], intermediate_states_buffer=case.kept[i], **options
            )
        }
    calls = {"update": lambda i: update(initial_state_source=case.pool[i], **options)}
    if case.tokens == 1:
        packed = getattr(importlib.import_module(f"{ops}.fla.fused_recurrent"), PACKED)
        calls["packed"] = packed_call(packed, case)
    for steps in case.steps:
        dtypes = (case.state_dtype, case.state_dtype)
        calls[f"replay {steps}"] = Lagging(partial(replay, case), case, steps, *dtypes)
    return calls


def vllm_calls(case: Case) -> dict[str, Callable]:
    if case.keep == "plain":
        return {}
    ops = "vllm.third_party.flash_linear_attention.ops"
    update = getattr(importlib.import_module(f"{ops}.fused_sigmoid_gating"), UPDATE)
    options = update_options(case) | {"scale": case.K**-0.5, "inplace_final_state": True}
    if keep_every(case):
        accepted = torch.ones(case.batch, device=common.DEVICE, dtype=torch.int32)
        options |= {"ssm_state_indices": case.table, "num_accepted_tokens": accepted}
        return {"update": lambda i: update(initial_state=case.pool[i], **options)[0]}
    if case.tokens > 1:
        return {}
    packed = getattr(importlib.import_module(f"{ops}.fused_recurrent"), PACKED)
    options["ssm_state_indices"] = case.slots
    return {
        "update": lambda i: update(initial_state=case.pool[i], **options)[0],
        "packed": packed_call(packed, case),
    }


def attn_gym_calls(case: Case) -> dict[str, Callable]:
    from attn_gym.linear import recurrent_gdn_decode

    if case.tokens > 1 or case.keep == "plain":
        return {}
    options = {
        "packed_qkv": case.mixed,
        "raw_gate": case.packed("a")[None],
        "raw_beta": case.packed("b")[None],
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "state_indices": case.slots,
        "scale": case.K**-0.5,
        "out": case.o.flatten(0, 1)[None],
    }
    return {"packed": lambda i: recurrent_gdn_decode(state_cache=case.pool[i], **options)}


CALLS = {
    "flash_qla": flash_qla_calls,
    "fla": fla_calls,
    "sglang": sglang_calls,
    "vllm": vllm_calls,
    "attn_gym": attn_gym_calls,
}


@torch.no_grad()
def check(calls_of: Callable, **of_case) -> dict[str, dict[str, float]]:
    """Relative L2 errors of each function's o, on three sequences, from the recurrence in fp64. A Lagging decodes the
    token again at each step of a cycle."""
    errors = {}
    for name in calls_of(Case(batch=3, pools=1, **of_case)):
        case = Case(batch=3, pools=1, **of_case)  # the states are what they were
        call = calls_of(case)[name]
        steps = call.steps if isinstance(call, Lagging) else 1
        gates, activations = (case.a, case.b), {"A_log": case.A_log, "dt_bias": case.dt_bias, **common.INSIDE}
        if case.keep == "plain":
            gates, activations = (case.g, case.beta), {}
        v_first = not name.startswith("K-first")
        expected = reference.gated_delta_rule(
            *(x.repeat(1, steps, *(1 for _ in x.shape[2:])) for x in (case.q, case.k, case.v, *gates)),
            scale=case.K**-0.5,
            initial_state=case.states(0, v_first)[case.slots.long()].float(),
            state_v_first=v_first,
            use_qk_l2norm_in_kernel=True,
            **activations,
        ).o
        o = [call(0, step).clone() for step in range(steps)] if isinstance(call, Lagging) else [call(0)]
        of_step = (case.batch, case.tokens, *expected.shape[2:])
        errors[name] = {"o": relative_error(torch.cat([x.reshape(of_step) for x in o], 1), expected)}
    return errors


@torch.no_grad()
def measure(package: str, options):
    calls_of, version = CALLS[package], importlib.import_module(package).__version__
    sizes = itertools.product(parse_heads(options.heads), options.state_dtypes.split(","), options.tokens)
    for (H_k, H_v), state_dtype, tokens in sizes:
        of_case = {"H_k": H_k, "H_v": H_v, "tokens": tokens, "keep": options.keep}
        of_case |= {"state_dtype": STATE_DTYPES[state_dtype], "steps": steps_of(options, tokens)}
        of_case["head_dims"] = options.head_dims
        errors = check(calls_of, **of_case)
        for batch in options.batches:
            case = Case(batch=batch, **of_case)
            for name, call in calls_of(case).items():
                steps = range(call.steps) if isinstance(call, Lagging) else (0,)

                def round_of_calls(call=call, case=case, steps=steps):
                    for step in steps:
                        for i in range(case.pools):
                            call(i, step) if isinstance(call, Lagging) else call(i)

                ms = time_graph(round_of_calls, options.samples, options.sample_ms)
                cell = {
                    "package": package,
                    "version": version,
                    "function": name,
                    "heads": f"{H_k}x{H_v}",
                    **common.head_dims_field(options.head_dims),
                    "batch": batch,
                    "tokens": tokens,
                    "keep": call.keep if isinstance(call, Lagging) else keep_of(options),
                    "state_dtype": state_dtype,
                    **{key.replace("ms", "us"): 1e3 * x / case.pools / len(steps) for key, x in spread(ms).items()},
                    "bytes": call.bytes if isinstance(call, Lagging) else case.bytes,
                    "relative_error": errors[name],
                }
                print(f"{package:>10} {name:>16}", *map(cell.get, KEY), f"{cell['us']:8.2f} us", flush=True)
                yield cell
            call = None  # it holds the states
            del case


def keep_of(options) -> str:
    """The states that functions keep which are no Lagging."""
    return "last" if options.keep == "lagging" else options.keep


def steps_of(options, tokens: int) -> tuple[int, ...]:
    return tuple(options.steps) if options.keep == "lagging" and tokens == 1 else ()


KEY = ("heads", "state_dtype", "tokens", "keep", "batch")


def report(cells: list[dict]) -> None:
    """flash_qla's fastest function compared with those of the others. The floor is the time of a copy."""
    with_floor = [cell | {"copy_us": cell["bytes"] / ceilings()["bandwidth"] * 1e6} for cell in cells]
    print_comparison(with_floor, "us", lambda cell: tuple(map(cell.get, KEY)), "copy_us")


def parse_integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages=",".join(CALLS))
    parser.add_argument("--heads", default="2x8,4x16,8x32,16x32,16x64", help="query/key x value heads")
    common.add_head_dims_argument(parser)
    common.add_kernels_argument(parser)
    parser.add_argument("--batches", type=parse_integers, default="1,8,32,64,128,256,512", help="sequences")
    parser.add_argument("--tokens", type=parse_integers, default="1", help="tokens of a sequence")
    parser.add_argument(
        "--keep", choices=("last", "every", "plain", "lagging"), default="last", help="which states are kept"
    )
    parser.add_argument("--steps", type=parse_integers, default="8,16,32", help="steps of a cycle, with --keep lagging")
    parser.add_argument("--state-dtypes", default="fp32,bf16")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=2.0, help="length of a sample")
    return parser


if __name__ == "__main__":
    run(make_parser(), measure, report, FLA_TRITON)
