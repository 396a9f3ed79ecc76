"""Text generation by an engine with its own Gated DeltaNet kernels and with flash_qla's: the same tokens? how many a
second?

    python benchmarks/generation.py --out FILE.json
    python benchmarks/generation.py --features prefix,ngram --states float32,bfloat16
    python benchmarks/generation.py --architecture qwen3_5,qwen3_next --layers 8
    python benchmarks/generation.py --engine sglang --features radix,replay
    python benchmarks/generation.py --engine transformers --architecture olmo_hybrid
    python benchmarks/generation.py --report FILE.json

The engine is vLLM, SGLang or transformers; generation_vllm.py, generation_sglang.py and generation_transformers.py list
its features and loads. The model has random weights, the same in every process, in the shape of a Qwen3.5, a Qwen3-Next
with few experts, or an OLMo-Hybrid. Each feature runs twice, each time in a process of its own. With --jobs 2 or more,
the two processes measure in turns, a sample each. Results are added to those in FILE.json, in place of older ones of
the same feature. If one of the two processes fails, FILE.json keeps the other one's results, and the next start
measures only what is missing.

Agreement: greedy tokens of the same prompts. Random models have many near ties, and rounding decides them. So where two
runs part, the table gives the margin: the difference of the two highest log-probabilities. The yardstick is the engine
beside itself, with the same prompts one at a time.

Speed: prompt and new tokens a second, median of --samples, for each load. With drafts, the number of tokens that a step
gives a request, 1 plus the accepted drafts, and the time of a step.

Calls: how often layers called the functions that flash_qla replaces, and how often these were flash_qla's. In CUDA
graphs a call counts when it is captured. For transformers the number of layers, and of those that flash_qla switched.

The file is long because all engines share the processes, the comparison and the results.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from common import environment

# The work of vLLM and SGLang, the same for both. generation_transformers.py has its own.
PROMPTS = (24, (5, 1500))  # number and lengths of the prompts whose tokens are compared
NEW_TOKENS = 32  # after each of them
ALONE = 8  # prompts of these that also come one at a time
LOADS = {"prefill": (32, 2048, 8), "decode": (64, 64, 128)}  # prompts, their tokens, new tokens

ENGINES = ("vllm", "sglang", "transformers")
VOCABULARY = 32000
KINDS_OF_LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 64

# Fields of config.json
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = ROPE | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
QWEN3_5 = {"attn_output_gate": True, "full_attention_interval": 4, "rope_parameters": MROPE}
ARCHITECTURES = {
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **QWEN3_5},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **QWEN3_5,
        **EXPERTS,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "rope_parameters": ROPE,
        **EXPERTS,
    },
    "olmo_hybrid": {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "linear_num_key_heads": 32,
        "linear_allow_neg_eigval": True,
    },
}


def model_config(architecture: str, layers: int) -> dict:
    """config.json of a model whose every fourth layer is attention."""
    of_layers = {"num_hidden_layers": layers, "layer_types": KINDS_OF_LAYERS[:layers]}
    return COMMON | of_layers | ARCHITECTURES[architecture]


def initialize(model: torch.nn.Module) -> None:
    """Random weights with which every layer matters, the same in every process."""
    # Norms multiply by 1 + weight, OLMo-Hybrid's by the weight.
    around_one = "Olmo" in type(model).__name__
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))

        def draw(function, parameter=parameter, generator=generator):
            return function(parameter.shape, generator=generator, device=parameter.device)

        if name.endswith("A_log"):
            value = (1 + 15 * draw(torch.rand)).log()
        elif name.endswith("dt_bias"):
            value = -5 + 3 * draw(torch.rand)
        elif "conv1d" in name:
            value = 0.5 * draw(torch.randn)
        elif parameter.dim() == 1:
            value = (around_one or name.endswith("linear_attn.norm.weight")) + 0.1 * draw(torch.randn)
        elif "embed_tokens" in name:
            value = draw(torch.randn)
        else:
            scale = 3 if "lm_head" in name else 1
            value = scale * draw(torch.randn) / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)


def make_prompts(count: int, lengths: tuple[int, int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(*lengths))] for _ in range(count)]


def completion(tokens: list[int], ranked: list[list[float]]) -> dict:
    """A request's tokens, and at each of them the margin of the two highest log-probabilities.

    Args:
        ranked: some log-probabilities at each token, the two highest among them; empty without log-probabilities.
    """
    best = [sorted(step, reverse=True)[:2] for step in ranked]
    return {"tokens": list(tokens), "margins": [round(first - second, 4) for first, second in best]}


class Turn:
    """Processes that share a card get ready side by side, and measure in turns, a sample each.

    Args:
        folder: where the processes and their parent meet; None for a process that is alone.
    """

    def __init__(self, folder: str | None):
        self._folder = folder and Path(folder)
        self._turn = 0

    def wait(self) -> None:
        """Before each sample."""
        if self._folder:
            Path(self._folder, f"ready{self._turn}").touch()
            while not Path(self._folder, f"go{self._turn}").exists():
                time.sleep(0.005)
            self._turn += 1


def end_with_parent() -> None:
    """Ends this process and those of its engine, which are a session of their own, soon after its parent has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def measure(options: argparse.Namespace, feature: str, ours: bool, turn: Turn) -> dict:
    """One feature of one engine, in this process."""
    module = importlib.import_module(f"generation_{options.engine}")
    engine = module.Engine(options, feature, ours)
    cell = {
        "engine": engine.name,
        "architecture": options.architecture,
        "layers": options.layers,
        "states": options.states,
        "feature": feature,
        "kernels": "flash_qla" if ours else "own",
    }
    prompts = make_prompts(*module.PROMPTS, seed=7)
    cell["batch"] = engine.generate(prompts, module.NEW_TOKENS, ranked=True)
    if feature in module.FROM_CACHE:
        before = engine.counts()["cached_tokens"]
        cell["again"] = engine.generate(prompts, module.NEW_TOKENS, ranked=True)
        cell["cached_tokens"] = engine.counts()["cached_tokens"] - before
    cell["alone"] = [engine.generate([x], module.NEW_TOKENS, ranked=True)[0] for x in prompts[: module.ALONE]]
    samples = {load: [] for load in module.LOADS}
    for sample in range(options.samples + 1):
        if sample:
            turn.wait()
        for load, (count, length, new_tokens) in module.LOADS.items():
            # New prompts each time, or the cache of prefixes would have them.
            given = make_prompts(count, (length, length), seed=100 + sample)
            before = engine.counts()
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(given, new_tokens)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            found = {"tokens_per_s": count * (length + new_tokens) / seconds, "seconds": seconds}
            for name, value in engine.counts().items():
                found[name] = value - before[name]
            samples[load].append(found)
    for load, found in samples.items():
        sizes = dict(zip(("requests", "prompt_tokens", "new_tokens"), module.LOADS[load], strict=True))
        cell[load] = {"load": sizes, **of_samples(found[1:])}  # the first one warms up
    cell["calls"] = engine.calls()
    return cell


