"""Steps of decoding of vLLM's layer, on stand-ins of the layer and of its metadata, against the formula in float64."""

import dataclasses
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accuracy import relative_error
from test_decode_region_drafts import BARS, Case, expected, make

import flash_qla
from flash_qla.integrations import _engines, _layers, _vllm_layer, vllm

PREFIX = "model.layers.0.linear_attn"


class Layer:
    """The attributes and methods of vLLM's layer that a step of decoding needs."""

    def __init__(self, config, vllm_config, prefix="", gqa_interleaved_layout=False, reduce_results=True):
        vars(self).update(vars(config), prefix=prefix, gqa_interleaved_layout=gqa_interleaved_layout)
        self.enable_fused_gdn_spec_decode = False

    def get_state_dtype(self):
        return tuple(x.dtype for x in self.kv_cache)

    def _forward_core_fused_norm_packed(self, mixed_qkvz, ba, core_attn_out):
        self.calls.append("theirs")


def layer_of(x: dict, case: Case, device: str, *, rows_last: bool = True, cls=Layer) -> Layer:
    """A layer with the tensors of a call; its pool of windows is [slots, D, columns] if rows_last, else transposed."""
    windows = x["window_pool"] if rows_last else x["window_pool"].mT
    options = {"norm_eps": 1e-6, "norm_activation": "silu"} | dict(case.options)
    config = SimpleNamespace(
        conv1d=SimpleNamespace(weight=x["conv_weight"][:, None], bias=x["conv_bias"]),
        norm=SimpleNamespace(
            weight=x["norm_weight"], activation=options["norm_activation"], norm_before_gate=True, group_size=None
        ),
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        kv_cache=(windows, x["state_pool"]),
        num_k_heads=2 * case.H_k,
        num_v_heads=2 * case.H_v,
        tp_size=2,
        head_k_dim=case.K,
        head_v_dim=case.V,
        layer_norm_epsilon=options["norm_eps"],
        activation="silu",
        gdn_decode_kernel="triton",
        calls=[],
    )
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=case.dtype))
    return cls(config, vllm_config, PREFIX, case.by_key_heads)


def in_one(x: dict, *names: str) -> torch.Tensor:
    """Tokens' tensors in one, as a projection has them: [tokens, channels]."""
    of_heads = x["mixed"].dim() == 4
    tensors = [y.flatten(3 if of_heads else 2) for y in (x[name] for name in names)]
    return torch.cat(tensors, -1).flatten(0, 1).flatten(1)


def padded(table: torch.Tensor | None) -> torch.Tensor | None:
    """With rows behind those of the step, as in CUDA graphs."""
    return None if table is None else torch.cat([table, table[-1:].expand(2, *table.shape[1:])])


def step_of(x: dict, tokens: int) -> SimpleNamespace:
    """The metadata of a step of decoding."""
    has_drafts = "num_accepted_tokens" in x
    N, indices = x["state_indices"].shape[0], padded(x["state_indices"])
    return SimpleNamespace(
        num_prefills=0,
        num_decodes=0 if has_drafts else N,
        num_decode_tokens=0 if has_drafts else N,
        checkpoint=None,
        flashinfer_checkpoint_plan=None,
        num_spec_decodes=N if has_drafts else 0,
        num_actual_tokens=tokens,
        spec_sequence_masks=torch.ones(N, dtype=torch.bool) if has_drafts else None,
        non_spec_state_indices_tensor=None if has_drafts else indices,
        spec_state_indices_tensor=indices if has_drafts else None,
        spec_query_start_loc=padded(x.get("cu_seqlens")),
        num_accepted_tokens=padded(x.get("num_accepted_tokens")),
    )


@pytest.fixture
def run(monkeypatch):
    """Runs the layer's method in a step."""

    def run(layer, metadata, *arguments):
        module = ModuleType("vllm.forward_context")
        attn_metadata = {PREFIX: metadata} if metadata is not None else None
        module.get_forward_context = lambda: SimpleNamespace(attn_metadata=attn_metadata)
        monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
        method = _vllm_layer.forward_core(type(layer)._forward_core_fused_norm_packed)
        method(layer, *arguments)

    return run


