"""Text generation by vLLM with its own Gated DeltaNet kernels and with flash_qla's: the same tokens? how many a second?

    python benchmarks/generation.py --out FILE.json
    python benchmarks/generation.py --features prefix,ngram --states bfloat16
    python benchmarks/generation.py --architecture qwen3_next --layers 8
    python benchmarks/generation.py --report FILE.json

The model has random weights, the same in every process, in the shape of a Qwen3.5, a Qwen3-Next with few experts, or an
OLMo-Hybrid. Each feature runs twice, each time in a process of its own:

  eager     without CUDA graphs and torch.compile
  graphs    decoding in CUDA graphs
  default   vLLM's default: Inductor, with full and piecewise CUDA graphs
  prefix    eager, with prefix caching; prompts come twice, the second time from the cache
  ngram     eager, with speculative decoding from n-grams of the text

Agreement: greedy tokens of 24 prompts of 5 to 1500 tokens. Random models have many near ties, and rounding decides
them. So where two runs part, the table gives the margin: the difference of the two highest log-probabilities. The
yardstick is the engine beside itself, with the same prompts one at a time.

Speed: prompt and new tokens a second, median of --samples, for two loads. "prefill" has 32 prompts of 2048 tokens and 8
new tokens each, "decode" 64 prompts of 64 tokens and 256 new tokens each.

Calls: how often layers called the functions that flash_qla replaces, and how often these were flash_qla's. In CUDA
graphs a call counts when it is captured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from pathlib import Path

import torch
from common import environment

VOCABULARY = 32000
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Arguments of vllm.LLM
FEATURES = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": GRAPHS},
    "default": {},
    "prefix": {"enforce_eager": True, "enable_prefix_caching": True},
    "ngram": {"enforce_eager": True, "speculative_config": NGRAM},
}
LOADS = {"prefill": (32, 2048, 8), "decode": (64, 64, 256)}  # prompts, their tokens, new tokens
NEW_TOKENS = 32  # of the prompts whose tokens are compared
ALONE = 8  # prompts that also come one at a time

# vLLM's modules of layers, and the functions in them that flash_qla replaces
GDN = "vllm.model_executor.layers.mamba.gdn"
REPLACED = {
    f"{GDN}.qwen_gdn_linear_attn": (
        "fla_chunk_gated_delta_rule",
        "fi_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ),
    f"{GDN}.olmo_gdn_linear_attn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


def model_config(architecture: str, layers: int, states: str) -> dict:
    """config.json of a model whose every fourth layer is attention."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * layers
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
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
        "layer_types": kinds[:layers],
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    own = {
        "qwen3_5": {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": states,
            "rope_parameters": rope,
        },
        "qwen3_next": {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "full_attention_interval": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "rope_parameters": rope,
        },
        "olmo_hybrid": {
            "architectures": ["OlmoHybridForCausalLM"],
            "model_type": "olmo_hybrid",
            "linear_num_key_heads": 32,
            "linear_allow_neg_eigval": True,
        },
    }
    return common | own[architecture]


def initialize(model: torch.nn.Module) -> None:
    """Random weights with which every layer matters, the same in every process."""
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
            around = 1 if name.endswith("linear_attn.norm.weight") else 0  # the other norms multiply by 1 + weight
            value = around + 0.1 * draw(torch.randn)
        elif "embed_tokens" in name:
            value = draw(torch.randn)
        else:
            scale = 3 if "lm_head" in name else 1
            value = scale * draw(torch.randn) / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)


def make_prompts(count: int, lengths: tuple[int, int], seed: int) -> list[dict]:
    draw = random.Random(seed)
    return [
        {"prompt_token_ids": [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(*lengths))]}
        for _ in range(count)
    ]


def count_calls(calls: dict[str, int]) -> None:
    """Has the layers' functions count their calls: calls["total"], and calls["flash_qla"] of them."""
    for path, names in REPLACED.items():
        module = sys.modules.get(path)
        for name in names:
            function = getattr(module, name, None)
            if function is None:
                continue

            def counted(*args, _function=function, **kwargs):
                calls["total"] += 1
                calls["flash_qla"] += _function.__module__.startswith("flash_qla")
                return _function(*args, **kwargs)

            setattr(module, name, functools.wraps(function)(counted))


def generate(llm, prompts: list[dict], new_tokens: int, logprobs: int | None = None) -> list:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return llm.generate(prompts, greedy, use_tqdm=False)


def tokens_of(outputs: list) -> list[dict]:
    """Of each request: the tokens, and at each of them the margin of the two highest log-probabilities."""
    found = []
    for request in outputs:
        [completion] = request.outputs
        ranked = [sorted((x.logprob for x in step.values()), reverse=True) for step in completion.logprobs]
        margins = [best - second for best, second, *_ in ranked]
        found.append({"tokens": list(completion.token_ids), "margins": margins})
    return found