def of_samples(samples: list[dict]) -> dict:
    """The rates in order; if the engine counts steps, tokens of a request a step, and the mean time of a step."""
    found = {"tokens_per_s": sorted(round(x["tokens_per_s"], 1) for x in samples)}
    total = {name: sum(x.get(name, 0) for x in samples) for name in ("seconds", "steps", "request_steps", "new_tokens")}
    if total["steps"]:
        found["ms_per_step"] = round(1e3 * total["seconds"] / total["steps"], 4)
    if total["request_steps"]:
        found["tokens_per_request_step"] = round(total["new_tokens"] / total["request_steps"], 4)
    return found


def compare(a: list[dict], b: list[dict]) -> dict:
    """How many requests have the same tokens, and the margins in a where the others part."""
    margins = []
    for x, y in zip(a, b, strict=False):
        parts = [i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t]
        margins += [x["margins"][parts[0]]] if parts else []
    count = min(len(a), len(b))
    return {"same": count - len(margins), "of": count, "margins": sorted(margins)}


def loads_of(cell: dict) -> list[str]:
    return [name for name, x in cell.items() if isinstance(x, dict) and ("tokens_per_s" in x or "own" in x)]


def pair_of(own: dict, ours: dict) -> dict:
    """What the report and the stored results keep of a feature's two runs."""
    cell = {name: own[name] for name in ("engine", "architecture", "layers", "states", "feature")}
    cell["calls"] = ours["calls"]
    cell["agreement"] = compare(own["batch"], ours["batch"])
    cell["yardstick"] = compare(own["alone"], own["batch"])
    cell["alone"] = compare(ours["alone"], ours["batch"])
    if "again" in ours:
        cell["from_cache"] = compare(ours["batch"], ours["again"]) | {"cached_tokens": ours["cached_tokens"]}
        cell["yardstick_from_cache"] = compare(own["batch"], own["again"])
    for load in loads_of(own):
        cell[load] = {"load": own[load].pop("load", None), "own": own[load], "flash_qla": ours[load]}
        cell[load]["flash_qla"].pop("load", None)
    return cell


