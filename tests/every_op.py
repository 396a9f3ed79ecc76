"""Every op of the library, called alike: for what holds for all of them, whatever they compute. Ops that are parts of
a pass have the name of the first one, and are called together.

make_call(name, device) is a call on a few sequences, packed where the op takes cu_seqlens and rows of a batch
elsewhere. It gives results by the names of the schema, and knows which part of an argument or a result is a sequence's.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from cases import Case, make_gradients, make_inputs, run_forward

import flash_qla  # noqa: F401  loads the ops

NAMES = sorted(
    name.removeprefix("flash_qla::")
    for name in torch._C._dispatch_get_all_op_names()
    if re.match(r"flash_qla::[^_.][^.]*(?<!_replay)(?<!_finish)$", name)
)
CONVOLUTIONS = [name for name in NAMES if "causal_conv1d" in name]
REGIONS = [name for name in NAMES if "gated_delta_net" in name]
WITH_POOL = [name for name in NAMES if "state_pool" in str(getattr(torch.ops.flash_qla, name).default._schema)]
LENGTHS = (70, 64, 0, 133)
DECODED = (2, 1, 0, 3)
SLOTS = 9  # of the pool

BY_TOKEN = {"q", "k", "v", "g", "beta", "A", "do", "g_raw", "a", "b", "mixed_qkv"}
BY_TOKEN |= {"mixed", "dmixed", "da"}
BY_TOKEN |= {"x", "y", "dx", "dy", "z", "dz", "o", "g_cumsum", "dq", "dk", "dv", "dmixed_qkv", "db", "dg"}
BY_SEQUENCE = {"initial_state", "dht", "final_state", "dh0", "intermediate_states", "intermediate_windows"}
BY_SEQUENCE |= {"initial_window", "final_window", "dwindow", "dwindow0"}
BY_NUMBER = {"state_indices", "write_pos", "force_flush"}  # a number for each sequence
OF_SLOTS = {"state_pool", "window_pool", "d_cache", "k_cache", "g_cache"}
OF_ALL = {"A_log", "dt_bias", "dA_log", "ddt_bias", "weight", "bias", "dweight", "dbias"}
OF_ALL |= {f"{d}{x}" for x in ("conv_weight", "conv_bias", "norm_weight") for d in ("", "d")}


def convolution_arguments(cu_seqlens: torch.Tensor, seed: int, dtype, state_dtype, D: int = 24, W: int = 4) -> dict:
    """Those of the convolution's ops on packed sequences."""
    generator, N, T = torch.Generator().manual_seed(seed + 2), len(cu_seqlens) - 1, int(cu_seqlens[-1])
    rows = int((cu_seqlens.diff() // 64).sum())

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(cu_seqlens.device, dtype)

    windows = {x: randn(N, D, W - 1, dtype=state_dtype) for x in ("initial_state", "dht")}
    windows |= {x: randn(n, D, W - 1, dtype=state_dtype) for x, n in (("state_pool", SLOTS), ("checkpoints", rows))}
    return windows | {"x": randn(1, T, D), "dy": randn(1, T, D), "weight": randn(D, W), "bias": randn(D)}


def op_of(name: str):
    return getattr(torch.ops.flash_qla, name).default


def names_of_arguments(name: str) -> list[str]:
    """The arguments of the op, and of the ops that continue it, except those that the first op computes for them."""
    names = [x.name for x in op_of(name)._schema.arguments]
    results = {x.name for x in op_of(name)._schema.returns}
    for later in later_ops(name):
        names += [x.name for x in op_of(later)._schema.arguments if x.name not in {*results, *names}]
    return names


def later_ops(name: str) -> list[str]:
    """Those that continue after begin."""
    if not name.endswith("_begin"):
        return []
    names = (name.removesuffix("begin") + later for later in ("replay", "finish"))
    return [later for later in names if hasattr(torch.ops.flash_qla, later)]


def at_offset(x: torch.Tensor, elements: int) -> torch.Tensor:
    """The same numbers, contiguous, at a storage offset of so many elements."""
    moved = x.new_empty(x.numel() + elements)[elements:].view(x.shape)
    return moved.copy_(x)


def run(name: str, arguments: dict) -> dict[str, torch.Tensor]:
    """The op's results, and what it wrote in place, of copies; by name."""
    schema = op_of(name)._schema
    op_arguments = {x.name: arguments[x.name] for x in schema.arguments if x.name in arguments}
    in_place = {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write}
    written = {x: at_offset(op_arguments[x], op_arguments[x].storage_offset()) for x in in_place & op_arguments.keys()}
    results = op_of(name)(**op_arguments | written)
    if not isinstance(results, tuple):
        results = () if results is None else (results,)
    return {x.name: result for x, result in zip(schema.returns, results, strict=True)} | written


@dataclasses.dataclass
class Call:
    name: str
    lengths: tuple[int, ...]
    arguments: dict  # by the names of the schema

    def __call__(self) -> dict[str, torch.Tensor]:
        """The results that there are, and what was written in place, of copies; by name."""
        results = run(self.name, self.arguments)
        for later in later_ops(self.name):
            results |= run(later, self.arguments | results)
        results.pop("workspace", None)
        return {name: x for name, x in results.items() if x.shape != (0,)}

    def on(self, device) -> Call:
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in self.arguments.items()}
        return dataclasses.replace(self, arguments=moved)

    def part(self, name: str, x: torch.Tensor, n: int) -> torch.Tensor | None:
        """Sequence n's part of an argument or a result, to be read or written; None of what is all sequences'."""
        packed = "cu_seqlens" in self.arguments
        if name in BY_TOKEN and packed:
            begin = sum(self.lengths[:n])
            return x[:, begin : begin + self.lengths[n]]
        if name in BY_TOKEN | BY_SEQUENCE or (name == "h" and not packed):
            return x[n : n + 1]
        if name == "h":
            chunks = [-(-length // 64) for length in self.lengths]
            return x[:, sum(chunks[:n]) : sum(chunks[: n + 1])]
        if name in ("checkpoints", "window_checkpoints"):
            counts = [length // 64 for length in self.lengths]
            return x[sum(counts[:n]) : sum(counts[: n + 1])]
        if name == "maps":  # none of a sequence whose map is not asked for
            mapped = self.arguments["map_sequences"]
            i = mapped.index(n) if n in mapped else len(mapped)
            return x[i : i + 1]
        if name in OF_SLOTS:
            slot = self.arguments["state_indices"][n]
            return x[slot : slot + 1]
        assert name in OF_ALL or not x.is_floating_point(), name
        return None

    def permuted(self, order) -> Call:
        """The same sequences, or some of them, in another order. The pool stays as it is."""
        lengths = tuple(self.lengths[n] for n in order)
        arguments = dict(self.arguments)
        for name, x in self.arguments.items():
            if name == "cu_seqlens":
                offsets = list(itertools.accumulate(lengths, initial=0))
                arguments[name] = torch.tensor(offsets, dtype=x.dtype).to(x.device)
            elif name in BY_NUMBER:
                arguments[name] = x[list(order)]
            elif name == "map_sequences":
                arguments[name] = [order.index(n) for n in x if n in order]
            elif torch.is_tensor(x) and name not in OF_SLOTS and self.part(name, x, 0) is not None:
                along = 1 if name in BY_TOKEN and "cu_seqlens" in self.arguments else 0
                arguments[name] = torch.cat([self.part(name, x, n) for n in order], along)
        return Call(self.name, lengths, arguments)


def make_call(
    name: str, device: str, seed: int = 0, dtype=torch.bfloat16, state_dtype=torch.float32, **options
) -> Call:
    """Skips the test where the op does not run on the device. state_dtype is that of pools, `options` are a Case's."""
    schema = names_of_arguments(name)
    lengths = DECODED if name.startswith("decode") else LENGTHS
    if "cu_seqlens" not in schema:
        lengths = (1 if name.startswith("decode") else 70,) * len(LENGTHS)
    shape = {"lengths": lengths} if "cu_seqlens" in schema else {"B": len(lengths), "T": lengths[0]}
    sizes = {"H_k": 1, "H_v": 2, "K": 64, "V": 96, "dtype": dtype, "gate": "logsigmoid", "seed": seed}
    sizes["state_v_first"] = "state_v_first" not in schema or name.startswith("decode")
    case = Case(**shape | sizes | options)
    known = make_inputs(case, device) | make_gradients(case, device)
    inputs = {x: value for x, value in known.items() if x not in ("do", "dht")}
    if "g_raw" in schema:
        g_cumsum, A = run_forward(inputs, output_h=False)[:2]
        if case.use_gate_in_kernel:
            known["g_raw"] = known["g"]
        known |= {"g": g_cumsum, "A": A}
    known |= {"output_final_state": True, "output_h": True, "map_sequences": [0, 3]}
    known |= {"num_k_heads": case.H_k, "head_k_dim": case.K}
    known["mixed_qkv"] = torch.cat([known[x].flatten(2) for x in ("q", "k", "v")], -1)
    if name in CONVOLUTIONS:
        known |= convolution_arguments(known["cu_seqlens"], seed, dtype, state_dtype)
    N, generator = len(lengths), torch.Generator().manual_seed(seed + 1)
    if name in REGIONS:
        offsets = torch.arange(N + 1, device=device) if known.get("cu_seqlens") is None else known["cu_seqlens"]
        of_windows = dtype if name.startswith("decode") else state_dtype  # one kernel takes no other
        windows = convolution_arguments(offsets, seed, dtype, of_windows, known["mixed_qkv"].shape[2])
        renamed = {"weight": "conv_weight", "bias": "conv_bias", "initial_state": "initial_window", "dht": "dwindow"}
        renamed |= {"state_pool": "window_pool", "checkpoints": "window_checkpoints"}
        known |= {renamed[x]: value for x, value in windows.items() if x in renamed}
        rates = torch.randn(2, case.H_v, generator=generator).to(device)
        known |= {"mixed": known["mixed_qkv"], "a": known["g"], "b": known["beta"], "z": known["v"].flip(1)}
        known |= {"A_log": rates[0], "dt_bias": rates[1], "o": known["v"], "dy": known["do"]}
        known |= {"norm_weight": torch.randn(case.V, generator=generator).to(device)}
        window_shape = (N, max(lengths), *known["window_pool"].shape[1:])
        known |= {"intermediate_windows": torch.randn(window_shape, generator=generator).to(device, of_windows)}

    def states(*outer):
        return torch.randn(*outer, case.H_v, case.V, case.K, generator=generator).to(device, state_dtype)

    if "state_pool" in schema:
        pool = {"state_pool": states(SLOTS), "checkpoints": states(sum(x // 64 for x in lengths))}
        known = pool | known | {"state_indices": torch.tensor((7, 0, 3, 5)[:N]).to(device), "checkpoint_every": 64}
    if name.startswith("decode"):
        gates = torch.randn(2, *known["g"].shape, generator=generator).to(device)
        rates = torch.randn(2, case.H_v, generator=generator).to(device)
        known |= {"a": gates[0], "b": gates[1], "A_log": rates[0], "dt_bias": rates[1]}
        known |= {"intermediate_states": states(N, max(lengths)), "use_qk_l2norm_in_kernel": True}
        backlog = {"d_cache": (case.H_v, 4, case.V), "k_cache": (case.H_k, 4, case.K), "g_cache": (case.H_v, 4)}
        for x, shape in backlog.items():
            known[x] = 0.1 * torch.randn(SLOTS, *shape, generator=generator).to(device)
        known["g_cache"] = -known["g_cache"].abs()
        known |= {"write_pos": torch.tensor((1, 3, 0, 2)[:N]).to(device)}
        known |= {"force_flush": torch.tensor((0, 0, 1, 0)[:N]).to(device)}
    if name.startswith("gated_rms_norm"):
        known |= {"o": known["v"], "z": known["do"], "dy": known["v"].flip(1)}
        known |= {"weight": torch.randn(case.V, generator=generator).to(device)}
    call = Call(name, lengths, {x: known[x] for x in schema if known.get(x) is not None})
    try:
        call()
    except RuntimeError as error:
        if "not supported on the GPU yet" not in str(error):
            raise
        pytest.skip(f"{name} is not on the GPU yet")
    return call
