"""Layers of a Qwen3.5 in transformers with flash_qla and with FLA: tokens a second of a training step and of a prefill.

    python benchmarks/layers.py --out FILE.json
    python benchmarks/layers.py --sequences 1x8192 --packages flash_qla

The model has random weights, the sizes of a Qwen3.5's layers, every fourth one of which is attention, and a small
vocabulary. It runs eagerly in bf16.

  region   of flash_qla: after use_flash_qla(model), whose layers run as one op
  parts    of flash_qla: the same with a hook on each convolution, so that its parts run one by one; of FLA the model as
           it is, with the functions that transformers takes from FLA

A step is the forward, the loss of each next token, and the backward, without an optimizer. A prefill has a cache. Times
are medians over calls; `peak_bytes` is the most memory that PyTorch's allocator had at once in a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator

import common
import torch

FUNCTIONS = {"flash_qla": ("region", "parts"), "fla": ("parts",)}
VOCABULARY = 256


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    H_k, H_v = common.parse_heads(options.heads)[0]
    K, V = options.head_dims
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(options.layers)],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=options.hidden // 8,
        linear_num_key_heads=H_k,
        linear_num_value_heads=H_v,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
    )
    return transformers.Qwen3_5ForCausalLM(config).to(common.DEVICE, torch.bfloat16)


def switch(model: torch.nn.Module, package: str, function: str) -> None:
    """Has the model run a function of a package."""
    if package == "fla":
        if importlib.util.find_spec("fla") is None:
            raise RuntimeError("flash-linear-attention is not installed: the model would run plain torch")
        return
    from flash_qla.integrations.transformers import use_flash_qla

    use_flash_qla(model)
    if function == "parts":
        for layer in model.modules():
            if type(layer).__name__.endswith("GatedDeltaNet"):
                layer.conv1d.register_forward_hook(lambda *arguments: None)


def times(call: Callable, samples: int) -> list[float]:
    """Milliseconds of each of `samples` calls, after two others."""
    milliseconds = []
    for _ in range(samples + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return sorted(milliseconds[2:])


def measure(package: str, options) -> Iterator[dict]:
    for function in FUNCTIONS[package]:
        model = build_model(options)
        switch(model, package, function)
        for sequences in options.sequences.split(","):
            lengths = common.parse_lengths(sequences)
            if len({*lengths}) > 1:
                raise ValueError(f"{sequences} has sequences of different lengths, expected rows of a batch")
            tokens = torch.randint(VOCABULARY, (len(lengths), lengths[0]), device=common.DEVICE)

            def step(model=model, tokens=tokens):
                model(tokens, labels=tokens, use_cache=False).loss.backward()
                model.zero_grad()

            @torch.no_grad()
            def prefill(model=model, tokens=tokens):
                model(tokens, use_cache=True, logits_to_keep=1)

            cell = {"package": package, "function": function, "heads": options.heads, "sequences": sequences}
            for name, call in (("step", step), ("prefill", prefill)):
                (model.train if name == "step" else model.eval)()
                ms = statistics.median(times(call, options.samples))
                cell |= {f"{name}_ms": ms, f"{name}_tokens_s": 1e3 * tokens.numel() / ms}
            model.train()
            cell["peak_bytes"] = common.workspace(step)[1]
            yield cell


def report(cells: list[dict]) -> None:
    for cell in cells:
        figures = (
            f"{name} {cell[f'{name}_ms']:8.2f} ms {cell[f'{name}_tokens_s']:9.0f}/s" for name in ("step", "prefill")
        )
        name = "{package} {function} {sequences}".format_map(cell)
        print(f"{name:>28} {'  '.join(figures)}  {cell['peak_bytes'] / 2**30:6.2f} GiB")
    for name in ("step_ms", "prefill_ms"):
        print(name)
        common.print_comparison(cells, name, lambda x: (x["heads"], x["sequences"]))


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16x32", help="query/key x value heads of a linear layer")
    common.add_head_dims_argument(parser)
    parser.add_argument("--sequences", default="1x8192,4096x8", help="rows of a batch: 4096x8 are eight of 4096 tokens")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--samples", type=int, default=10)
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report, common.FLA_BACKWARD)
