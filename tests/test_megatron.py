"""Megatron-core's Gated DeltaNet layers on flash_qla: the functions that they find and the calls that they make.

Megatron-core is rarely installed, so most tests rebuild its modules and the calls of its layer. Megatron's own layer
runs where Megatron-core 0.19 can be imported, which needs Triton, and on the CPU the layer must not find FLA.
"""

import sys
import types
from types import SimpleNamespace

import pytest
import reference
import torch
import torch.nn.functional as F
from accuracy import relative_error
from engines import ours_of, with_another_default

import flash_qla
from flash_qla.integrations import fla, megatron

PACKAGE = "megatron.core.ssm.gated_delta_net"
HIDDEN, H_K, H_V, K, V, W = 32, 2, 4, 16, 24, 4
SECTIONS = (H_K * K, H_K * K, H_V * V, H_V, H_V)  # q, k, v, beta, alpha
CU_SEQLENS = torch.tensor([0, 70, 71, 71, 100], dtype=torch.int32)


def of_megatron(q, k, v, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, cu_seqlens=None):  # fmt: skip
    raise AssertionError("Megatron's own function was called")


def of_fla(*args, **kwargs):
    raise AssertionError("FLA's function was called")


@pytest.fixture(params=(True, False), ids=("with FLA", "without FLA"))
def has_fla(request):
    return request.param


@pytest.fixture
def modules(has_fla, monkeypatch):
    """Stand-ins for the modules of Megatron-core's layer."""
    theirs = of_fla if has_fla else None
    common, gdn = (types.ModuleType(f"{PACKAGE}.{name}") for name in ("common", "gdn"))
    common.HAVE_FLA, common.l2norm = has_fla, theirs
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = theirs, theirs
    gdn.torch_chunk_gated_delta_rule = of_megatron
    for module in (common, gdn):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield SimpleNamespace(common=common, gdn=gdn)
    megatron.restore()


def names_of(modules) -> list[dict]:
    return [{name: x for name, x in vars(module).items() if name[:2] != "__"} for module in vars(modules).values()]


