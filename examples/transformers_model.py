"""Hugging Face Qwen3-Next, Qwen3.5 and OLMo-Hybrid models with flash_qla as their Gated DeltaNet kernel.

    python examples/transformers_model.py [--model qwen3_next|qwen3_5|qwen3_5_moe|olmo_hybrid|all]
        [--device cpu|cuda] [--dtype fp32|bf16|fp16] [--tokens N] [--file PATH]

Builds small models (random weights, linear-attention heads of the released models' sizes) and runs them over the
bytes of a text file; each byte is a token. Compares flash_qla with the model's own torch implementation: the errors of
the model's outputs, and tokens per second of prefill and of decoding. Then both decode token by token after their
prefill.
"""

import argparse
import inspect
import math
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # The model would use flash-linear-attention, if installed, instead of plain torch.
    sys.modules["fla"] = None

import torch
import transformers

from flash_qla.integrations.transformers import use_flash_qla

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "initializer_range": 0.05,
}
# Every expert is used for every token: a top-k choice would turn a rounding difference between two
# implementations into a different expert, and the comparison into one of experts.
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
# OLMo-Hybrid-7B's layers: as many key heads as value heads, and betas up to 2, for negative eigenvalues
OLMO = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
    "linear_allow_neg_eigval": True,
    "pad_token_id": None,  # by default this and the next are beyond the vocabulary
    "eos_token_id": None,
}
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", SIZES | EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", SIZES),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", SIZES | EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", SIZES | OLMO),
}


def build_model(name, device="cpu", dtype=torch.float32, **changes):
    """A small random model of SIZES with `changes`, whose linear layers remember 10 to 1000 tokens."""
    model_class, config_class, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes | changes)
    model = getattr(transformers, model_class)(config)
    for layer in model.modules():
        if hasattr(layer, "dt_bias"):
            # Most heads forget everything within a token as transformers initializes them, and then there is no
            # state to compare.
            step = torch.empty_like(layer.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp_()
            layer.dt_bias.data.copy_(step.expm1().log())
            layer.A_log.data.zero_()
    return model.to(device, dtype).eval()


def relative_error(x, reference):
    """|x - reference| / |reference| in the Euclidean norm."""
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm()).item()


def recurrent_states(cache):
    """The recurrent states of all linear layers, one after the other."""
    states = []
    for layer in cache.layers:
        state = getattr(layer, "recurrent_states", None)
        if state is not None:  # a tensor in older releases, a dict of tensors in newer ones
            states += state.values() if isinstance(state, dict) else [state]
    return torch.cat([state.flatten() for state in states])