# vLLM's null slot, and a layer's numbers that are not the default
OPTIONS = (("null_index", 0), ("norm_eps", 1e-2), ("norm_activation", "sigmoid"))
ONE = {"T": 1, "indices": (4, 0, 6, 2), "options": OPTIONS}
SEVERAL = {"lengths": (4, 2, 1, 0, 3), "indices": (4, 5, 6, 2, 3), "accepted": (1, 3, 2, 1, 4)}
MOST = {"lengths": (8, 3), "indices": (2, 5), "accepted": (5, 1), "steps": 8}
CASES = (
    (Case(**ONE | {"options": OPTIONS[:1]}), {}),
    (Case(**ONE, by_key_heads=True, state_dtype=torch.bfloat16), {"rows_last": False}),
    (Case(**SEVERAL, options=OPTIONS), {}),
    (Case(**SEVERAL, options=OPTIONS, by_key_heads=True, columns_last=False), {"rows_last": False}),
    (Case(**MOST, options=OPTIONS), {}),
)


@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_decode(case, options, device, run):
    """Rows beyond the step's tokens stay as they are, and padded sequences change nothing."""
    x = make(case, device)
    layer = layer_of(x, case, device, **options)
    layer.has_flash_qla_region = True
    qkvz, ba = in_one(x, "mixed", "z"), in_one(x, "b", "a")
    tokens = qkvz.shape[0]
    reference = expected(x)
    qkvz, ba = (torch.cat([y, y.new_full((2, y.shape[1]), torch.nan)]) for y in (qkvz, ba))
    out = torch.full((tokens + 2, case.H_v, case.V), 7.0, dtype=case.dtype, device=device)
    run(layer, step_of(x, tokens), qkvz, ba, out)
    assert layer.calls == [] and (out[tokens:] == 7).all()
    y = reference["y"].flatten(0, 1).to(device)
    assert relative_error(out[:tokens].double(), y) < BARS[2]
    assert torch.equal(x["window_pool"].double().cpu(), reference["window_pool"])
    states = x["state_pool"].double()
    assert relative_error(states, reference["state_pool"].to(device)) < BARS[x["state_pool"].element_size()]


def test_a_step_without_drafts_has_the_first_columns(run):
    """With drafts in other steps windows are wider; vLLM's own update takes and writes their first columns too."""
    case = Case(**ONE)
    x = make(case, "cpu")
    wide = torch.cat([x["window_pool"], torch.full_like(x["window_pool"], 5.0)], -1)
    layer = layer_of(x | {"window_pool": wide}, case, "cpu")
    layer.has_flash_qla_region = True
    reference = expected(x)
    out = torch.zeros(4, case.H_v, case.V, dtype=case.dtype)
    run(layer, step_of(x, 4), in_one(x, "mixed", "z"), in_one(x, "b", "a"), out)
    assert torch.equal(wide[..., :3].double(), reference["window_pool"]) and (wide[..., 3:] == 5).all()
    assert relative_error(out.double(), reference["y"].flatten(0, 1)) < BARS[2]


class ByKeyHeads(Layer):
    def fix_query_key_value_ordering(self, mixed_qkvz, ba):
        mixed, z, b, a = _vllm_layer.split_projections(self, mixed_qkvz, ba)
        q, k, v = mixed.split([self.head_k_dim, self.head_k_dim, mixed.shape[-1] - 2 * self.head_k_dim], -1)
        v = v.unflatten(-1, (-1, self.head_v_dim)).flatten(1, 2)
        b, a = torch.stack([b.flatten(1), a.flatten(1)], -1).unbind(-1)  # views, as with one value head of a key head
        return q, k, v, z.flatten(1, 2), b, a

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        self.calls.append((mixed_qkv, b, a))
        core_attn_out[:3] = 1

    def _rms_norm_gated_cuda(self, x, output_gate, out):
        self.calls.append(output_gate)
        out.mul_(output_gate)


