"""Steps of decoding of SGLang's layers, on stand-ins of layer, backend and pools, against the formula in float64."""

import dataclasses
import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import engines
import pytest
import torch
from accuracy import relative_error
from test_decode_region_drafts import BARS, Case, expected, make
from test_vllm_layer import in_one

from flash_qla.integrations import _engines, _layers, _sglang_layer, sglang

ATTENTION, BACKEND = _sglang_layer._ATTENTION, _sglang_layer._BACKEND
MODELS = {"sglang.srt.models.qwen3_next": "Qwen3GatedDeltaNet", "sglang.srt.models.qwen3_5": "Qwen3_5GatedDeltaNet"}


class GDNAttnBackend:
    """What a step of decoding needs of SGLang's backend."""

    def __init__(self, x: dict):
        pools = SimpleNamespace(conv=[x["window_pool"]], temporal=x["state_pool"], replayssm_d=None)
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=x["state_indices"])
        if "intermediate_states" in x:  # a server with drafts
            vars(self.forward_metadata).update(dict.fromkeys(_sglang_layer._TREE_TABLES))
            pools.intermediate_ssm, pools.intermediate_conv_window = (
                x["intermediate_states"],
                [x["intermediate_windows"]],
            )
            rows = x["intermediate_indices"]  # and rows of the batches of CUDA graphs
            self.verify_intermediate_state_indices = torch.cat([rows, rows.new_full((3,), len(rows))])
        self.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer_id: {3: pools}[layer_id])
        kernel = type("TritonGDNKernel", (), {})()
        self.kernel_dispatcher = SimpleNamespace(decode_kernel=kernel, verify_kernel=kernel)
        self.tracked = []

    def _track_mamba_state_decode(self, *arguments, layer_id=None):
        self.tracked.append((*arguments, layer_id))


class OfNewerReleases(GDNAttnBackend):
    def _track_mamba_state_decode(self, forward_batch, conv_states, ssm_states, cache_indices, layer_id=None):
        self.tracked.append((forward_batch, conv_states, ssm_states, cache_indices, layer_id))


class OfOlderReleases(GDNAttnBackend):
    def _track_mamba_state_decode(self, forward_batch, conv_states, ssm_states, cache_indices):
        self.tracked.append((forward_batch, conv_states, ssm_states, cache_indices))


class Part(torch.nn.Module):
    def __init__(self, **names):
        super().__init__()
        vars(self).update(names)


class Layer(torch.nn.Module):
    """The attributes and methods of SGLang's layers that a step of decoding needs; tokens are the projections."""

    def __init__(self, x: dict, case: Case):
        super().__init__()
        options = {"norm_eps": 1e-6, "norm_activation": "silu"} | dict(case.options)
        self.conv1d = Part(weight=x["conv_weight"][:, None])
        self.norm = Part(weight=x["norm_weight"], activation=options["norm_activation"])
        self.attn = Part(
            layer_id=3,
            num_k_heads=case.H_k,
            num_v_heads=case.H_v,
            head_k_dim=case.K,
            head_v_dim=case.V,
            conv_weights=x["conv_weight"],
            bias=x["conv_bias"],
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
        )
        self.num_k_heads, self.num_v_heads = 2 * case.H_k, 2 * case.H_v  # of two ranks
        self.head_k_dim, self.head_v_dim = case.K, case.V
        self.layer_norm_epsilon, self.activation = options["norm_eps"], "silu"
        self.gates = 2 * case.H_v

    def _forward_input_proj(self, hidden_states):
        return hidden_states[:, : -self.gates], hidden_states[:, -self.gates :]

    def out_proj(self, x):
        return 2 * x, None

    def forward(self, hidden_states, forward_batch):
        return "theirs"


def tokens_of(x: dict) -> torch.Tensor:
    return torch.cat([in_one(x, "mixed", "z"), in_one(x, "b", "a")], -1)


def mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(is_decode=lambda: name == "decode", is_target_verify=lambda: name == "verify")


