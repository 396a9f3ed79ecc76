"""examples/serving.py: what each feature of the engine does, and that no text changes with it. The reference is the
model's own generate(), in fp32 on the CPU token for token."""

import collections
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from reference import one_thread

pytest.importorskip("transformers", reason="transformers is not installed")

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "fla", None)  # or the model would use it where it is installed, and not plain torch
    patch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    import serving
    from serving_model import BLOCK, NULL

SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
SYSTEM = list(range(100, 250))  # a prefix, of two blocks and a part


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return serving.build_model("qwen3_next", **SMALL)


PROMPTS = ([*SYSTEM, 1, 2, 3], [*SYSTEM, 4], [5, 6], list(range(200)), SYSTEM[:128])


@pytest.fixture(scope="module")
def texts(model):
    """The text after each prompt."""
    return [serving.generate(model, serving.Request(prompt, 12)) for prompt in PROMPTS]


def requests(*which: int) -> list:
    return [serving.Request(PROMPTS[i], 12) for i in which or range(len(PROMPTS))]


def serve(engine, served: list, arriving: int = 2) -> list[list[int]]:
    """The texts; afterwards everything is free but what prefixes keep."""
    serving.serve(engine, served, arriving)
    pool = engine.pool
    cached = list(pool.prefixes.values())
    slots = [*pool.free_slots, *(slot for _, slot in cached)]
    pages = [*pool.free_pages, *(page for page, _ in cached)]
    assert sorted(slots) == list(range(NULL + 1, len(pool.states)))
    assert sorted(pages) == list(range(NULL + 1, pool.keys.shape[2] // BLOCK))
    assert +pool.users == collections.Counter(page for page, _ in cached)
    return [request.text for request in served]


def make_engine(model, **options):
    return serving.Engine(model, **{"prefixes": 0, "drafts": 0, "graphs": False} | options)


def oracle(texts, mistake=None):
    """A drafter that knows what comes, but for the token number `mistake` of each draft."""

    def draft(tokens, count):
        for prompt, text in zip(PROMPTS, texts, strict=True):
            done = len(tokens) - len(prompt)
            if tokens == prompt + text[:done]:
                guess = text[done : done + count]
                return [token if i != mistake else (token + 1) % 256 for i, token in enumerate(guess)]
        raise AssertionError("the engine has written something else")

    return draft


def test_continuous_batching(model, texts):
    engine = make_engine(model, batch=3)
    served, running = requests(), []
    served[1].new_tokens = 6
    for request in served[:3]:
        engine.add(request)
    engine.step()
    for request in served[3:]:  # they come while others run, and there is no room yet
        engine.add(request)
    while engine.running or engine.waiting:
        running.append([served.index(request) for request in engine.running])
        engine.step()
    assert [running[i] for i in (0, 6, -1)] == [[0, 1, 2], [0, 2, 3], [4]]
    assert [request.text for request in served] == [texts[0], texts[1][:6], *texts[2:]]
    assert serve(engine, requests()) == texts  # slots and pages had other owners before


def test_a_batch_takes_fewer_steps(model):
    assert make_steps(model, batch=1) > 3 * make_steps(model, batch=5)


def make_steps(model, **options) -> int:
    engine = make_engine(model, **options)
    serve(engine, requests())
    return engine.counts["steps"]


def test_requests_wait_for_pages(model, texts):
    engine = make_engine(model, pages=7, prefixes=4)  # the longest take four of six, and what is cached has to go
    assert serve(engine, requests()) == texts
    assert engine.counts["steps"] > make_steps(model)
    engine = make_engine(model, pages=7, prefixes=4)
    serve(engine, requests(0))
    assert len(engine.pool.prefixes) == 2
    assert serve(engine, requests(3, 1)) == [texts[3], texts[1]]  # the second knows a prefix, and yet there is no room


def test_prefix_caching(model, texts):
    engine = make_engine(model, prefixes=8)
    assert serve(engine, requests(0)) == texts[:1]
    assert [len(prefix) for prefix in engine.pool.prefixes] == [128, 64]  # the order in which they are forgotten
    assert (engine.counts["cached"], engine.counts["prefilled"]) == (0, 153)
    assert serve(engine, requests(1)) == texts[1:2]
    assert (engine.counts["cached"], engine.counts["prefilled"]) == (128, 153 + 23)
    assert serve(engine, requests(4)) == texts[4:]  # two blocks; the last one has to compute a token
    assert (engine.counts["cached"], engine.counts["prefilled"]) == (128 + 64, 153 + 23 + 64)
    assert serve(engine, requests(3, 2)) == [texts[3], texts[2]]
    assert engine.counts["cached"] == 128 + 64
    assert serve(engine, requests()) == texts
    assert len(engine.pool.prefixes) == 5


@pytest.mark.parametrize("prefixes", (1, 2, 3))
def test_prefixes_are_forgotten(model, texts, prefixes):
    """There is room for fewer than the five blocks that there are: those not used for longest go."""
    engine = make_engine(model, batch=1, prefixes=prefixes, pages=6)
    for _ in range(2):
        assert serve(engine, requests()) == texts
    assert 0 < len(engine.pool.prefixes) < 5
    assert engine.counts["cached"] > 0


def test_prompts_over_the_budget(model, texts):
    engine = make_engine(model, budget=BLOCK, prefixes=8)
    assert serve(engine, requests(3)) == texts[3:4]
    assert engine.counts["steps"] == math.ceil(200 / BLOCK) + 11
    assert [len(prefix) for prefix in engine.pool.prefixes] == [64, 128, 192]
    assert serve(engine, requests()) == texts
    engine = make_engine(model, budget=128, prefixes=8)
    assert serve(engine, requests(0, 3)) == [texts[0], texts[3]]  # 128; 25 and 64; 128; 8 tokens
    assert sorted(len(prefix) for prefix in engine.pool.prefixes) == [64, 64, 128, 128, 192]


@pytest.mark.parametrize("drafts", (1, 3, 7))
@pytest.mark.parametrize("mistake", (None, 0, 1))
def test_speculative_decoding(model, texts, drafts, mistake):
    engine = make_engine(model, drafts=drafts, drafter=oracle(texts, mistake))
    assert serve(engine, requests(0)) == texts[:1]
    step = 1 + (drafts if mistake is None else min(mistake, drafts))  # tokens that each brings
    steps = math.ceil(11 / step)  # one of the twelve comes with the prefill
    assert engine.counts["steps"] == 1 + steps
    assert engine.counts["accepted"] == 11 - steps
    assert engine.counts["drafted"] == sum(min(drafts, 10 - i * step) for i in range(steps))
    assert serve(engine, requests()) == texts


def test_look_up():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 8, 9, 9, 1, 2, 3]
    assert serving.look_up(text, 2) == [8, 9]  # the last time
    assert serving.look_up(text, 8) == [4, 5, 6, 7, 1, 2, 3, 8]  # the last one with so many tokens after it
    assert serving.look_up([7] * 9, 4) == [7] * 4
    assert serving.look_up(text, 0) == serving.look_up([1, 2, 3, 4], 2) == serving.look_up([], 1) == []


def test_the_end(model, texts):
    """A request ends after the stop token, whatever was drafted after it."""
    stop = texts[0][5]
    assert stop not in texts[0][:5]
    for options in ({}, {"drafts": 3, "drafter": oracle(texts)}):
        engine = make_engine(model, stop=stop, **options)
        assert serve(engine, requests(0)) == [texts[0][:6]]
    one = serving.Request(PROMPTS[0], 1)
    assert serve(engine, [one]) == [texts[0][:1]]


@pytest.mark.parametrize("graphs", (False, True))
def test_everything_together_in_padded_steps(model, texts, graphs):
    """No step reads free slots. (Attention reads free pages with weight zero, so they are finite.)"""
    engine = make_engine(model, drafts=3, drafter=oracle(texts, 1), prefixes=4, batch=4, budget=128, graphs=graphs)
    engine.pool.states.fill_(float("nan"))
    engine.pool.convs.fill_(float("nan"))
    sizes = []
    launch = engine.launch
    engine.launch = lambda size, decoding: sizes.append(size) or launch(size, decoding)
    for _ in range(2):
        assert serve(engine, requests()) == texts
    assert engine.counts["cached"] and engine.counts["accepted"]
    padded = {4, 8, 12, 16, 64, 128}
    assert (set(sizes) <= padded) == graphs


def test_padding_changes_nothing(model, texts):
    """All places of a batch are taken, and what else is in a step's tokens is padding."""

    def pool_after(graphs):
        drafter = oracle(texts)
        options = {"drafts": 3, "drafter": lambda tokens, count: drafter(tokens, min(count, 1)), "prefixes": 8}
        engine = make_engine(model, batch=5, budget=1024, graphs=graphs, **options)
        assert serve(engine, requests(), arriving=5) == texts
        pool = engine.pool
        return [pool.states[NULL + 1 :], pool.convs[NULL + 1 :], *(x[:, :, BLOCK:] for x in (pool.keys, pool.values))]

    for padded, expected in zip(pool_after(True), pool_after(False), strict=True):
        assert expected.any()
        torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-4)