def prefill(model, tokens):
    """The model's output for `tokens`, with its cache, and the seconds that the call took."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = model(tokens, use_cache=True, output_hidden_states=True)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return out, time.perf_counter() - start


def name_of_cache(model):
    """The argument and the output of the model that hold its cache: `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(model, out):
    return getattr(out, name_of_cache(model))


def continued(model, cache, tokens):
    """The model's output for `tokens` after those in `cache`."""
    return model(tokens, use_cache=True, **{name_of_cache(model): cache})


def decode(model, cache, tokens):
    """Logits of `tokens`, fed one at a time after those in `cache`."""
    steps = [continued(model, cache, t).logits for t in tokens.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def greedy(model, out, count):
    """Logits of `count` tokens after the prefill `out`, each token the most likely one."""
    logits = [out.logits[:, -1:]]
    while len(logits) < count:
        out = continued(model, cache_of(model, out), logits[-1].argmax(-1))
        logits.append(out.logits[:, -1:])
    return torch.cat(logits, dim=1)


def print_greedy(reference, logits):
    """The number of equal tokens and, if they then differ, how near to a tie the choice was."""
    same = int((reference.argmax(-1) == logits.argmax(-1)).int().cumprod(-1).sum())
    count = reference.shape[1]
    print(f"  {'same greedy tokens':38}{'':12}{f'{same} of {count}':>12}")
    if same < count:
        best, second = reference[0, same].float().topk(2).values.tolist()
        difference = (reference[0, same] - logits[0, same]).abs().max().item()
        print(
            f"    there torch's best two logits are {best - second:.1e} apart, logits differ by up to {difference:.1e}"
        )


def run(model, prompt, rest):
    """The model's outputs for the prompt and the rest, the logits of the text that it writes, and the tokens per second
    of prefill and of decoding."""
    out, first = prefill(model, prompt)
    values = {
        "last hidden state": out.hidden_states[-1],
        "logits": out.logits,
        "recurrent states": recurrent_states(cache_of(model, out)),
        "logits, decoding the rest": decode(model, cache_of(model, out), rest),
    }
    longer, _ = prefill(model, torch.cat([prompt, rest], dim=1))
    values["logits, one prefill with the rest"] = longer.logits[:, -rest.shape[1] :]
    out, second = prefill(model, prompt)
    start = time.perf_counter()
    written = greedy(model, out, rest.shape[1])
    if written.is_cuda:
        torch.cuda.synchronize()
    decoding = (rest.shape[1] - 1) / (time.perf_counter() - start)
    return values, written, (prompt.numel() / min(first, second), decoding)


@torch.no_grad()
def compare(name, device, dtype, text, new_tokens):
    model = build_model(name, device, dtype)
    tokens = torch.tensor([list(text)], device=device)
    inputs = tokens[:, :-new_tokens], tokens[:, -new_tokens:]

    prefill(model, inputs[0])  # the first call of a process also loads and allocates
    torch_values, torch_written, torch_speed = run(model, *inputs)
    with use_flash_qla(model) as switched:
        our_values, our_written, our_speed = run(model, *inputs)
        linear_layers = len(switched.layers)

    print(f"\n{type(model).__name__}: {linear_layers} linear of {len(model.model.layers)} layers, {dtype}")
    print(f"{'':40}{'torch':>12}{'flash_qla':>12}")
    for phase, theirs, ours in zip(("prefill", "decoding"), torch_speed, our_speed, strict=True):
        print(f"{phase + ', tokens per second':40}{theirs:12.0f}{ours:12.0f}")
    print("relative L2 error against torch")
    for key, value in our_values.items():
        print(f"  {key:38}{'':12}{relative_error(value, torch_values[key]):12.1e}")
    if dtype != torch.float32:
        exact_values, _, _ = run(model.float(), *inputs)
        print("relative L2 error against torch with the same weights in fp32")
        for key, exact in exact_values.items():
            errors = [relative_error(values[key], exact) for values in (torch_values, our_values)]
            print(f"  {key:38}{errors[0]:12.1e}{errors[1]:12.1e}")
    print("decoding token by token against one prefill")
    errors = [
        relative_error(v["logits, decoding the rest"], v["logits, one prefill with the rest"])
        for v in (torch_values, our_values)
    ]
    print(f"  {'logits':38}{errors[0]:12.1e}{errors[1]:12.1e}")
    print_greedy(torch_written, our_written)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser.add_argument("--device", default="cuda" if hopper else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--tokens", type=int, help="prompt length; default: 512 on a CPU, else 8192")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to decode")
    parser.add_argument("--file", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args()

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no CUDA device")
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    prompt_length = args.tokens or (512 if device.type == "cpu" else 8192)
    length = prompt_length + args.new_tokens
    text = args.file.read_bytes()[:length]
    if len(text) < length:
        parser.error(f"{args.file} has {len(text)} bytes, --tokens and --new-tokens need {length}")
    transformers.logging.set_verbosity_error()  # its warning about plain torch does not matter here
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    print(f"device: {where}{threads}; torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"text: {prompt_length} + {args.new_tokens} bytes of {args.file}")
    for name in MODELS if args.model == "all" else [args.model]:
        compare(name, device, dtype, text, args.new_tokens)


if __name__ == "__main__":
    main()