@pytest.fixture
def engine(monkeypatch):
    """SGLang's modules; set_backend puts a backend in place as newer or older releases have it."""
    modules = engines.stand_ins("sglang", monkeypatch)
    for path in (ATTENTION, *MODELS):
        modules[path] = ModuleType(path)
        monkeypatch.setitem(sys.modules, path, modules[path])
    for path, name in MODELS.items():
        setattr(modules[path], name, type(name, (Layer,), {"forward": Layer.forward}))

    def set_backend(backend, is_new: bool = True, drafts: int = 0) -> SimpleNamespace:
        """The batch of a step of decoding."""
        attention_backend = SimpleNamespace(linear_attn_backend=backend)
        batch = SimpleNamespace(forward_mode=mode("verify" if drafts else "decode"))
        batch.spec_info = SimpleNamespace(draft_token_num=drafts) if drafts else None
        modules[BACKEND].GDNAttnBackend = type(backend)
        if is_new:
            modules[ATTENTION].get_attn_backend = lambda: attention_backend
            batch.logical_forward_mode = batch.forward_mode
        else:
            batch.attn_backend = attention_backend
        return batch

    sglang.restore()
    _layers.say.cache_clear()
    yield SimpleNamespace(modules=modules, set_backend=set_backend, classes=[*MODELS.items()])
    sglang.restore()


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def layer_of(engine, x: dict, case: Case) -> Layer:
    path, name = engine.classes[0 if case.by_key_heads else 1]
    return vars(engine.modules[path])[name](x, case)


