"""SGLang for generation.py, with its Triton backend for Gated DeltaNet layers.

  eager    without CUDA graphs
  graphs   decoding in CUDA graphs
  radix    eager, with the radix cache; prompts that come again are in the cache
  ngram    eager, with speculative decoding from n-grams of the text, in trees
  replay   as graphs, with --enable-linear-replayssm

flash_qla is switched on by FLASH_QLA_SGLANG=1, as a server would be; so it must be installed. SGLang's scheduler is a
process of its own. A plugin in this file gives its model random weights and counts its calls.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from generation import (
    LOADS as LOADS,
    NEW_TOKENS as NEW_TOKENS,
    PROMPTS as PROMPTS,
    completion,
    initialize,
    model_config,
)

EAGER = {"disable_cuda_graph": True}
WITHOUT_CACHE = {"disable_radix_cache": True}
GRAPHS = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 4, 8, 16, 24, 32, 48, 64], **WITHOUT_CACHE}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
# Arguments of sglang.Engine
FEATURES = {
    "eager": EAGER | WITHOUT_CACHE,
    "graphs": GRAPHS,
    "radix": EAGER,
    "ngram": EAGER | WITHOUT_CACHE | NGRAM,
    "replay": GRAPHS | {"enable_linear_replayssm": True},
}

MODULE = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
REPLACED = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_recurrent_gdn_replayssm_decode",
)
# Functions of flash_qla that the replacements call
CALLED = (
    "prefill_gated_delta_rule",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_buffered",
    "decode_gated_delta_rule_packed",
)
NOTES = "FLASH_QLA_GENERATION_NOTES"  # in the environment: the file for the counts
PLUGIN = "generation_of_flash_qla"
VISION = {  # is not called
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
    "hidden_act": "gelu_pytorch_tanh",
}


class Engine:
    def __init__(self, options, feature: str, ours: bool):
        if options.architecture != "qwen3_5":
            sys.exit(f"SGLang runs qwen3_5 here, not {options.architecture}")
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._notes = folder / "notes.json"
        os.environ[NOTES] = str(self._notes)
        os.environ["FLASH_QLA_SGLANG"] = str(int(ours))
        add_plugin(folder)
        import sglang
        from sglang.srt.entrypoints.engine import Engine as SGLang

        self.version = sglang.__version__
        text = model_config("qwen3_5", options.layers)
        text |= {"mamba_ssm_dtype": options.states, "mlp_only_layers": []}
        tokens = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": VISION | {"out_hidden_size": text["hidden_size"]},
            **tokens,
            **{name: text[name] for name in ("tie_word_embeddings", "torch_dtype", "bos_token_id", "eos_token_id")},
        }
        (folder / "config.json").write_text(json.dumps(config))
        arguments = {
            "model_path": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_multimodal": False,
            "dtype": "bfloat16",
            "mamba_ssm_dtype": options.states,
            "context_length": 4096,
            "mem_fraction_static": options.memory,
            "max_running_requests": 64,
            "chunked_prefill_size": 8192,
            "linear_attn_backend": "triton",
            "random_seed": 0,
            "log_level": "info",
        }
        self._engine = SGLang(**arguments | FEATURES[feature] | json.loads(options.engine_arguments))

    def generate(self, prompts: list[list[int]], new_tokens: int, ranked: bool = False) -> list[dict]:
        more = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": -1} if ranked else {}
        greedy = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=greedy, **more)
        completions = []
        for request in outputs:
            about, tokens = request["meta_info"], request["output_ids"]
            ranks = [[x[0] for x in step] for step in about.get("output_top_logprobs") or ()]
            completions.append(completion(tokens, ranks))
        return completions

    def calls(self) -> dict[str, int]:
        time.sleep(1)  # the scheduler writes a few times a second
        calls = json.loads(self._notes.read_text())
        return {"total": calls["flash_qla"] + calls["own"], "flash_qla": calls["flash_qla"]}


def add_plugin(folder: Path) -> None:
    """Has SGLang's processes call in_scheduler: an installed package, as far as importlib.metadata can tell."""
    about = folder / f"{PLUGIN}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = generation_sglang:in_scheduler\n")
    paths = (os.environ.get("PYTHONPATH"), str(folder), str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.append(str(folder))
    if os.environ.get("SGLANG_PLUGINS"):
        os.environ["SGLANG_PLUGINS"] += f",{PLUGIN},flash_qla"


def in_scheduler() -> None:
    """The plugin. It may be called before flash_qla's plugin or after it."""
    if multiprocessing.parent_process() is None:
        return  # the scheduler is a child
    importlib.import_module("sglang.srt.model_loader.loader").initialize_dummy_weights = initialize
    calls = {"own": 0, "flash_qla": 0}
    module = importlib.import_module(MODULE)
    for name in REPLACED:
        function = getattr(module, name, None)
        if function is not None and not function.__module__.startswith("flash_qla"):
            setattr(module, name, counted(function, calls, "own"))
    if os.environ["FLASH_QLA_SGLANG"] == "1":
        import flash_qla

        for name in CALLED:
            setattr(flash_qla, name, counted(getattr(flash_qla, name), calls, "flash_qla"))
    threading.Thread(target=write, args=(calls, Path(os.environ[NOTES])), daemon=True).start()


def counted(function, calls: dict[str, int], whose: str):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls[whose] += 1
        return function(*args, **kwargs)

    return wrapper


def write(calls: dict[str, int], path: Path) -> None:
    written = None
    while True:
        if calls != written:
            written = dict(calls)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(written))
            new.replace(path)
        time.sleep(0.2)