@pytest.mark.parametrize("decodes", (0, 2))
@pytest.mark.parametrize("by_key_heads", (False, True))
def test_prefill(decodes, by_key_heads, device, run):
    """Prompts, one of which starts from zero, after the tokens of sequences that decode."""
    lengths = (*(1,) * decodes, 9, 5, 3)
    case = Case(lengths=lengths, indices=(4, 2, 6, 0, 3)[: len(lengths)], by_key_heads=by_key_heads, options=OPTIONS)
    x = make(case, device)
    fresh = x["state_indices"][decodes]
    for name in ("state_pool", "window_pool"):
        x[name][fresh] = 0
    reference = expected(x)
    for name in ("state_pool", "window_pool"):
        x[name][fresh] = torch.nan
    layer = layer_of(x, case, device, cls=ByKeyHeads)
    layer.has_flash_qla_region = True
    tokens = sum(lengths)
    step = step_of(x, tokens)
    vars(step).update(
        num_prefills=3,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        prefill_query_start_loc=x["cu_seqlens"][decodes:] - decodes,
        prefill_state_indices=x["state_indices"][decodes:],
        prefill_has_initial_state=torch.tensor([False, True, True], device=device),
    )
    out = torch.full((tokens + 2, case.H_v, case.V), 7.0, dtype=case.dtype, device=device)
    run(layer, step, in_one(x, "mixed", "z"), in_one(x, "b", "a"), out)
    assert layer.calls == [] and (out[tokens:] == 7).all()
    assert relative_error(out[:tokens].double(), reference["y"][0].to(device)) < BARS[2]
    used = x["state_indices"][x["state_indices"] > 0].long().cpu()
    assert torch.equal(x["window_pool"].double().cpu()[used], reference["window_pool"][used])
    assert relative_error(x["state_pool"].double().cpu()[used], reference["state_pool"][used]) < BARS[4]