# Numbers of a layer that are not the default, and rows of a CUDA graph that have no slot
OPTIONS = (("norm_eps", 1e-2), ("norm_activation", "sigmoid"))
ONE = {"T": 1, "indices": (4, -1, 6, 2), "options": OPTIONS}
CASES = (
    Case(**ONE | {"options": ()}),
    Case(**ONE, with_bias=False, state_dtype=torch.bfloat16),
    Case(**ONE, by_key_heads=True, int64=True),
    Case(**ONE, by_key_heads=True, H_k=1, H_v=4, K=64, columns_last=False),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(case, device, engine, on_hopper):
    x = make(case, device)
    reference, states = expected(x), x["state_pool"].clone()
    backend = OfNewerReleases(x)
    batch = engine.set_backend(backend)
    sglang.use_flash_qla()
    y = layer_of(engine, x, case)(tokens_of(x), batch)
    assert relative_error(y.double() / 2, reference["y"].flatten(0, 1).flatten(1).to(device)) < BARS[2]
    assert torch.equal(x["window_pool"].double().cpu(), reference["window_pool"])
    bar = BARS[x["state_pool"].element_size()]
    assert relative_error(x["state_pool"].double(), reference["state_pool"].to(device)) < bar
    for slot in {*range(len(states))} - {*case.indices}:
        assert torch.equal(x["state_pool"][slot], states[slot])
    ((*arguments, layer_id),) = backend.tracked
    passed_on = (batch, x["window_pool"], x["state_pool"], x["state_indices"])
    assert all(x is y for x, y in zip(arguments, passed_on, strict=True)) and layer_id == 3


DRAFTS = {"T": 3, "indices": (4, -1, 6), "kept_rows": (0, 1, 2), "steps": 3, "update_state": False, "options": OPTIONS}
CHAINS = (
    Case(**DRAFTS, sliding=True),
    Case(**DRAFTS, sliding=True, by_key_heads=True, state_dtype=torch.bfloat16, int64=True),
    Case(**DRAFTS, with_bias=False),  # 0.5.12 and 0.5.13
)


@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_chains_of_drafts(case, device, engine, on_hopper):
    """The pools of a slot stay, and its rows get the window and the state after each draft."""
    x = make(case, device)
    reference, pools = expected(x), {name: x[name].clone() for name in ("window_pool", "state_pool")}
    backend = OfNewerReleases(x)
    batch = engine.set_backend(backend, drafts=case.T)
    sglang.use_flash_qla()
    y = layer_of(engine, x, case)(tokens_of(x), batch)
    assert relative_error(y.double() / 2, reference["y"].flatten(0, 1).flatten(1).to(device)) < BARS[2]
    assert torch.equal(x["intermediate_windows"].double().cpu(), reference["intermediate_windows"])
    bar = BARS[x["state_pool"].element_size()]
    assert relative_error(x["intermediate_states"].double(), reference["intermediate_states"].to(device)) < bar
    assert all(torch.equal(x[name], pool) for name, pool in pools.items()) and not backend.tracked


def test_other_drafts_are_theirs(engine, on_hopper, monkeypatch):
    case = CHAINS[0]
    x = make(case, "cpu")
    before = {name: x[name].clone() for name in ("window_pool", "state_pool", "intermediate_states")}
    sglang.use_flash_qla()
    layer, tokens, backend = layer_of(engine, x, case), tokens_of(x), OfNewerReleases(x)
    batch = engine.set_backend(backend, drafts=3)
    assert layer(tokens[:-1], batch) == layer((tokens, tokens), batch) == "theirs"
    assert layer(tokens.repeat(2, 1), batch) == "theirs"  # rows beyond the slots
    assert layer(tokens, SimpleNamespace(**vars(batch) | {"logical_forward_mode": mode("decode")})) == "theirs"
    assert layer(tokens, engine.set_backend(backend, drafts=9)) == "theirs"
    batch = engine.set_backend(backend, drafts=3)
    for name in ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"):
        vars(backend.forward_metadata)[name] = torch.zeros(1)
        assert layer(tokens, batch) == "theirs"
        vars(backend.forward_metadata)[name] = None
    utilities = ModuleType(_sglang_layer._UTILITIES)
    utilities.pp_spec_stable_rows_enabled = lambda: True
    monkeypatch.setitem(sys.modules, _sglang_layer._UTILITIES, utilities)
    assert layer(tokens, batch) == "theirs"
    for name, pool in before.items():
        assert torch.equal(x[name], pool)


def without_states(layer, backend):
    backend.req_to_token_pool.mamba2_layer_cache(3).intermediate_ssm = None


def short_windows(layer, backend):
    pools = backend.req_to_token_pool.mamba2_layer_cache(3)
    pools.intermediate_conv_window = [pools.intermediate_conv_window[0][..., :2]]


def without_rows(layer, backend):
    del backend.verify_intermediate_state_indices


def other_kernel(layer, backend):
    backend.kernel_dispatcher.verify_kernel = object()


def kept_tokens(layer, backend):
    backend.req_to_token_pool.mamba2_layer_cache(3).replayssm_rawv = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "why"),
    (
        (without_states, "one by one: the states and windows after drafts are kept in another form"),
        (short_windows, "one by one: the states and windows after drafts are kept in another form"),
        (without_rows, "no attribute 'verify_intermediate_state_indices'"),
        (other_kernel, "one by one: object decodes"),
        (kept_tokens, "one by one: --enable-linear-replayssm"),
    ),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_drafts_that_do_not_fit(change, why, engine, on_hopper, caplog):
    """A step without drafts of the same layer fits."""
    caplog.set_level(logging.INFO)
    case = CHAINS[0]
    x = make(case, "cpu")
    backend = OfNewerReleases(x)
    sglang.use_flash_qla()
    layer = layer_of(engine, x, case)
    one = layer(tokens_of(x)[:3], engine.set_backend(backend))
    change(layer, backend)
    assert layer(tokens_of(x), engine.set_backend(backend, drafts=3)) == "theirs"
    assert type(one) is torch.Tensor and why in caplog.text


def test_older_releases(engine, on_hopper):
    """The batch has the backend, and copies for the radix cache know no layer."""
    case = CASES[0]
    x = make(case, "cpu")
    reference, backend = expected(x), OfOlderReleases(x)
    batch = engine.set_backend(backend, is_new=False)
    sglang.use_flash_qla()
    y = layer_of(engine, x, case)(tokens_of(x), batch)
    assert relative_error(y.double() / 2, reference["y"].flatten(0, 1).flatten(1)) < BARS[2]
    assert len(backend.tracked) == 1 and len(backend.tracked[0]) == 4


