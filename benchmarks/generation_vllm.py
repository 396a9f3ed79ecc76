"""vLLM for generation.py.

default   Inductor, with full and piecewise CUDA graphs
graphs    decoding in CUDA graphs
eager     without CUDA graphs and torch.compile
prefix    as graphs, with prefix caching; prompts that come again are in the cache
ngram     as graphs, with speculative decoding from n-grams of the text. vLLM's own kernels are then its fused one for
          drafts, or those that VLLM_GDN_DECODE_KERNEL=triton asks for
mtp       the same with a Qwen3.5's own layer for drafts, whose random weights find hardly any
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from generation import (
    LOADS as LOADS,
    NEW_TOKENS as NEW_TOKENS,
    PROMPTS as PROMPTS,
    completion,
    initialize,
    model_config,
)

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Arguments of vllm.LLM
FEATURES = {
    "default": {},
    "graphs": {"compilation_config": GRAPHS},
    "eager": {"enforce_eager": True},
    "prefix": {"compilation_config": GRAPHS, "enable_prefix_caching": True},
    "ngram": {"compilation_config": GRAPHS, "speculative_config": NGRAM},
    "ngram_triton": {"compilation_config": GRAPHS, "speculative_config": NGRAM},
    "mtp": {"compilation_config": GRAPHS, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
}
# Modules of layers, and the functions and methods in them that flash_qla replaces
GDN = "vllm.model_executor.layers.mamba.gdn"
REPLACED = {
    f"{GDN}.qwen_gdn_linear_attn": (
        "QwenGatedDeltaNetAttention._forward_core_fused_norm_packed",
        "fla_chunk_gated_delta_rule",
        "fi_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ),
    f"{GDN}.olmo_gdn_linear_attn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


class Engine:
    def __init__(self, options, feature: str, ours: bool):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # calls are counted in this process
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for apply_model
        if ours or feature == "ngram_triton":
            os.environ["VLLM_GDN_DECODE_KERNEL"] = "triton"  # vLLM's fused kernel for drafts would stay in use
        import vllm

        if ours:
            from flash_qla.integrations.vllm import use_flash_qla

            use_flash_qla()
        self.version = vllm.__version__
        self._calls = {"total": 0, "flash_qla": 0}
        for path in REPLACED:
            with contextlib.suppress(ImportError):
                importlib.import_module(path)
        count_calls(self._calls)
        config = model_config(options.architecture, options.layers)
        if options.architecture != "olmo_hybrid":
            config["mamba_ssm_dtype"] = options.states
        if feature == "mtp":
            config["mtp_num_hidden_layers"] = 1
        with tempfile.TemporaryDirectory() as folder:
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
                "mamba_ssm_cache_dtype": options.states,
                "seed": 0,
            }
            self._llm = vllm.LLM(**arguments | FEATURES[feature] | json.loads(options.engine_arguments))
        self._llm.apply_model(initialize)

    def generate(self, prompts: list[list[int]], new_tokens: int, ranked: bool = False) -> list[dict]:
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=5 if ranked else None
        )
        outputs = self._llm.generate([{"prompt_token_ids": x} for x in prompts], greedy, use_tqdm=False)
        completions = []
        for request in outputs:
            [one] = request.outputs
            steps = [[x.logprob for x in step.values()] for step in one.logprobs or ()]
            completions.append(completion(one.token_ids, steps))
        return completions

    def calls(self) -> dict[str, int]:
        return dict(self._calls)


def count_calls(calls: dict[str, int]) -> None:
    """Has the layers' functions and methods count their calls: calls["total"], and calls["flash_qla"] of them. A method
    that calls a function counts too, so totals of different features cannot be compared."""
    for path, names in REPLACED.items():
        for name in names:
            *class_names, name = name.split(".")
            owner = functools.reduce(lambda x, name: getattr(x, name, None), class_names, sys.modules.get(path))
            function = getattr(owner, name, None)
            if function is None:
                continue
            # A method that wraps another one has its __module__, and globals of its own.
            module = getattr(function, "__globals__", {}).get("__name__", function.__module__)
            is_ours = module.startswith("flash_qla")

            def counted(*args, _function=function, _is_ours=is_ours, **kwargs):
                calls["total"] += 1
                calls["flash_qla"] += _is_ours
                return _function(*args, **kwargs)

            setattr(owner, name, functools.wraps(function)(counted))