@pytest.mark.parametrize("value", ("0", "1"))
def test_batch_invariant_mode(value, run, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    modes, original = [], flash_qla.prefill_gated_delta_net

    def recorded(*args, **named):
        modes.append(named.get("batch_invariant", False))
        return original(*args, **named)

    monkeypatch.setattr(flash_qla, "prefill_gated_delta_net", recorded)
    test_prefill(0, False, "cpu", run)
    assert modes == [value == "1"]


@pytest.mark.parametrize("kind", ("tokens", "drafts", "prompts"))
def test_other_steps_are_theirs(kind, run):
    """Each differs in one thing from a step that is ours."""
    case = Case(**{"tokens": ONE, "drafts": SEVERAL, "prompts": {"lengths": (9, 1), "indices": (4, 2)}}[kind])
    x = make(case, "cpu")
    windows, states = (x[name].clone() for name in ("window_pool", "state_pool"))
    qkvz, ba = in_one(x, "mixed", "z"), in_one(x, "b", "a")
    arguments = qkvz, ba, torch.zeros(len(qkvz), case.H_v, case.V, dtype=case.dtype)
    step = step_of(x, len(qkvz))
    many = torch.zeros(len(qkvz), 9, dtype=torch.int32)
    if kind == "tokens":
        changes = (({"num_decodes": 0}, {}), ({"non_spec_state_indices_tensor": many}, {}))
    elif kind == "drafts":
        changes = (
            ({"num_prefills": 1}, {}),
            ({"num_decodes": 1}, {}),
            ({"spec_state_indices_tensor": many}, {}),
            ({}, {"gdn_decode_kernel": "cuda"}),
        )
    else:
        vars(step).update(
            num_prefills=2,
            num_decodes=0,
            num_decode_tokens=0,
            prefill_query_start_loc=x["cu_seqlens"],
            prefill_state_indices=x["state_indices"],
            prefill_has_initial_state=torch.tensor([True, True]),
        )
        changes = (
            ({"num_prefills": 0}, {}),
            ({"spec_sequence_masks": torch.ones(2, dtype=torch.bool)}, {}),
            ({"checkpoint": 1}, {}),
            ({"flashinfer_checkpoint_plan": 1}, {}),
            ({"prefill_state_indices": None}, {}),
            ({}, {"kv_cache": (torch.cat([x["window_pool"]] * 2, -1), x["state_pool"])}),
        )
    for change, attributes in (*changes, ({}, {"has_flash_qla_region": False}), (None, {}), ({}, {})):
        layer = layer_of(x, case, "cpu")
        vars(layer).update({"has_flash_qla_region": True} | attributes)
        is_ours = change == attributes == {}
        run(layer, None if change is None else SimpleNamespace(**vars(step) | change), *arguments)
        assert layer.calls == ([] if is_ours else ["theirs"])
        for name, tensor in (("window_pool", windows), ("state_pool", states)):
            assert torch.equal(x[name], tensor) != is_ours


@pytest.mark.parametrize("decodes", (1, 2))
def test_several_tokens_of_a_sequence_beside_a_prompt_are_theirs(decodes, run):
    """Two tokens of decoding are a step of ours only if they are of two sequences."""
    case = Case(lengths=(1, 1, 9), indices=(4, 2, 6))
    x = make(case, "cpu")
    step = step_of(x, 11)
    vars(step).update(
        num_prefills=1,
        num_decodes=decodes,
        num_decode_tokens=2,
        prefill_query_start_loc=x["cu_seqlens"][2:] - 2,
        prefill_state_indices=x["state_indices"][2:],
        prefill_has_initial_state=torch.tensor([True]),
    )
    layer = layer_of(x, case, "cpu")
    layer.has_flash_qla_region = True
    out = torch.zeros(11, case.H_v, case.V, dtype=case.dtype)
    run(layer, step, in_one(x, "mixed", "z"), in_one(x, "b", "a"), out)
    assert layer.calls == ([] if decodes == 2 else ["theirs"])


def test_another_step_by_key_heads(run):
    """vLLM's path has no such layout: the tokens are sorted as in the layer without it, then core and norm run."""
    case = Case(T=4, indices=(2,), by_key_heads=True)
    x = make(case, "cpu")
    layer = layer_of(x, case, "cpu", cls=ByKeyHeads)
    layer.has_flash_qla_region = True
    out = torch.zeros(4, case.H_v, case.V, dtype=case.dtype)
    step = SimpleNamespace(**vars(step_of(x, 3)) | {"num_prefills": 1, "checkpoint": 1})
    run(layer, step, in_one(x, "mixed", "z"), in_one(x, "b", "a"), out)
    (mixed, b, a), z = layer.calls
    assert b.is_contiguous() and a.is_contiguous()  # as vLLM's kernels read them
    from test_decode_region import plain

    packed = plain(x)
    assert torch.equal(mixed, packed["mixed"][0]) and torch.equal(b, packed["b"][0]) and torch.equal(a, packed["a"][0])
    assert torch.equal(z, packed["z"][0, :3]) and torch.equal(out[:3], z) and not out[3:].any()


SIZES = {"head_k_dim": 128, "head_v_dim": 128, "num_k_heads": 4, "num_v_heads": 16, "activation": "silu"}
NORM = {"activation": "silu", "norm_before_gate": True, "group_size": None, "bias": None}
DTYPES = {"weight": torch.bfloat16, "dtype": torch.bfloat16, "windows": torch.bfloat16, "states": torch.float32}
OTHERS = {"head_k_dim": (136, 100), "head_v_dim": (136, 100), "num_v_heads": (20,), "activation": (None, "gelu")}
OTHERS_OF_NORM = {"activation": (None, "gelu"), "norm_before_gate": (False,), "group_size": (64,), "bias": (0,)}
OTHER_DTYPES = dict.fromkeys(DTYPES, (torch.float16, torch.float32)) | {"states": (torch.float64, torch.float8_e4m3fn)}


def test_what_fits_a_layer(monkeypatch):
    """What does not fit differs in one thing from what does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fits(sizes=(), norm=(), dtypes=(), taps=4):
        dtypes = DTYPES | dict(dtypes)
        conv = SimpleNamespace(weight=torch.empty(3, taps, dtype=dtypes.pop("weight")))
        layer = SimpleNamespace(**SIZES | dict(sizes), conv1d=conv, norm=SimpleNamespace(**NORM | dict(norm)))
        return _layers.why_not(layer, **dtypes) is None

    def of(changes):
        return ({name: x} for name, values in changes.items() for x in values)

    assert fits() and fits(norm={"group_size": 128}) and fits({"head_k_dim": 8, "head_v_dim": 512, "num_v_heads": 4})
    assert all(fits(norm={"activation": x}) for x in ("swish", "sigmoid")) and fits({"activation": "swish"})
    assert all(fits(dtypes={"states": x}) for x in (torch.bfloat16, torch.float16))
    assert not any(fits(taps=x) for x in (2, 3, 5)) and not any(map(fits, of(OTHERS)))
    assert not any(fits(norm=x) for x in of(OTHERS_OF_NORM)) and not any(fits(dtypes=x) for x in of(OTHER_DTYPES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not fits()


def test_a_part_with_hooks_is_not_plain():
    part = torch.nn.Linear(2, 2)
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    for register in (getattr(part, f"register_{kind}") for kind in kinds):
        assert _layers.is_plain(part)
        hook = register(lambda *arguments: None)
        assert not _layers.is_plain(part)
        hook.remove()
    for name in ("forward", "_old_forward"):
        setattr(part, name, part.forward)
        assert not _layers.is_plain(part)
        delattr(part, name)


def test_the_constructor(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    case = Case(**ONE)
    x = make(case, "cpu")
    _layers.say.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Layer, "__init__", _vllm_layer.with_region(Layer.__init__))
    for capability, change, why in (
        ((9, 0), {}, "as one call"),
        ((8, 0), {}, "compute capability 9.0"),
        ((9, 0), {"dtype": torch.float16}, "expected bfloat16"),
        ((9, 0), {"H_k": 1, "H_v": 5}, "5 value heads"),
        ((9, 0), {"state_dtype": torch.float8_e4m3fn}, "states have torch.float8"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        of_layer = dataclasses.replace(case, **change)
        inputs = x if not change else make(of_layer, "cpu")
        for _ in range(2):
            layer = layer_of(inputs, of_layer, "cpu")
        assert layer.has_flash_qla_region == layer.enable_fused_gdn_spec_decode == (why == "as one call")
        assert why in caplog.records[-1].message
    assert len(caplog.records) == 5


@pytest.mark.parametrize("is_fused", (False, True))
def test_restore(is_fused, monkeypatch, run):
    """A layer has vLLM's own path again, which it had before only with vLLM's kernel of drafts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    class Fused(Layer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.enable_fused_gdn_spec_decode = is_fused

    case = Case(**ONE)
    x = make(case, "cpu")
    monkeypatch.setattr(Fused, "__init__", _vllm_layer.with_region(Fused.__init__))
    layer = layer_of(x, case, "cpu", cls=Fused)
    assert layer.has_flash_qla_region and layer.enable_fused_gdn_spec_decode
    vllm.restore()
    assert not layer.has_flash_qla_region and layer.enable_fused_gdn_spec_decode == is_fused
    out = torch.zeros(4, case.H_v, case.V, dtype=case.dtype)
    run(layer, step_of(x, 4), in_one(x, "mixed", "z"), in_one(x, "b", "a"), out)
    assert layer.calls == ["theirs"]


def test_a_release_with_another_layer(monkeypatch, caplog):
    """Its functions are replaced, its layer is not, and the log says so."""
    caplog.set_level(logging.INFO)
    module = ModuleType("engine")
    module.function, module.Layer = lambda x: 1, type("Layer", (), {"one": lambda self: 1, "two": lambda self, x: 2})
    monkeypatch.setitem(sys.modules, "engine", module)

    def replacement(*names):
        def method(theirs):
            return lambda self: 10 + theirs(self)

        methods = {"engine": dict.fromkeys(names, method)}
        return _engines.Replacement(
            "engine 1", {"engine": {"function": lambda x: 10}}, methods=methods, package="engine"
        )

    original = module.Layer.one
    for names, works in ((["Layer.one"], True), (["Layer.one", "Layer.two"], False), (["Layer.three"], False)):
        ours = replacement(*names)
        for _ in range(2):
            ours.use()
            assert module.function(0) == 10 and module.Layer().one() == (11 if works else 1)
        assert works or f"engine keeps its own layer: engine.{names[-1]}" in caplog.text
        ours.restore()
        assert module.function(0) == 1 and module.Layer.one is original