def measure(options: argparse.Namespace, feature: str, ours: bool) -> dict:
    """One feature of one engine, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # calls are counted in this process
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for apply_model
    if feature == "ngram":
        os.environ["VLLM_GDN_DECODE_KERNEL"] = "triton"  # its fused kernel for drafts stays with vLLM
    import vllm

    if ours:
        from flash_qla.integrations.vllm import use_flash_qla

        use_flash_qla()
    with tempfile.TemporaryDirectory() as folder:
        config = model_config(options.architecture, options.layers, options.states)
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 64,
            "gpu_memory_utilization": options.memory,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        calls = {"total": 0, "flash_qla": 0}
        for path in REPLACED:
            import_if_there(path)
        count_calls(calls)
        for given in (options.engine_arguments, "{}" if ours else options.own_arguments):
            arguments |= json.loads(given)
        llm = vllm.LLM(**arguments | FEATURES[feature])
    llm.apply_model(initialize)
    cell = {
        "engine": f"vLLM {vllm.__version__}",
        "architecture": options.architecture,
        "states": options.states,
        "feature": feature,
        "kernels": "flash_qla" if ours else "vLLM",
    }
    prompts = make_prompts(24, (5, 1500), seed=7)
    cell["batch"] = tokens_of(generate(llm, prompts, NEW_TOKENS, logprobs=5))
    if feature == "prefix":
        again = generate(llm, prompts, NEW_TOKENS, logprobs=5)
        cell["again"] = tokens_of(again)
        cell["cached_tokens"] = sum(x.num_cached_tokens or 0 for x in again)
    cell["alone"] = [tokens_of(generate(llm, [x], NEW_TOKENS, logprobs=5))[0] for x in prompts[:ALONE]]
    for load, (count, length, new_tokens) in LOADS.items():
        rates = []
        for sample in range(options.samples + 1):
            # New prompts each time, or the cache of prefixes would have them.
            given = make_prompts(count, (length, length), seed=100 + sample)
            torch.cuda.synchronize()
            start = time.perf_counter()
            generate(llm, given, new_tokens)
            torch.cuda.synchronize()
            rates.append(count * (length + new_tokens) / (time.perf_counter() - start))
        cell[load] = sorted(rates[1:])  # the first one warms up
    cell["calls"] = calls
    return cell


def import_if_there(path: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(path)


def compare(a: list[dict], b: list[dict]) -> dict:
    """How many requests have the same tokens, and the margins in a where the others part."""
    margins = []
    for x, y in zip(a, b, strict=False):
        parts = [i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t]
        margins += [round(x["margins"][parts[0]], 4)] if parts else []
    count = min(len(a), len(b))
    return {"same": count - len(margins), "of": count, "margins": sorted(margins)}


def pair_of(own: dict, ours: dict) -> dict:
    """What the report and the stored results keep of a feature's two runs."""
    cell = {name: own[name] for name in ("engine", "architecture", "states", "feature")}
    cell["calls"] = ours["calls"]
    cell["agreement"] = compare(own["batch"], ours["batch"])
    cell["yardstick"] = compare(own["alone"], own["batch"])
    cell["alone"] = compare(ours["alone"], ours["batch"])
    if "again" in ours:
        cell["from_cache"] = compare(ours["batch"], ours["again"]) | {"cached_tokens": ours["cached_tokens"]}
        cell["yardstick_from_cache"] = compare(own["batch"], own["again"])
    for load in LOADS:
        cell[load] = {"own": own[load], "flash_qla": ours[load]}
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
        for load in LOADS:
            own, ours = (statistics.median(cell[load][x]) for x in ("own", "flash_qla"))
            spread = " to ".join(f"{x:.0f}" for x in (cell[load]["flash_qla"][0], cell[load]["flash_qla"][-1]))
            print(f"  {load}: {ours:.0f} tokens/s ({spread}), own kernels {own:.0f}: {ours / own:.2f} times")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", default="default,graphs,eager,prefix,ngram", help=", ".join(FEATURES))
    parser.add_argument("--architecture", default="qwen3_5", choices=("qwen3_5", "qwen3_next", "olmo_hybrid"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--states", default="float32", choices=("float32", "bfloat16"), help="dtype of Qwen3.5's states"
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.5, help="part of the GPU's memory that the engine takes")
    parser.add_argument("--engine-arguments", default="{}", metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--own-arguments", default="{}", metavar="JSON", help="the same for its own kernels alone")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds that a process may take")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--report", metavar="FILE", help="print this file's results")
    parser.add_argument("--measure", metavar="KERNELS", choices=("own", "flash_qla"), help="run in this process")
    return parser


def in_process(options: argparse.Namespace, feature: str, kernels: str) -> dict | None:
    """The results of a process, or None if it fails. Its output goes to the terminal."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as part:
        # The last one of an option that is given twice counts.
        command = [sys.executable, *sys.argv, "--features", feature, "--measure", kernels, "--out", part.name]
        try:
            subprocess.run(command, check=True, timeout=options.limit_s)
        except subprocess.CalledProcessError as error:
            print(f"{feature} with {kernels}: exit status {error.returncode}")
            return None
        except subprocess.TimeoutExpired:
            print(f"{feature} with {kernels}: more than {options.limit_s:.0f} s")
            return None
        return json.load(part)


def main() -> None:
    options = make_parser().parse_args()
    if options.report:
        report(json.loads(Path(options.report).read_text())["cells"])
        return
    features = options.features.split(",")
    if options.measure:
        [feature] = features
        cell = measure(options, feature, options.measure == "flash_qla")
        Path(options.out).write_text(json.dumps(cell))
        os._exit(0)  # engines may wait for threads of theirs
    cells, failed = [], []
    for feature in features:
        runs = [in_process(options, feature, kernels) for kernels in ("own", "flash_qla")]
        if None in runs:
            failed.append(feature)
            continue
        cells.append(pair_of(*runs))
        report(cells[-1:])
        if options.out:
            Path(options.out).write_text(json.dumps({"environment": environment(), "cells": cells}, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
