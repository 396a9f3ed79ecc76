"""A small inference engine: a Qwen3-Next of Hugging Face transformers on flash_qla's operations for pools of states.

    python examples/serving.py [--device cpu|cuda] [--dtype fp32|bf16]

Weights and modules are the model's own. The engine adds the parts that serve many requests at once:

  continuous batching   requests come and go between steps; a step packs the tokens of all into [1, T], without padding
  a paged pool          the states of linear layers are in slots, keys and values in pages
  prefix caching        prefill leaves a checkpoint after each block; a prompt with the same beginning starts from there
  speculative decoding  the next tokens of a request are guessed from its own text, and verified in one step
  CUDA graphs           on a GPU, steps are padded to one of a few sizes, and captured once

The model is trained for some seconds, because the text of random weights cannot be guessed. Then the engine serves the
same requests with one feature more each time, and prints tokens per second, the gain over the previous line, and the
counts that explain the gain. The exit status is 1 if a text differs from that of the model's own generate(): in fp32
token for token, in bf16 up to ties (`is_tied`).
"""

import argparse
import collections
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    # The model would use flash-linear-attention, if installed, instead of plain torch.
    sys.modules["fla"] = None

import torch
import transformers
from serving_model import BLOCK, NULL, Pool, Step, next_tokens
from train import make_batches, read_text, train
from transformers_model import DTYPES, build_model

STOP = 10  # a line's end


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new_tokens: int
    text: list[int] = field(default_factory=list)
    done: bool = False
    computed: int = 0  # tokens of prompt and text that are in the pool
    slots: list[int] = field(default_factory=list)  # the state after each token of the last step
    accepted: int = 1  # tokens of the last step that were accepted
    pages: list[int] = field(default_factory=list)

    def append(self, tokens: list[int], stop: int | None) -> None:
        for token in tokens:
            if not self.done:
                self.text.append(token)
                self.done = token == stop or len(self.text) == self.new_tokens


def look_up(tokens: list[int], count: int, width: int = 3) -> list[int]:
    """The drafter: `count` tokens that followed the last `width` tokens earlier in the text; none if they are new."""
    for i in range(len(tokens) - width - count, -1, -1):
        if count and tokens[i : i + width] == tokens[-width:]:
            return tokens[i + width : i + width + count]
    return []


