"""Train a small Qwen3-Next on a text file, with flash_qla and with the model's own torch implementation.

    python examples/train.py [--device cpu|cuda] [--dtype fp32|bf16] [--steps N] [--file PATH] [--out FOLDER]
    python examples/train.py --model fla [--dtype bf16] [--steps N] [--file PATH] [--out FOLDER]
    python examples/train.py --plot FOLDER/train.json
    torchrun --standalone --nproc-per-node W examples/train.py [--context-ranks C] [--length TOKENS] [...]

The model (random weights; Gated DeltaNet and full-attention layers, linear heads of size 128, grouped value heads)
learns to predict the next byte. Both runs start from the same weights and see the same batches, so their losses differ
by rounding only. A third run measures the effect of rounding: torch again, with initial weights that are changed as if
rounded to the compute dtype. Writes train.json and, with matplotlib, train.png to --out; --plot draws the figure from
the JSON file.

Weights, gradients and AdamW's moments are fp32. The default on a GPU is bf16: torch.autocast runs all layers on bf16
inputs and outputs, in each run. The Gated Delta Rule then has bf16 q, k and v, and fp32 g.

  flash_qla   multiplies bf16 matrices, sums in fp32, and keeps gates and states in fp32 (on a CPU everything is fp32);
  torch       keeps gates, the triangular solve and states in fp32; autocast computes its matrix products in bf16.

The default on a CPU is fp32 for everything in both; flash_qla has no fp32 on a GPU.

--model fla trains a model of flash-linear-attention (FLA) instead, on a GPU: GatedDeltaNet layers with their default
heads, keys of 256 channels and values of 512. The reference is FLA's own kernels.

torchrun spreads each of its long sequences over C ranks, by default all W (context parallelism). W / C such groups have
a sequence each (data parallelism). The model then has Gated DeltaNet layers only, because attention layers need a
context parallelism of their own. The run is compared with flash_qla in one process, on the same sequences.

The exit status is 1 if the text was not learned (the final loss is above LEARNED times the entropy of single bytes), or
if the mean distance of the two curves is more than FACTOR times the effect of rounding: the distance of the third run
from torch, at least RESOLUTION.

The file is long because it is all of a trainer: copy it, and it runs.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import pydoc_data
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__" and not {"fla", "--model=fla"} & set(sys.argv):
    # Qwen3-Next would use flash-linear-attention, if installed, instead of plain torch.
    sys.modules["fla"] = None

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers_model import build_model

import flash_qla
import flash_qla.integrations.fla
from flash_qla.cp import build_cp_context, exchange_halo
from flash_qla.integrations.transformers import use_flash_qla

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# No experts, because torch's sums of their outputs differ from run to run.
MODEL = {"num_experts": 0}
SETTINGS = {
    "cpu": {
        "steps": 120,
        "rows": 4,
        "length": 256,
        "model": MODEL
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
        },
    },
    "cuda": {
        "steps": 400,
        "rows": 8,
        "length": 1024,
        "model": MODEL
        | {
            "hidden_size": 256,
            "intermediate_size": 768,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    },
}
# Settings for FLA's model. Its layers have their defaults: 6 heads, keys of 256 channels, values of 512.
SETTINGS_OF_FLA = {
    "steps": 300,
    "rows": 8,
    "length": 1024,
    "model": {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 256},
}
# Settings that differ if torchrun started the processes
OVER_RANKS = {
    "cpu": {"steps": 40, "length": 1024},
    "cuda": {"steps": 60, "length": 131072},
}
PEAK_LEARNING_RATE = 1e-3
WARM_UP = 0.1  # part of all steps
ENOUGH = 30  # steps; fewer are not expected to have learned the text
LAST = 20  # the final loss is the mean of so many steps, at most a quarter of all

LEARNED = 0.85
# Each distance is random: after some fifty steps in bf16, rounding differences have grown into different curves. Two
# runs on an H200 gave 3.5e-3 and 6.2e-3 for flash_qla, 5.3e-3 and 3.6e-3 for the third run.
FACTOR = 3
RESOLUTION = 1e-5  # nats per byte; fp32 resolves a loss of 5 to 5e-7


def read_text(path):
    """The bytes of a file, [size] int64."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def entropies(text):
    """Entropies in nats per byte of `text`: of single bytes, and of a byte given the one before it."""

    def entropy(symbols):
        p = symbols.bincount().double() / symbols.numel()
        return -torch.special.xlogy(p, p).sum().item()

    return entropy(text), entropy(text[:-1] * 256 + text[1:]) - entropy(text[:-1])