class Layer(torch.nn.Module):
    """The part of Megatron's layer between its projections, as far as it calls functions of its modules."""

    def __init__(self, modules, deterministic: bool):
        super().__init__()
        if not modules.common.HAVE_FLA:
            raise ImportError("FLA is not installed")
        self.modules_of_megatron, self.deterministic = modules, deterministic
        gdn = modules.gdn
        self.gated_delta_rule = gdn.torch_chunk_gated_delta_rule if deterministic else gdn.chunk_gated_delta_rule
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(sum(SECTIONS), HIDDEN, generator=generator) / HIDDEN**0.5)
        self.conv = torch.nn.Parameter(torch.randn(sum(SECTIONS[:3]), 1, W, generator=generator) / 2)
        self.A_log = torch.nn.Parameter(torch.zeros(H_V))
        self.dt_bias = torch.nn.Parameter(torch.full((H_V,), -2.0))

    def forward(self, x, cu_seqlens=None):
        """x: [B, T, HIDDEN]. Returns [B, T, H_V, V]."""
        qkv, beta, alpha = F.linear(x, self.weight).split((sum(SECTIONS[:3]), *SECTIONS[3:]), dim=-1)
        if self.deterministic:
            assert cu_seqlens is None
            y = F.conv1d(qkv.mT.contiguous(), self.conv, padding=W - 1, groups=qkv.shape[-1])
            qkv = F.silu(y[..., : x.shape[1]]).mT
        else:
            qkv, _ = self.modules_of_megatron.gdn.causal_conv1d(
                x=qkv, weight=self.conv.squeeze(1), bias=None, activation="silu", initial_state=None,
                output_final_state=False, cu_seqlens=cu_seqlens,
            )  # fmt: skip
        qk, v = qkv.split((2 * H_K * K, H_V * V), dim=-1)
        qk = self.modules_of_megatron.common.l2norm(qk.unflatten(-1, (-1, K)).contiguous())
        q, k = (part.repeat_interleave(H_V // H_K, dim=2) for part in qk.split(H_K, dim=2))
        g = -self.A_log.exp() * F.softplus(alpha.float() + self.dt_bias)
        o, _ = self.gated_delta_rule(
            q, k, v.unflatten(-1, (-1, V)), g=g, beta=beta.sigmoid(), initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=False, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o


def naive(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    """The fp64 recurrence in torch's operations, one token at a time."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    S, os = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    for t in range(v.shape[1]):
        S = torch.zeros_like(S) if t in starts else S * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * change[:, :, None]
        os.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * k.shape[3] ** -0.5)
    return torch.stack(os, 1).float(), None


def run_layer(layer, x, do, cu_seqlens=None):
    o = layer(x, cu_seqlens)
    return [o, *torch.autograd.grad(o, list(layer.parameters()), do)]


@pytest.mark.parametrize("has_fla", [False], indirect=True, ids=["without FLA"])
def test_layer_without_fla(modules):
    """The layer is refused without the integration. With it both modes give what the naive recurrence gives."""
    with pytest.raises(ImportError):
        Layer(modules, deterministic=True)
    megatron.use_flash_qla()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, HIDDEN, generator=generator)
    do = torch.randn(2, 70, H_V, V, generator=generator)
    layer = Layer(modules, deterministic=True)
    layer.gated_delta_rule = naive
    expected = run_layer(layer, x, do)
    for deterministic in (True, False):
        actual = run_layer(Layer(modules, deterministic), x, do)
        assert all(relative_error(y, z.double()) < 1e-5 for y, z in zip(actual, expected, strict=True))


@pytest.mark.parametrize("has_fla", [False], indirect=True, ids=["without FLA"])
def test_packed_layer_without_fla(modules):
    """Neither the convolution nor the recurrence crosses the border of a sequence."""
    megatron.use_flash_qla()
    generator = torch.Generator().manual_seed(1)
    x, do = (torch.randn(1, 100, *shape, generator=generator) for shape in ((HIDDEN,), (H_V, V)))
    packed = Layer(modules, deterministic=False)
    actual = run_layer(packed, x, do, CU_SEQLENS)
    alone = Layer(modules, deterministic=True)
    alone.gated_delta_rule = naive
    pieces = [run_layer(alone, x[:, first:last], do[:, first:last]) for first, last in ((0, 70), (70, 71), (71, 100))]
    o = torch.cat([piece[0] for piece in pieces], 1)
    expected = [o, *(sum(parts) for parts in zip(*(piece[1:] for piece in pieces), strict=True))]
    assert all(relative_error(y, z.double()) < 1e-5 for y, z in zip(actual, expected, strict=True))


def test_arguments_reach_the_ops():
    """All of them, also those that have one value in all calls of Megatron's layer."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    x, window = randn(1, 100, HIDDEN), randn(4, HIDDEN, W - 1)
    packed = {"output_final_state": True, "cu_seqlens": CU_SEQLENS}
    of_convolution = {"weight": randn(HIDDEN, W), "bias": randn(HIDDEN), "activation": None, "initial_state": window}
    tokens = {"q": randn(1, 100, H_V, K), "k": F.normalize(randn(1, 100, H_V, K), dim=-1) / 2}
    tokens |= {"v": randn(1, 100, H_V, V), "g": -torch.rand(1, 100, H_V), "beta": torch.rand(1, 100, H_V)}
    of_rule = {"initial_state": randn(4, H_V, K, V), "use_qk_l2norm_in_kernel": True}
    for ours, function, arguments in (
        (megatron.causal_conv1d, flash_qla.causal_conv1d, {"x": x} | of_convolution),
        (megatron.torch_chunk_gated_delta_rule, flash_qla.chunk_gated_delta_rule, tokens | of_rule),
    ):
        expected = function(**arguments | packed)
        assert all(torch.equal(y, z) for y, z in zip(ours(**arguments | packed), expected, strict=True))


def test_l2norm():
    """As the reference normalizes, zeros included, and in the dtype of x."""
    x = torch.randn(3, 5, K, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    assert relative_error(megatron.l2norm(x), reference.l2norm(x.double())) < 1e-6
    for y in (x, 1e-3 * x):  # where eps counts
        rounded, expected = megatron.l2norm(y.bfloat16()), reference.l2norm(y.bfloat16().double())
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.double(), expected.bfloat16().double())


def test_use_and_restore(modules, has_fla):
    before = names_of(modules)
    for _ in range(2):
        megatron.use_flash_qla()
        common, gdn = names_of(modules)
        assert ours_of(gdn["chunk_gated_delta_rule"]) is fla.chunk_gated_delta_rule
        assert ours_of(gdn["torch_chunk_gated_delta_rule"]) is megatron.torch_chunk_gated_delta_rule
        assert common["HAVE_FLA"]
        others = (common["l2norm"], gdn["causal_conv1d"])
        assert others == ((of_fla, of_fla) if has_fla else (megatron.l2norm, megatron.causal_conv1d))
    for _ in range(2):
        megatron.restore()
        assert names_of(modules) == before


CHANGES = {
    "other arguments": ("gdn", "torch_chunk_gated_delta_rule", lambda q, k: None, "(q, k)"),
    "other defaults": ("gdn", "torch_chunk_gated_delta_rule", with_another_default(of_megatron), "'another'"),
    "no function of Megatron": ("gdn", "torch_chunk_gated_delta_rule", None, "nothing"),
    "no name of FLA's function": ("gdn", "chunk_gated_delta_rule", ..., "nothing"),
    "no name of the convolution": ("gdn", "causal_conv1d", ..., "nothing"),
    "no name of the norm": ("common", "l2norm", ..., "nothing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_releases(change, modules):
    """Nothing changes, and the message names the function, what came, and Megatron's release."""
    module, name, value, message = CHANGES[change]
    if value is ...:
        delattr(getattr(modules, module), name)
    else:
        setattr(getattr(modules, module), name, value)
    before = names_of(modules)
    with pytest.raises(RuntimeError, match=rf"{PACKAGE}.{module}.{name} is .*Megatron-core 0.19.2") as error:
        megatron.use_flash_qla()
    assert message in str(error.value)
    assert names_of(modules) == before


def test_what_is_refused(modules, monkeypatch):
    x, gate = torch.randn(1, 4, 1, 8), torch.zeros(1, 4, 1)
    with pytest.raises(NotImplementedError, match="chunk_size is 32"):
        megatron.torch_chunk_gated_delta_rule(x, x, x, gate, gate, chunk_size=32)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.gdn", None)
    with pytest.raises(ImportError, match=PACKAGE):
        megatron.use_flash_qla()


# Megatron's own layer


class Projection(torch.nn.Linear):
    def __init__(self, inputs, outputs, *, config, **others):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


class Norm(torch.nn.RMSNorm):
    def __init__(self, *, config, hidden_size, eps):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


def build_layer(gdn, device: str, dtype: torch.dtype, deterministic: bool) -> torch.nn.Module:
    from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, activation_func=F.silu, params_dtype=dtype,
        linear_conv_kernel_dim=W, linear_key_head_dim=K, linear_value_head_dim=V, linear_num_key_heads=H_K,
        linear_num_value_heads=H_V, deterministic_mode=deterministic, perform_initialization=False,
    )  # fmt: skip
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    layer = gdn.GatedDeltaNet(
        config,
        GatedDeltaNetSubmodules(in_proj=Projection, out_norm=Norm, out_proj=Projection),
        layer_number=1,
        pg_collection=SimpleNamespace(tp=alone, cp=alone),
    )
    layer.A_log.data.zero_()
    layer.dt_bias.data.fill_(-2)
    return layer.to(device)


@pytest.fixture
def megatron_core(device, monkeypatch):
    """Megatron's module. On the CPU, where FLA's kernels do not run, as if FLA were not installed."""
    on_cpu = device == "cpu"
    if on_cpu:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "fla", None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    gdn = pytest.importorskip(
        f"{PACKAGE}.gdn", reason="Megatron-core 0.19 or Triton is not installed", exc_type=ImportError
    )
    if on_cpu and gdn.chunk_gated_delta_rule is not None:
        pytest.skip("Megatron-core was imported before with FLA, whose kernels need a GPU")
    megatron.use_flash_qla()
    yield gdn
    megatron.restore()


def run_megatron(layer, x, packed) -> dict:
    """y and the gradients of the parameters, by name."""
    y, _ = layer(x, None, packed_seq_params=packed)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return {"y": y, **dict(zip(names, torch.autograd.grad(y.float().square().sum(), parameters), strict=True))}


def errors(actual: dict, exact: dict) -> tuple[float, float]:
    """The relative error of y, and the root mean square of those of the gradients."""
    y, *gradients = (relative_error(actual[name], x.double()) for name, x in exact.items())
    return y, torch.tensor(gradients).square().mean().sqrt().item()


def packing(device: str) -> SimpleNamespace:
    offsets = CU_SEQLENS.to(device)
    return SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )  # fmt: skip


# The largest ratio of errors to those of the same bf16 layer with the naive recurrence, as in test_fla.py: that one
# rounds its result and nothing else, and the kernels round within.
LAYER_RATIO = 3.0


@pytest.mark.parametrize("kind", ("deterministic", "batch", "packed"))
@torch.backends.cudnn.flags(deterministic=True, allow_tf32=False)
def test_layer_of_megatron(kind, device, megatron_core):
    """Beside the same layer with the naive recurrence: in fp32 on the CPU, and in bf16 on the GPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = build_layer(megatron_core, device, dtype, kind == "deterministic")
    shape = (100, 1, HIDDEN) if kind == "packed" else (70, 2, HIDDEN)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    packed = packing(device) if kind == "packed" else None
    actual, again = run_megatron(layer, x, packed), run_megatron(layer, x, packed)
    if kind == "deterministic":  # the gradients of other parameters pass through torch's convolution
        assert all(torch.equal(actual[name], again[name]) for name in ("y", "A_log", "dt_bias"))
    layer.gated_delta_rule = lambda q, *args, **kwargs: (naive(q, *args, **kwargs)[0].to(q.dtype), None)
    naively = run_megatron(layer, x, packed)
    if device == "cpu":
        assert all(relative_error(actual[name], x.double()) < 1e-5 for name, x in naively.items())
        return
    exact = run_megatron(layer.float(), x.float(), packed)
    for ours, theirs in zip(errors(actual, exact), errors(naively, exact), strict=True):
        assert ours < LAYER_RATIO * theirs