class Engine:
    """Serves requests: add() them, and call step() while there are any.

    Args:
        model: Qwen3NextForCausalLM; it is not changed.
        batch: the most requests that run at once.
        budget: the most tokens of a prefill; longer prompts take several steps.
        length: the most tokens of a request, prompt and text together.
        pages: pages of the pool, for running requests and the cache; requests wait if there are too few.
        prefixes: the most checkpoints besides those of running requests; 0 for no prefix caching.
        drafts: the most tokens guessed in a step, 0 to 7.
        drafter: (tokens so far, count) -> at most count tokens.
        graphs: pad steps to a few sizes and, on a GPU, capture them.
        stop: a request ends after this token.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: int = 8,
        budget: int = 512,
        length: int = 320,
        pages: int = 49,
        prefixes: int = 16,
        drafts: int = 3,
        drafter: Callable[[list[int], int], list[int]] = look_up,
        graphs: bool = True,
        stop: int | None = None,
    ):
        longest = -(-length // BLOCK)
        if pages <= longest or budget % BLOCK:
            raise ValueError(
                f"{pages} pages and a budget of {budget} tokens came, expected more than {longest} pages, which hold a "
                f"request of {length} tokens, and a multiple of {BLOCK}"
            )
        self.model, self.batch, self.budget, self.length, self.stop = model, batch, budget, length, stop
        self.prefixes, self.drafts, self.drafter = prefixes, drafts, drafter
        self.pool = Pool(model, NULL + 1 + batch * (1 + drafts) + prefixes, pages)
        self.waiting, self.running, self.counts = collections.deque(), [], collections.Counter()

        shapes = {
            "tokens": (max(budget, batch * (1 + drafts)),),
            "cu_seqlens": (batch + 1,),
            "start": (batch,),
            "slots": (batch, 1 + drafts),
            "accepted": (batch,),
            "pages": (batch, longest),
            "checkpoints": (batch, budget // BLOCK),
        }
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        device = model.device
        self.host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = self.host.to(device, copy=True)  # one buffer, so one copy moves all tables
        self.host_tables, self.tables = (
            {name: x.view(shapes[name]) for name, x in zip(shapes, buffer.split(sizes), strict=True)}
            for buffer in (self.host, self.device)
        )
        self.sizes = {}  # decoding -> the sizes that such steps are padded to
        if graphs:
            prefill = [BLOCK << i for i in range(20) if BLOCK << i < budget]
            self.sizes = {True: [batch * (1 + i) for i in range(1 + drafts)], False: [*prefill, budget]}
        self.graphs = {}
        if graphs and device.type == "cuda":
            self.capture()

    @torch.no_grad()
    def capture(self) -> None:
        self.fill([])  # no requests
        memory = torch.cuda.graph_pool_handle()
        for decoding, sizes in self.sizes.items():
            for size in reversed(sizes):  # the largest first: the others fit into its memory
                self.launch(size, decoding)  # kernels are loaded outside the capture
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    out = self.launch(size, decoding)
                self.graphs[size, decoding] = graph, out

    def launch(self, T: int, decoding: bool) -> torch.Tensor:
        if (T, decoding) in self.graphs:
            graph, out = self.graphs[T, decoding]
            graph.replay()
            return out
        return next_tokens(self.model, Step(self.pool, self.tables, T, decoding))

    def fill(self, rows: list[tuple[Request, list[int], list[int]]]) -> int:
        """Copies a step's requests, tokens and checkpoints to the device; returns the number of tokens."""
        self.host.zero_()
        tables, total = {name: x.numpy() for name, x in self.host_tables.items()}, 0
        tables["accepted"][:] = 1
        for n, (request, tokens, checkpoints) in enumerate(rows):
            tables["tokens"][total : total + len(tokens)] = tokens
            total += len(tokens)
            tables["cu_seqlens"][n + 1 :] = total
            tables["start"][n] = request.computed
            tables["slots"][n] = request.slots
            tables["accepted"][n] = request.accepted
            tables["pages"][n, : len(request.pages)] = request.pages
            tables["checkpoints"][n, : len(checkpoints)] = checkpoints
        self.device.copy_(self.host, non_blocking=True)
        return total

    def run(self, rows: list[tuple[Request, list[int], list[int]]], decoding: bool) -> list[list[int]]:
        """The most likely next token after each token of each row."""
        total = self.fill(rows)
        size = min((size for size in self.sizes.get(decoding, ()) if size >= total), default=total)
        out = iter(self.launch(size, decoding).tolist())  # waits
        self.counts["steps"] += 1
        return [[next(out) for _ in tokens] for _, tokens, _ in rows]

    def add(self, request: Request) -> None:
        if not 0 < len(request.prompt) < len(request.prompt) + request.new_tokens <= self.length:
            raise ValueError(
                f"a request has {len(request.prompt)} + {request.new_tokens} tokens, expected at least 1 + 1 and at "
                f"most {self.length} together"
            )
        self.waiting.append(request)

    @torch.no_grad()
    def step(self) -> None:
        """Admits requests, computes prompts, decodes the other requests, and releases the finished ones."""
        while self.waiting and len(self.running) < self.batch and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        self.prefill()
        self.decode()
        for request in [request for request in self.running if request.done]:
            self.running.remove(request)
            self.pool.release(request.slots, request.pages)

    def admit(self, request: Request) -> bool:
        """Reserves room for the whole request, and lets it start after the longest known prefix of its prompt.

        Returns:
            Whether there is room.
        """
        pages, checkpoint = self.pool.find_prefix(request.prompt) if self.prefixes else ([], NULL)
        needed = -(-(len(request.prompt) + request.new_tokens) // BLOCK)
        allocation = self.pool.allocate(1 + self.drafts, needed - len(pages))
        if allocation is None:
            self.pool.release([], pages)
            return False
        request.slots, request.pages = allocation[0], pages + allocation[1]
        request.computed = len(pages) * BLOCK
        if pages:  # allocate() may have released the checkpoint's slot, which still holds the state
            self.pool.copy(checkpoint, request.slots[0])
        self.counts["cached"] += request.computed
        return True

    def prefill(self) -> None:
        """Computes the rest of the prompts, up to the budget.

        Checkpoints are at the ends of blocks, so an unfinished prompt stops at one.
        """
        rows, room, new_prefixes = [], self.budget, {}
        for request in self.running:
            tokens = request.prompt[request.computed :]
            if len(tokens) > room:
                tokens = tokens[: room // BLOCK * BLOCK]
            if not tokens:
                continue
            room -= len(tokens)
            checkpoints = []
            for end in range(request.computed + BLOCK, request.computed + len(tokens) + 1, BLOCK):
                prefix = tuple(request.prompt[:end])
                is_new = self.prefixes and prefix not in self.pool.prefixes and prefix not in new_prefixes
                allocation = self.pool.allocate(1, 0) if is_new else None
                checkpoints.append(allocation[0][0] if allocation else NULL)
                if allocation:
                    new_prefixes[prefix] = request.pages[end // BLOCK - 1], checkpoints[-1]
            rows.append((request, tokens, checkpoints))
        if not rows:
            return
        for (request, tokens, _), out in zip(rows, self.run(rows, decoding=False), strict=True):
            request.computed += len(tokens)
            self.counts["prefilled"] += len(tokens)
            if request.computed == len(request.prompt):
                request.append(out[-1:], self.stop)
        self.pool.remember(new_prefixes)

    def decode(self) -> None:
        """Computes one token, and drafts, of each request whose prompt is computed; one step verifies all drafts."""
        rows = []
        for request in self.running:
            if request.text and not request.done:
                count = min(self.drafts, request.new_tokens - len(request.text) - 1)
                guess = self.drafter(request.prompt + request.text, count)
                rows.append((request, [request.text[-1], *guess], []))
        if not rows:
            return
        for (request, tokens, _), out in zip(rows, self.run(rows, decoding=True), strict=True):
            accepted = 1
            while accepted < len(tokens) and tokens[accepted] == out[accepted - 1]:
                accepted += 1
            request.computed += accepted
            request.accepted = accepted  # the next step reads the state after the last one
            request.append(out[:accepted], self.stop)
            self.counts["drafted"] += len(tokens) - 1
            self.counts["accepted"] += accepted - 1


def serve(engine: Engine, requests: list[Request], arriving: int = 2) -> float:
    """Seconds to serve all requests, `arriving` new ones a step."""
    start = time.perf_counter()
    coming = collections.deque(requests)
    while coming or engine.waiting or engine.running:
        for _ in range(min(arriving, len(coming))):
            engine.add(coming.popleft())
        engine.step()
    return time.perf_counter() - start


def make_requests(text: list[int]) -> list[Request]:
    """Prompts with one of two beginnings, like two system prompts, and with different ends."""
    random_numbers, requests = random.Random(0), []
    for i in range(16):
        first, second = 1000 * (i % 2), random_numbers.randrange(len(text) - 64)
        prompt = text[first : first + 160] + text[second : second + random_numbers.randrange(10, 60)]
        requests.append(Request(prompt, new_tokens=random_numbers.randrange(24, 72)))
    return requests


def generate(model: torch.nn.Module, request: Request) -> list[int]:
    """The text that the model itself writes."""
    prompt = torch.tensor([request.prompt], device=model.device)
    tokens = model.generate(prompt, max_new_tokens=request.new_tokens, do_sample=False, eos_token_id=STOP)
    return tokens[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def is_tied(model: torch.nn.Module, exact: torch.nn.Module, request: Request) -> bool:
    """Whether the text is a most likely one, up to the rounding of the model's dtype.

    `exact` is the same model in fp32. Rounding changes a logit by at most d, the largest difference between the two
    models' logits over this text. The text is tied if no logit of `exact` exceeds that of the chosen token by more than
    2 d.
    """
    tokens = torch.tensor([request.prompt + request.text], device=model.device)
    logits, exact_logits = (m(tokens).logits[0, len(request.prompt) - 1 : -1].float() for m in (model, exact))
    gaps = exact_logits.amax(-1) - exact_logits.gather(-1, tokens[0, len(request.prompt) :, None])[:, 0]
    return bool((gaps <= 2 * (logits - exact_logits).abs().max()).all())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser.add_argument("--device", default="cuda" if hopper else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: fp32 on a CPU, bf16 on a GPU")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    transformers.logging.set_verbosity_error()  # its warning about plain torch does not matter here
    torch.set_num_threads(1)  # such small operations are slower on several threads

    text = read_text(Path(argparse.__file__))
    model = build_model("qwen3_next", device)
    train("training", model, make_batches(text, steps=60, rows=4, length=128), torch.float32)
    model = model.to(dtype).eval()
    exact = None if dtype == torch.float32 else copy.deepcopy(model).float()
    text = text.tolist()

    generate(model, make_requests(text)[0])  # the first call of a process also loads and allocates
    start = time.perf_counter()
    expected = [generate(model, request) for request in make_requests(text)]
    speed = sum(map(len, expected)) / (time.perf_counter() - start)
    print(f"\n{'':36}tokens/s   gain  steps  prompt tokens computed, cached  drafts accepted")
    print(f"{'generate(), one by one':36}{speed:8.0f}")

    features = {
        "engine, one by one": {"batch": 1, "prefixes": 0, "drafts": 0, "graphs": False},
        "with continuous batching, too": {"batch": 8},
        "with prefix caching, too": {"prefixes": 16},
        "with speculative decoding, too": {"drafts": 3},
    }
    if device.type == "cuda":
        features["with CUDA graphs, too"] = {"graphs": True}
    options, ties, failures = {"stop": STOP}, 0, 0
    for name, changes in features.items():
        options |= changes
        seconds = []
        for _ in range(3):
            engine, requests = Engine(model, **options), make_requests(text)
            seconds.append(serve(engine, requests))
            different = [request for request, tokens in zip(requests, expected, strict=True) if request.text != tokens]
            tied = sum(exact is not None and is_tied(model, exact, request) for request in different)
            ties, failures = ties + tied, failures + len(different) - tied
        before, speed = speed, sum(len(request.text) for request in requests) / statistics.median(seconds)
        n = engine.counts
        print(
            f"{name:36}{speed:8.0f}{speed / before:7.2f}{n['steps']:7}{n['prefilled']:24}{n['cached']:8}"
            f"{n['accepted']:10} of {n['drafted']}"
        )
    if failures:
        raise SystemExit(f"FAILED: {failures} texts are not those of generate()")
    print(f"all texts are those of generate(), {ties} of them up to ties")


if __name__ == "__main__":
    main()