def make_batches(text, steps, rows, length):
    """[steps, rows, length]: each row starts anywhere in `text`."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(text.numel() - length + 1, (steps, rows, 1), generator=generator)
    return text[starts + torch.arange(length)]


@torch.no_grad()
def perturb(model, eps):
    """Change each weight by a factor within 1 +- eps / 2, as rounding to a dtype of that eps would."""
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.mul_(1 + eps * (torch.rand_like(weight) - 0.5))


def learning_rate(step, steps):
    """The factor on the peak: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


class Ranks:
    """The processes that torchrun has started. Groups of neighbours share a sequence."""

    def __init__(self, device, context_ranks, length):
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.context = context_ranks or dist.get_world_size()
        self.data = dist.get_world_size() // self.context
        mesh = dist.device_mesh.init_device_mesh(device, (self.data, self.context), mesh_dim_names=("data", "context"))
        self.row = mesh.get_local_rank("data")
        part, rank = length // self.context, mesh.get_local_rank("context")
        self.columns = slice(rank * part, (rank + 1) * part)
        self.cp_context = build_cp_context(
            torch.tensor([0, length], device=device), mesh.get_group("context"), conv1d_kernel_size=4
        )

    def loss(self, model, batch):
        """W times the share of this rank's tokens in the loss, so that the mean over ranks is the loss."""
        row = batch[self.row : self.row + 1]
        targets = F.pad(row[:, 1:], (0, 1), value=-100)  # nothing comes after the last byte
        logits = model(row[:, self.columns], cp_context=self.cp_context, use_cache=False).logits
        total = F.cross_entropy(logits.float().flatten(0, 1), targets[:, self.columns].flatten(), reduction="sum")
        return total * dist.get_world_size() / (batch.numel() - len(batch))

    def mean(self, loss):
        loss = loss / dist.get_world_size()
        dist.all_reduce(loss)
        return loss


def is_first():
    """Whether this process is torchrun's first, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


_causal_conv1d = modeling_qwen3_next.causal_conv1d_fn


def causal_conv1d(x, *args, cp_context=None, **kwargs):
    """The model's convolution of x [1, channels, T], with the tokens before it from the previous rank."""
    if cp_context is None:
        return _causal_conv1d(x, *args, **kwargs)
    halo = exchange_halo(x.mT, cp_context).mT
    return _causal_conv1d(torch.cat([halo, x], -1), *args, **kwargs)[..., halo.shape[-1] :]


def build_fla_model(device, **options):
    """FLA's GatedDeltaNet language model with random weights."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    torch.manual_seed(0)
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**options)).to(device)


@contextlib.contextmanager
def fla_on_flash_qla(model):
    """FLA's layers call flash_qla within the block."""
    flash_qla.integrations.fla.use_flash_qla()
    try:
        yield
    finally:
        flash_qla.integrations.fla.restore()