def test_every_token_sees_something(model):
    """Or attention would divide by zero, also where it is padding, whose keys would then be NaN for all."""
    engine = make_engine(model, graphs=True)
    for rows in ([], [(serving.Request([1], 1, slots=[1], pages=[1]), [1], [])]):
        engine.fill(rows)
        step = serving.Step(engine.pool, engine.tables, T=64, decoding=False)
        assert step.mask.any(-1).all()


def test_what_does_not_fit(model):
    engine = make_engine(model, length=100)
    for request in (serving.Request([], 3), serving.Request([1], 0), serving.Request([1] * 98, 3)):
        with pytest.raises(ValueError, match=rf"a request has {len(request.prompt)} \+ {request.new_tokens} tokens"):
            engine.add(request)
    for options in ({"length": 100, "pages": 2}, {"budget": 65}):
        with pytest.raises(ValueError, match=r"expected more than \d pages"):
            make_engine(model, **options)


@pytest.fixture
def short_program(monkeypatch, model):
    """main() on the small model as it is, with few requests."""
    monkeypatch.setattr(sys, "argv", ["serving.py", "--device=cpu"])
    monkeypatch.setattr(serving, "train", lambda *arguments: None)
    monkeypatch.setattr(serving, "build_model", lambda *arguments: model)
    monkeypatch.setattr(serving, "make_requests", lambda text: requests(0, 1))


def test_the_program(short_program, capsys):
    serving.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:7]] == [
        "generate(), one by one",
        "engine, one by one",
        "with continuous batching, too",
        "with prefix caching, too",
        "with speculative decoding, too",
    ]
    assert lines[-1] == "all texts are those of generate(), 0 of them up to ties"


@pytest.mark.gpu
def test_graphs_on_the_gpu():
    """All features, in graphs and without: texts of bf16 up to ties, and what the engine counts."""
    model = serving.build_model("qwen3_next", "cuda", torch.bfloat16, **SMALL)
    exact = serving.copy.deepcopy(model).float()
    for graphs in (False, True):
        engine = make_engine(model, batch=4, prefixes=4, drafts=3, graphs=graphs)
        assert len(engine.graphs) == (8 if graphs else 0)  # four sizes of decoding, 64 to 512 of prefill
        engine.drafter = lambda tokens, count: [tokens[-1]] * count  # seldom right, but all of it is verified
        for _ in range(2):
            served = requests()
            serve(engine, served)
            assert all(len(request.text) == 12 and serving.is_tied(model, exact, request) for request in served)
        assert engine.counts["cached"] and engine.counts["drafted"]