@pytest.mark.gpu
@torch.inference_mode()
def test_a_cuda_graph(engine):
    """Captured once, it decodes other tokens in other slots."""
    case = CASES[2]
    x, other = (make(case, "cuda", seed) for seed in (0, 1))
    batch, tokens = engine.set_backend(OfNewerReleases(x)), tokens_of(x)
    sglang.use_flash_qla()
    layer = layer_of(engine, x, case)
    before = {name: x[name].clone() for name in ("window_pool", "state_pool")}
    layer(tokens, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(tokens, batch)
    for name, pool in before.items():
        x[name].copy_(pool)
    x["state_indices"].copy_(x["state_indices"].flip(0))
    reference = expected(x | {name: other[name] for name in ("mixed", "z", "a", "b")})
    tokens.copy_(tokens_of(other))
    graph.replay()
    assert relative_error(y.double() / 2, reference["y"].flatten(0, 1).flatten(1).cuda()) < BARS[2]
    assert torch.equal(x["window_pool"].double().cpu(), reference["window_pool"])


def test_other_steps_are_theirs(engine, on_hopper):
    case = CASES[0]
    x = make(case, "cpu")
    before = {name: x[name].clone() for name in ("window_pool", "state_pool")}
    sglang.use_flash_qla()
    layer, tokens = layer_of(engine, x, case), tokens_of(x)
    backend = OfNewerReleases(x)
    batch = engine.set_backend(backend)
    for name in ("forward_mode", "logical_forward_mode"):
        assert layer(tokens, SimpleNamespace(**vars(batch) | {name: mode("extend")})) == "theirs"
    assert layer(tokens[:3], batch) == layer((tokens, tokens), batch) == "theirs"
    backend.forward_metadata = SimpleNamespace()
    assert layer(tokens, batch) == "theirs"
    engine.modules[ATTENTION].get_attn_backend = SimpleNamespace  # such as that of two batches at a time
    assert layer(tokens, batch) == "theirs"
    engine.set_backend(OfNewerReleases(x))
    engine.modules[BACKEND].GDNAttnBackend = GDNAttnBackend  # of which the layer's is a subclass
    assert layer(tokens, batch) == "theirs"
    for name, pool in before.items():
        assert torch.equal(x[name], pool)


def test_a_compiled_layer_is_theirs(engine):
    """Without a graph break: SGLang compiles whole models."""
    case = CASES[0]
    x = make(case, "cpu")
    batch = engine.set_backend(OfNewerReleases(x))
    sglang.use_flash_qla()
    layer = layer_of(engine, x, case)
    assert torch.compile(layer, backend="eager", fullgraph=True)(tokens_of(x), batch) == "theirs"
    assert layer not in _sglang_layer._reasons


def change_kernel(layer, backend):
    backend.kernel_dispatcher.decode_kernel = object()


def change_replay(layer, backend):
    backend.req_to_token_pool.mamba2_layer_cache(3).replayssm_d = torch.zeros(1)


def change_windows(layer, backend):
    pools = backend.req_to_token_pool.mamba2_layer_cache(3)
    pools.conv = [pools.conv[0][..., :2]]


def change_hook(layer, backend):
    layer.norm.register_forward_hook(lambda *arguments: None)


def change_hook_of_attention(layer, backend):
    layer.attn.register_forward_hook(lambda *arguments: None)


def change_groups(layer, backend):
    layer.norm.group_size = 64


def change_names(layer, backend):
    del layer.layer_norm_epsilon


def change_attention(layer, backend):
    del layer.attn.A_log


def change_nothing(layer, backend):
    pass


@pytest.mark.parametrize(
    ("change", "of_case", "why"),
    (
        (change_nothing, {}, "as one call"),
        (change_kernel, {}, "one by one: object decodes"),
        (change_replay, {}, "one by one: --enable-linear-replayssm"),
        (change_windows, {}, "one by one: windows are [7, 1024, 2] for weights [1024, 4]"),
        (change_hook, {}, "one by one: its attention or norm has a hook"),
        (change_hook_of_attention, {}, "one by one: its attention or norm has a hook"),
        (change_groups, {}, "one by one: the norm has a bias, groups"),
        (change_names, {}, "no attribute 'layer_norm_epsilon'"),
        (change_attention, {}, "no attribute 'A_log'"),
        (change_nothing, {"dtype": torch.float16}, "expected bfloat16"),
        (change_nothing, {"H_k": 1, "H_v": 5}, "5 value heads"),
    ),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_layers_that_do_not_fit(change, of_case, why, engine, on_hopper, caplog):
    """They run SGLang's own forward, and one line of the log says why."""
    caplog.set_level(logging.INFO)
    case = dataclasses.replace(CASES[0], **of_case)
    x = make(case, "cpu")
    backend = OfNewerReleases(x)
    batch = engine.set_backend(backend)
    sglang.use_flash_qla()
    for _ in range(2):
        layer = layer_of(engine, x, case)
        change(layer, backend)
        for _ in range(2):
            assert (type(layer(tokens_of(x), batch)) is torch.Tensor) == (why == "as one call")
    (message,) = [x.message for x in caplog.records if x.name == "sglang.flash_qla" and "convolution" in x.message]
    assert why in message


def test_a_backend_that_does_not_fit(engine, on_hopper, caplog):
    caplog.set_level(logging.INFO)
    case = CASES[0]
    x = make(case, "cpu")
    backend = type("WithoutTracking", (), vars(OfNewerReleases(x)))()
    batch = engine.set_backend(backend)
    sglang.use_flash_qla()
    assert layer_of(engine, x, case)(tokens_of(x), batch) == "theirs"
    assert "'WithoutTracking' object has no attribute '_track_mamba_state_decode'" in caplog.text


def test_another_gpu(engine, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    case = CASES[0]
    x = make(case, "cpu")
    batch = engine.set_backend(OfNewerReleases(x))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    sglang.use_flash_qla()
    assert layer_of(engine, x, case)(tokens_of(x), batch) == "theirs" and "compute capability 9.0" in caplog.text


def test_use_and_restore(engine, monkeypatch, caplog):
    """A layer whose forward has other arguments stays, and the functions are replaced."""
    caplog.set_level(logging.INFO)
    classes = [vars(engine.modules[path])[name] for path, name in engine.classes]
    before = [x.forward for x in classes]
    for _ in range(2):
        sglang.use_flash_qla()
        assert all(x.forward is not original for x, original in zip(classes, before, strict=True))
    sglang.restore()
    assert [x.forward for x in classes] == before
    monkeypatch.setattr(classes[0], "forward", lambda self, hidden_states, forward_batch, residual: None)
    changed = classes[0].forward
    delattr(engine.modules[engine.classes[1][0]], engine.classes[1][1])
    sglang.use_flash_qla()
    assert classes[0].forward is changed
    of_functions = vars(engine.modules[BACKEND])["causal_conv1d_fn"]
    assert engines.ours_of(of_functions) is sglang.causal_conv1d_fn
    for (path, name), difference in zip(
        engine.classes, ("has arguments (self, hidden_states,", "is not there"), strict=True
    ):
        assert f"sglang keeps its own layer: {path}.{name}.forward {difference}" in caplog.text


@pytest.mark.parametrize("is_plugin", (False, True))
def test_a_module_that_is_imported_later(is_plugin, tmp_path, monkeypatch):
    """Its layer is replaced then, unless the functions have been restored."""
    package = f"engine_{tmp_path.name}"
    (tmp_path / package).mkdir()
    for name in ("functions", "first", "second", "other"):
        source = "def function(q): return 1\nclass Layer:\n    def forward(self): return 1\n"
        (tmp_path / package / f"{name}.py").write_text(source if name != "other" else "")
    monkeypatch.syspath_prepend(tmp_path)
    paths = [f"{package}.{name}" for name in ("first", "second", "other")]
    ours = _engines.Replacement(
        "engine 1",
        {f"{package}.functions": {"function": lambda q: 10}},
        methods={path: {"Layer.forward": lambda theirs: lambda self: 10 + theirs(self)} for path in paths},
        package="engine",
    )
    reports = []
    ours.use_when_imported(lambda *report: reports.append(report)) if is_plugin else ours.use()
    assert not {*paths} & sys.modules.keys()
    functions, first, _ = (importlib.import_module(f"{package}.{name}") for name in ("functions", "first", "other"))
    assert functions.function(0) == 10 and first.Layer().forward() == 11
    layers = [(f"Layer.forward of {paths[0]}", None)]
    assert reports == ([(f"function of {package}.functions", None), *layers] if is_plugin else [])
    ours.restore()
    second = importlib.import_module(paths[1])
    assert functions.function(0) == first.Layer().forward() == second.Layer().forward() == 1
    ours.use()
    assert first.Layer().forward() == second.Layer().forward() == 11
