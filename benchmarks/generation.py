"""Text generation by an engine with its own Gated DeltaNet kernels and with flash_qla's: the same tokens? how many a
second?

    python benchmarks/generation.py --out FILE.json
    python benchmarks/generation.py --features graphs,ngram --states bfloat16
    python benchmarks/generation.py --architecture qwen3_next --layers 8
    python benchmarks/generation.py --engine sglang --features radix,replay
    python benchmarks/generation.py --engine transformers --architecture olmo_hybrid

generation_vllm.py, generation_sglang.py and generation_transformers.py have the features and loads of an engine. The
model has random weights, the same in every process, in the shape of a Qwen3.5, a Qwen3-Next with few experts, or an
OLMo-Hybrid. Each feature runs in two processes, one after the other. Results are added to those of the same commit in
FILE.json.

Tokens: greedy ones of the same prompts, which come twice, so that a cache of prefixes has them. Random models have many
near ties, and rounding decides them. So where two runs part, the margin is the difference of the two highest
log-probabilities. Speed: prompt and new tokens a second, for each load. Calls: how often the layers called the
functions that flash_qla replaces, and how often these were flash_qla's. In CUDA graphs a call counts when it is
captured. For transformers the number of layers, and of those that flash_qla switched.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from common import add_results, killed_at_end

# The work of vLLM and SGLang, the same for both. generation_transformers.py has its own.
PROMPTS = (24, (5, 1500))  # number and lengths of the prompts whose tokens are compared
NEW_TOKENS = 32  # after each of them
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


def measure(options: argparse.Namespace, feature: str, ours: bool) -> Iterator[dict]:
    """Cells of one feature of one engine, in this process: one with tokens, and one for each load."""
    module = importlib.import_module(f"generation_{options.engine}")
    engine = module.Engine(options, feature, ours)
    about = {"package": "flash_qla" if ours else "own", "engine": options.engine, "version": engine.version}
    about |= {name: getattr(options, name) for name in ("architecture", "layers", "states")} | {"feature": feature}
    prompts = make_prompts(*module.PROMPTS, seed=7)
    engine.generate(prompts, module.NEW_TOKENS)
    yield about | {"completions": engine.generate(prompts, module.NEW_TOKENS, ranked=True)}
    for load, (count, length, new_tokens) in module.LOADS.items():
        rates = []
        for sample in range(options.samples + 1):
            # New prompts each time, or the cache of prefixes would have them.
            new_prompts = make_prompts(count, (length, length), seed=100 + sample)
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(new_prompts, new_tokens)
            torch.cuda.synchronize()
            rates.append(round(count * (length + new_tokens) / (time.perf_counter() - start), 1))
        sizes = {"load": load, "requests": count, "prompt_tokens": length, "new_tokens": new_tokens}
        yield about | sizes | {"tokens_per_s": sorted(rates[1:]), "calls": engine.calls()}  # the first one warms up


def compare(a: list[dict], b: list[dict]) -> dict:
    """How many requests have the same tokens, and the margins in a where the others part."""
    margins = []
    for x, y in zip(a, b, strict=True):
        parts = [i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t]
        margins += [x["margins"][parts[0]]] if parts else []
    return {"same": len(a) - len(margins), "of": len(a), "margins": sorted(margins)}


def report(theirs: list[dict], ours: list[dict]) -> list[dict]:
    """Prints both sides of a feature, and returns the cells to store."""
    (first, *theirs), (our_first, *ours) = theirs, ours
    same = compare(first["completions"], our_first["completions"])
    largest = f", margins up to {same['margins'][-1]}" if same["margins"] else ""
    print(f"{first['engine']} {first['version']}, {first['architecture']}, {first['states']} states, ", end="")
    print(f"{first['feature']}: the same tokens in {same['same']} of {same['of']} requests{largest}")
    for x, y in zip(theirs, ours, strict=True):
        before, now = (statistics.median(cell["tokens_per_s"]) for cell in (x, y))
        calls = "{flash_qla} of {total} calls".format(**y["calls"])
        print(f"  {x['load']}: {now:.0f} tokens/s ({calls}), own kernels {before:.0f}: {now / before:.2f} times")
    return [*theirs, *(cell | {"same_tokens": same} for cell in ours)]


def in_process(feature: str, kernels: str, limit_s: float) -> list[dict]:
    """The cells of a process, or none if it fails. What an engine starts ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "cells.json")
        # The last one of an option that is given twice counts.
        command = [sys.executable, *sys.argv, "--features", feature, "--measure", kernels, "--out", str(out)]
        with killed_at_end(subprocess.Popen(command, start_new_session=True)) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                print(f"{feature} with {kernels}: more than {limit_s:.0f} s")
        return json.loads(out.read_text()) if out.exists() else []


def add_engine_arguments(parser: argparse.ArgumentParser, layers: int, samples: int, memory: float) -> None:
    """Of the model, and of the engine that runs it."""
    parser.add_argument("--architecture", default="qwen3_5", choices=ARCHITECTURES)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--states", default="float32", help="dtype of an engine's states: float32, bfloat16")
    parser.add_argument("--samples", type=int, default=samples)
    parser.add_argument("--memory", type=float, default=memory, help="part of the GPU's memory that an engine takes")
    parser.add_argument("--engine-arguments", default="{}", metavar="JSON", help="more arguments of the engine")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm", choices=ENGINES)
    parser.add_argument("--features", help="those of the engine's file, with commas between; default: all")
    add_engine_arguments(parser, layers=16, samples=3, memory=0.5)
    parser.add_argument("--limit-s", type=float, default=600, help="seconds that a process may take")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--measure", metavar="KERNELS", choices=("own", "flash_qla"), help="run in this process")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    features = options.features or ",".join(importlib.import_module(f"generation_{options.engine}").FEATURES)
    if options.measure:
        cells = list(measure(options, features, options.measure == "flash_qla"))
        Path(options.out).write_text(json.dumps(cells))
        os._exit(0)  # engines may wait for threads of theirs
    failed = []
    for feature in features.split(","):
        theirs, ours = (in_process(feature, kernels, options.limit_s) for kernels in ("own", "flash_qla"))
        if not theirs or not ours:
            failed.append(feature)
            continue
        cells = report(theirs, ours)
        if options.out:
            key = ("package", "engine", "version", "architecture", "layers", "states", "feature", "load")
            add_results(options.out, cells, key)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
