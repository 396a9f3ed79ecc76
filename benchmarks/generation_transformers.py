"""transformers' generate() for generation.py.

  eager      with a dynamic cache
  compiled   with a static cache, whose steps transformers compiles to CUDA graphs

A model's own functions are those of transformers: FLA's and causal-conv1d's if installed, otherwise plain torch.
"""

from __future__ import annotations

import importlib.util
import json

import torch
from generation import completion, initialize, model_config

FEATURES = {"eager": {}, "compiled": {"cache_implementation": "static"}}  # arguments of generate()
PROMPTS = (16, (512, 512))  # number and lengths of the prompts whose tokens are compared
NEW_TOKENS = 128
LOADS = {"batch 1": (1, 512, 128), "batch 16": (16, 512, 128)}  # prompts, their tokens, new tokens


class Engine:
    def __init__(self, options, feature: str, ours: bool):
        import transformers

        installed = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
        self.version = " with ".join([transformers.__version__, *installed])
        fields = model_config(options.architecture, options.layers)
        fields |= json.loads(options.engine_arguments)
        model_class = getattr(transformers, fields.pop("architectures")[0])
        fields.pop("model_type")
        dtype = getattr(torch, fields.pop("torch_dtype"))
        config = model_class.config_class(**fields)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            self._model = model_class(config).to(dtype).eval()
        initialize(self._model)
        self._model.generation_config.eos_token_id = None
        switched = []
        if ours:
            from flash_qla.integrations.transformers import use_flash_qla

            switched = use_flash_qla(self._model).layers
        kinds = fields["layer_types"]
        self._calls = {"total": kinds.count("linear_attention"), "flash_qla": len(switched)}
        self._options = FEATURES[feature]
        if feature == "compiled":
            self._options = self._options | {"compile_config": transformers.CompileConfig(dynamic=False)}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int, ranked: bool = False) -> list[dict]:
        tokens = torch.tensor(prompts, device=self._model.device)
        out = self._model.generate(
            tokens, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
            output_logits=ranked, return_dict_in_generate=True, **self._options,
        )  # fmt: skip
        new = out.sequences[:, tokens.shape[1] :].tolist()
        ranks = [[] for _ in prompts]
        if ranked:
            best = torch.stack([x.float().log_softmax(-1).topk(2).values for x in out.logits], 1)  # [prompts, T, 2]
            ranks = best.tolist()
        return [completion(*of_one) for of_one in zip(new, ranks, strict=True)]

    def calls(self) -> dict[str, int]:
        return self._calls