def text_of(found: dict) -> str:
    worst = f", margins up to {found['margins'][-1]}" if found["margins"] else ""
    return f"{found['same']} of {found['of']}{worst}"


def report(cells: list[dict]) -> None:
    for cell in cells:
        print(f"{cell['engine']}, {cell['architecture']}, {cell['states']} states, {cell['feature']}:")
        print(f"  calls of flash_qla: {cell['calls']['flash_qla']} of {cell['calls']['total']}")
        print(f"  same tokens as the engine's own kernels: {text_of(cell['agreement'])}")
        print(f"  one at a time: flash_qla {text_of(cell['alone'])}; own kernels {text_of(cell['yardstick'])}")
        if "from_cache" in cell:
            cached = cell["from_cache"]["cached_tokens"]
            print(f"  from the cache ({cached} tokens): flash_qla {text_of(cell['from_cache'])}; "
                  f"own kernels {text_of(cell['yardstick_from_cache'])}")  # fmt: skip
        for load in loads_of(cell):
            both = cell[load]
            own, ours = (statistics.median(both[x]["tokens_per_s"]) for x in ("own", "flash_qla"))
            rates = both["flash_qla"]["tokens_per_s"]
            spread = f"{rates[0]:.0f} to {rates[-1]:.0f}"
            print(f"  {load}: {ours:.0f} tokens/s ({spread}), own kernels {own:.0f}: {ours / own:.2f} times")
            for name, what in (("tokens_per_request_step", "tokens a step of a request"), ("ms_per_step", "ms a step")):
                if name in both["own"] and name in both["flash_qla"]:
                    print(f"    {what}: {both['flash_qla'][name]}, own kernels {both['own'][name]}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm", choices=ENGINES)
    parser.add_argument("--features", help="those of the engine's file, with commas between; default: all")
    parser.add_argument("--architecture", default="qwen3_5", help=", ".join(ARCHITECTURES))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--states", default="float32", help="dtype of an engine's states: float32, bfloat16")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.5, help="part of the GPU's memory that the engine takes")
    parser.add_argument("--engine-arguments", default="{}", metavar="JSON", help="more arguments of the engine")
    parser.add_argument("--own-arguments", default="{}", metavar="JSON", help="the same for its own kernels alone")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that get ready at the same time; they measure in turns"
    )
    parser.add_argument(
        "--lock", metavar="FILE", help="runs of this script on one card with the same file measure in turns as well"
    )
    parser.add_argument(
        "--limit-s", type=float, default=600, help="seconds that a process may take to get ready, and for each sample"
    )
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--report", metavar="FILE", help="print this file's results")
    parser.add_argument("--measure", metavar="KERNELS", choices=("own", "flash_qla"), help="run in this process")
    parser.add_argument("--turn", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


class Run:
    """A process that measures a feature with the engine's own kernels or with flash_qla's.

    Args:
        what: architecture, dtype of the states, feature.
    """

    def __init__(self, what: tuple[str, str, str], kernels: str, limit_s: float):
        self._name, self._limit_s = f"{', '.join(what)} with {kernels}", limit_s
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._log = (Path(self._folder.name, name) for name in ("out.json", "log"))
        # The last one of an option that is given twice counts.
        of_this = zip(("--architecture", "--states", "--features"), what, strict=True)
        command = [sys.executable, *sys.argv, *itertools.chain(*of_this), "--measure", kernels, "--out", self._out]
        self._begin = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(x) for x in (*command, "--turn", self._folder.name)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # engines have processes of their own, which end with this one
            )

    def get_ready(self) -> None:
        self._wait_for("ready0")

    def measure(self, sample: int) -> None:
        """Has the process measure this sample, counted from 0."""
        self._begin = time.monotonic()
        Path(self._folder.name, f"go{sample}").touch()
        self._wait_for(f"ready{sample + 1}")

    def result(self) -> dict | None:
        """The results after the last sample, or None if it fails."""
        while self._is_running():
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        cell = json.loads(self._out.read_text()) if status == 0 and self._out.exists() else None
        if cell is None:
            print("\n".join(self._log.read_text(errors="replace").splitlines()[-40:]))
            print(f"{self._name}: exit status {status}", flush=True)
        self._folder.cleanup()
        return cell

    def _wait_for(self, name: str) -> None:
        while not Path(self._folder.name, name).exists() and self._is_running():
            time.sleep(0.005)

    def _is_running(self) -> bool:
        """Ends the process if it takes too long."""
        if self._process.poll() is None and time.monotonic() - self._begin > self._limit_s:
            print(f"{self._name}: more than {self._limit_s:.0f} s", flush=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.poll() is None


@contextlib.contextmanager
def holding(lock: str | None, how: int):
    """One run of this script measures (LOCK_EX) while none gets ready (LOCK_SH)."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, how)
        yield


def results_of(waiting: list[tuple], options: argparse.Namespace) -> Iterator[tuple]:
    """(what, kernels, the results or None) of each (what, kernels); the two of a feature measure in turns."""
    while waiting:
        together, waiting = waiting[: options.jobs], waiting[options.jobs :]
        with holding(options.lock, fcntl.LOCK_SH):
            runs = [Run(*one, options.limit_s) for one in together]
            for run in runs:
                run.get_ready()
        for what, pair in itertools.groupby(zip(together, runs, strict=True), key=lambda x: x[0][0]):
            pair = [(kernels, run) for (_, kernels), run in pair]
            with holding(options.lock, fcntl.LOCK_EX):
                for sample, (_, run) in itertools.product(range(options.samples), pair):
                    run.measure(sample)
                results = [(what, kernels, run.result()) for kernels, run in pair]
            yield from results


class Results:
    """Pairs of runs, and runs that wait for the other one of their pair; in a file, if there is one."""

    def __init__(self, out: str | None):
        self._out = out and Path(out)
        found = json.loads(self._out.read_text()) if out and self._out.exists() else {}
        self.cells, self._halves = found.get("cells", []), found.get("halves", [])
        self._environment = found.get("environment")

    def has_half(self, engine: str, what: tuple[str, str, str], layers: int, kernels: str) -> bool:
        return any(
            x["engine"].lower().startswith(engine)
            and (x["architecture"], x["states"], x["feature"], x["layers"], x["kernels"]) == (*what, layers, kernels)
            for x in self._halves
        )

    def add(self, run: dict) -> dict | None:
        """The pair, if this run completes one."""
        self._renew_environment()
        cell, key = None, key_of(run)
        pair = {x["kernels"]: x for x in (*self._halves, run) if key_of(x) == key}
        self._halves = [x for x in self._halves if key_of(x) != key]
        if len(pair) == 2:
            cell = pair_of(pair["own"], pair["flash_qla"])
            self.cells = [x for x in self.cells if key_of(x) != key] + [cell]
        else:
            self._halves.append(run)
        if self._out:
            stored = {"environment": self._environment, "cells": self.cells}
            self._out.write_text(
                json.dumps(stored | {"halves": self._halves} if self._halves else stored, indent=1) + "\n"
            )
        return cell

    def _renew_environment(self) -> None:
        """This machine's. Cells from another machine, commit or day keep theirs."""
        before, self._environment = self._environment, environment()
        if before and any(before.get(name) != now for name, now in self._environment.items() if name != "time"):
            for cell in self.cells:
                cell.setdefault("environment", before)


def key_of(cell: dict) -> tuple:
    return tuple(cell[name] for name in ("engine", "architecture", "layers", "states", "feature"))


def main() -> None:
    options = make_parser().parse_args()
    if options.report:
        report(json.loads(Path(options.report).read_text())["cells"])
        return
    module = importlib.import_module(f"generation_{options.engine}")
    features = options.features.split(",") if options.features else list(module.FEATURES)
    if options.measure:
        if options.turn:
            end_with_parent()
        [feature] = features
        cell = measure(options, feature, options.measure == "flash_qla", Turn(options.turn))
        Path(options.out).write_text(json.dumps(cell))
        os._exit(0)  # engines may wait for threads of theirs
    results, failed = Results(options.out), []
    waiting = []
    for what in itertools.product(options.architecture.split(","), options.states.split(","), features):
        waiting += [
            (what, kernels)
            for kernels in ("own", "flash_qla")
            if not results.has_half(options.engine, what, options.layers, kernels)
        ]
    for what, kernels, run in results_of(waiting, options):
        if run is None:
            failed.append(f"{', '.join(what)} with {kernels}")
        elif cell := results.add(run):
            report([cell])
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