def train(name, model, batches, dtype, ranks=None):
    """Train `model` on `batches` [steps, rows, length], over ranks if they are given.

    Returns:
        A dict of the loss of each step, the median time of a step, the final loss and, on a GPU, the peak memory.
    """
    model.train()
    device = model.device
    if ranks:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    steps = len(batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step, batch in enumerate(batches):
        start = time.perf_counter()
        batch = batch.to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = ranks.loss(model, batch) if ranks else model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append((ranks.mean(loss) if ranks else loss).item())  # waits until the step is done
        seconds.append(time.perf_counter() - start)
        if (step + 1) % max(1, steps // 5) == 0 and is_first():
            print(f"  {name:22} step {step + 1:4}  loss {losses[-1]:.4f}", flush=True)
    run = {"losses": losses, "seconds_per_step": statistics.median(seconds), "final_loss": final_loss(losses)}
    if device.type == "cuda":
        memory = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
        if ranks:
            dist.all_reduce(memory, dist.ReduceOp.MAX)
        run["peak_memory_gib"] = memory.item()
    return run


def final_loss(losses):
    return statistics.mean(losses[-min(LAST, -(-len(losses) // 4)) :])


def train_all(kind, settings, text, device, dtype, ranks):
    """Name -> run, for three runs of a model of this kind: the tested one, its reference, and the reference with
    perturbed weights.

    Only the first rank has the last two.
    """
    batches = make_batches(text, settings["steps"], settings["rows"], settings["length"])
    runs = {}

    def run(name, with_flash_qla, perturbed=False, ranks=None):
        if kind == "fla":
            model, switched = build_fla_model(device, **settings["model"]), fla_on_flash_qla
        else:
            model, switched = build_model("qwen3_next", device, **settings["model"]), use_flash_qla
        if perturbed:
            perturb(model, torch.finfo(dtype).eps)
        with switched(model) if with_flash_qla else contextlib.nullcontext():
            runs[name] = train(name, model, batches, dtype, ranks)

    if not ranks:
        reference = "FLA" if kind == "fla" else "torch"
        run("flash_qla", True)
        run(reference, False)
        run(f"{reference}, perturbed", False, perturbed=True)
        return runs
    run(f"{ranks.data} x {ranks.context} ranks", True, ranks=ranks)
    if is_first():
        run("one process", True)
        run("one process, perturbed", True, perturbed=True)
    return runs


def differences(run, reference):
    """The difference of two runs' losses at each step."""
    return [a - b for a, b in zip(run["losses"], reference["losses"], strict=True)]


def summarize(runs, entropy):
    """Print a summary of the runs; returns a sentence for each failure."""
    for name, run in runs.items():
        memory = f", {run['peak_memory_gib']:.2f} GiB at most" if "peak_memory_gib" in run else ""
        print(f"{name:22}  final loss {run['final_loss']:.4f}, {run['seconds_per_step']:.3f} s a step{memory}")
    print(f"entropy of a byte {entropy[0]:.4f}, knowing the byte before it {entropy[1]:.4f}")
    ours, reference, perturbed = runs
    mean = {}
    for name in (ours, perturbed):
        apart = [abs(d) for d in differences(runs[name], runs[reference])]
        mean[name] = statistics.mean(apart)
        print(f"{name} against {reference}: mean difference {mean[name]:.1e}, largest {max(apart):.1e}")

    failures = []
    enough = len(runs[reference]["losses"]) >= ENOUGH
    if not enough:
        print(f"fewer than {ENOUGH} steps: not asked whether the text has been learned")
    for name, run in runs.items():
        # "not <=" rather than ">": NaN must fail
        if enough and not run["final_loss"] <= LEARNED * entropy[0]:
            failures.append(f"{name} has not learned the text: final loss {run['final_loss']:.4f}")
    margin = max(RESOLUTION, FACTOR * mean[perturbed])
    print(f"margin for the mean difference of {ours}: {margin:.1e}")
    if not mean[ours] <= margin:
        failures.append(f"the curves of {ours} and {reference} are {mean[ours]:.1e} apart, the margin is {margin:.1e}")
    return failures


def plot(results, path):
    """Both loss curves above, their difference below."""
    from matplotlib.figure import Figure

    runs = results["runs"]
    ours, reference, perturbed = runs
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    above.plot(runs[reference]["losses"], label=reference, color="tab:orange", linewidth=4, alpha=0.5)
    above.plot(runs[ours]["losses"], label=ours, color="tab:blue", linewidth=1)
    above.axhline(results["entropy"][0], label="entropy of a byte", color="gray", linestyle="--", linewidth=1)
    above.axhline(results["entropy"][1], label="knowing the byte before", color="gray", linestyle=":", linewidth=1)
    above.set(ylabel="loss, nats per byte", title=results["description"])
    above.legend()
    for name, color in ((perturbed, "tab:gray"), (ours, "tab:blue")):
        below.plot(differences(runs[name], runs[reference]), label=f"{name} - {reference}", color=color, linewidth=1)
    below.set(xlabel="step", ylabel="difference")
    below.legend()
    figure.savefig(path, dpi=150)


def gpu_and_driver():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def write(results, folder):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.json"
    file.write_text(json.dumps(results, indent=1))
    try:
        plot(results, file.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no figure: {error}; `{Path(__file__).name} --plot {file}` draws it where matplotlib is installed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser.add_argument("--model", choices=("qwen3_next", "fla"), default="qwen3_next")
    parser.add_argument("--device", choices=SETTINGS, default="cuda" if hopper else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--steps", type=int, help="default: 120 on a CPU, 400 on a GPU; under torchrun 40 and 60")
    parser.add_argument("--length", type=int, help="bytes a sequence; default: 256 and 1024; 1024 and 131072")
    parser.add_argument("--context-ranks", type=int, metavar="C", help="ranks that share a sequence; default: all")
    # The longest text of the standard library: the documentation's pages on the language.
    parser.add_argument("--file", type=Path, default=Path(pydoc_data.__file__).with_name("topics.py"))
    parser.add_argument("--out", type=Path, help="folder for train.json and train.png")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the figure of this file, next to it")
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.plot.read_text()), args.plot.with_suffix(".png"))
        return 0

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps is {args.steps}, expected at least 1")
    if args.model == "fla" and args.device == "cpu":
        parser.error("--model fla needs a GPU")
    settings = dict(SETTINGS_OF_FLA if args.model == "fla" else SETTINGS[args.device])
    over_ranks = dist.is_torchelastic_launched()
    if over_ranks and args.model == "fla":
        parser.error("--model fla runs in one process")
    if over_ranks:
        settings |= OVER_RANKS[args.device]
        layers = settings["model"].get("num_hidden_layers", 4)
        settings["model"] = settings["model"] | {"layer_types": ["linear_attention"] * layers}
    elif args.context_ranks:
        parser.error("--context-ranks is for torchrun")
    settings |= {name: getattr(args, name) for name in ("steps", "length") if getattr(args, name)}
    dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    if args.device == "cuda" and dtype == "fp32":
        parser.error("on a GPU flash_qla takes 16-bit numbers only: --dtype bf16")
    text = read_text(args.file)
    if text.numel() < (2 if over_ranks else 100) * settings["length"]:
        parser.error(f"{args.file} has {text.numel()} bytes, too few to learn from")
    ranks = None
    if over_ranks:
        ranks = Ranks(args.device, args.context_ranks, settings["length"])
        settings["rows"] = ranks.data
        modeling_qwen3_next.causal_conv1d_fn = causal_conv1d
    transformers.logging.set_verbosity_error()  # its warning about plain torch does not matter here
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    of_model = "FLA's GatedDeltaNet" if args.model == "fla" else "Qwen3-Next"
    description = f"{of_model}, {args.file.name}, {dtype}, {device_name}"
    if is_first():
        print(f"{description}: {settings['steps']} steps of {settings['rows']} x {settings['length']} bytes")

    entropy = entropies(text)
    runs = train_all(args.model, settings, text, torch.device(args.device), DTYPES[dtype], ranks)
    if not is_first():
        dist.destroy_process_group()
        return 0
    failures = summarize(runs, entropy)
    if args.out:
        results = {
            "description": description,
            "time": time.strftime("%F %T %Z"),
            "versions": {
                "flash_qla": flash_qla.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **({"fla": sys.modules["fla"].__version__} if args.model == "fla" else {}),
                "python": platform.python_version(),
            },
            "device": device_name if args.device == "cpu" else gpu_and_driver(),
            "commit": os.environ.get("COMMIT"),
            "dtype": dtype,
            "settings": settings,
            "file": {"name": args.file.name, "bytes": text.numel()},
            "entropy": entropy,
            "runs": runs,
            "failures": failures,
        }
        write(results, args.out)
    if ranks:
        dist.destroy_process_group()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
