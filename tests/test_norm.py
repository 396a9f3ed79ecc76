"""gated_rms_norm, the norm after the delta rule, against its formula in fp64, and what else holds for it."""

import itertools
from typing import NamedTuple

import pytest
import torch
from cases import as_slices, equal, restride
from poison import poisoned
from reference import gated_rms_norm as formula

import flash_qla

ops = torch.ops.flash_qla
# Relative L2 errors: one rounding of 16 bits, some of the others. dweight is a sum in the dtype of the arithmetic.
BARS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 16 * 2**-24, torch.float64: 16 * 2**-53}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = tuple(itertools.product(("silu", "sigmoid"), (True, False)))
NAMES = ("y", "do", "dz", "dweight")


class Case(NamedTuple):
    shape: tuple[int, ...] = (2, 7, 3, 128)
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    norm_before_gate: bool = True
    weight_dtype: torch.dtype = torch.float32
    eps: float = 1e-6

    @property
    def options(self) -> dict:
        return {"activation": self.activation, "norm_before_gate": self.norm_before_gate, "eps": self.eps}


def make(case: Case, device: str, size: float = 1) -> dict:
    """o, z, weight and dy, made on the CPU, so that both devices see the same numbers."""
    generator = torch.Generator().manual_seed(0)
    o, z, dy = (torch.randn(case.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(case.shape[-1], generator=generator, dtype=torch.float64).to(device, case.weight_dtype)
    o, z, dy = (x.to(device, case.dtype) for x in (size * o, size * z, dy))
    return {"o": o, "z": z, "weight": weight, "dy": dy}


def run(case: Case, tensors: dict, function=flash_qla.gated_rms_norm) -> dict:
    """y and the gradients, through autograd."""
    leaves = [tensors[x].detach().requires_grad_() for x in ("o", "z", "weight")]
    y = function(*leaves, **case.options)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, tensors["dy"])), strict=True))


def expected_of(case: Case, tensors: dict) -> dict:
    return run(case, {name: x.double() for name, x in tensors.items()}, formula)


def check(case: Case, tensors: dict) -> dict:
    with poisoned(tensors["o"].device.type):
        actual = run(case, tensors)
    for (name, x), expected in zip(actual.items(), expected_of(case, tensors).values(), strict=True):
        stored = case.weight_dtype if name == "dweight" else case.dtype
        assert x.dtype == stored and x.shape == expected.shape and (name == "dweight" or x.is_contiguous())
        arithmetic = torch.float64 if case.dtype == torch.float64 else torch.float32
        bar = max(BARS[stored], BARS[arithmetic])
        error = (x.double() - expected).norm() / expected.norm()
        assert error <= bar, f"{name}: relative L2 error {error:.2e} > {bar:.1e} {case}"
    return actual


@pytest.mark.parametrize("V", (3, 8, 40, 64, 96, 100, 128, 256, 264, 511, 512))
def test_values(device, V):
    dtypes = DTYPES if device == "cuda" else (*DTYPES, torch.float64)
    for dtype, (activation, before) in itertools.product(dtypes, KINDS):
        case = Case((2, 7, 3, V), dtype, activation, before)
        check(case, make(case, device))


@pytest.mark.parametrize("shape", ((8,), (5, 128), (33, 5, 512), (2, 3, 2, 5, 64), (1, 1, 1, 24)), ids=str)
def test_shapes(device, shape):
    """Any number of dimensions; without an eps, lanes without a row would have infinite factors."""
    for eps in (1e-6, 0.0):
        case = Case(shape, eps=eps)
        check(case, make(case, device))


@pytest.mark.parametrize("weight_dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_dtypes_of_the_weight(device, weight_dtype):
    case = Case(weight_dtype=weight_dtype)
    check(case, make(case, device))


LAYOUTS = {
    "slices": as_slices,
    "gaps": lambda tensors: [restride(x, "gaps", i) for i, x in enumerate(tensors)],
    "an odd start": lambda tensors: [restride(x, "odd_start", i) for i, x in enumerate(tensors)],
    "heads first": lambda tensors: [tensors[0], *(restride(x, "heads_first") for x in tensors[1:])],
    "dy alone": lambda tensors: [*tensors[:2], restride(tensors[2], "heads_first")],
    "part of a batch": lambda tensors: [*(restride(x, "part_of_batch") for x in tensors[:2]), tensors[2]],
    "every third element": lambda tensors: [restride(x, "every_third") for x in tensors],
    "expanded": lambda tensors: [x if i == 0 else x[:, :, :1].expand_as(x) for i, x in enumerate(tensors)],
}


def many_tokens(device: str) -> int:
    """So many that each CTA has rows of several tokens, several times."""
    return 40 * (4 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count)


@pytest.mark.parametrize(("V", "dtype"), ((128, torch.bfloat16), (100, torch.float16), (128, torch.float32)), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, V, dtype):
    """The bits of contiguous tensors."""
    case = Case((2, many_tokens(device), 3, V), dtype)
    tensors = make(case, device)
    strided = dict(zip(("o", "z", "dy"), LAYOUTS[layout]([tensors[x] for x in ("o", "z", "dy")]), strict=True))
    contiguous = {x: y.contiguous() for x, y in strided.items()}
    assert equal(check(case, tensors | strided), run(case, tensors | contiguous))


def test_more_dimensions_than_kernels_step_through(device):
    case = Case((3, 2, 4, 5, 64))
    tensors = make(case, device)
    mixed = {x: tensors[x].permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4) for x in ("o", "z", "dy")}
    assert not mixed["o"].is_contiguous()
    assert equal(run(case, tensors | mixed), run(case, tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("slices", "gaps", "heads first", "part of a batch", "expanded"))
def test_read_in_place(layout):
    """The forward allocates y alone, and the backward its results and a row of terms per CTA."""
    case = Case((2, 512, 4, 128))
    tensors = make(case, "cuda")
    o, z, dy = LAYOUTS[layout]([tensors[x] for x in ("o", "z", "dy")])
    size = o.numel() * o.element_size()
    for run_op, results in (
        (lambda: ops.gated_rms_norm(o, z, tensors["weight"]), 1),
        (lambda: ops.gated_rms_norm_bwd(o, z, tensors["weight"], dy), 2),
    ):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_op()
        assert results * size <= torch.cuda.max_memory_allocated() - before < (results + 0.75) * size


@pytest.mark.parametrize(("activation", "before"), KINDS)
def test_large_numbers_and_zeros(device, activation, before):
    """Squares of 1e4 overflow fp16, not the sums. A row of zeros has the gradients of the formula, and no NaN."""
    case = Case(dtype=torch.float16, activation=activation, norm_before_gate=before)
    tensors = make(case, device, size=1e4) | {"z": make(case, device)["z"]}
    check(case, tensors)
    case = case._replace(dtype=torch.bfloat16)
    tensors = make(case, device, size=50)
    for x in ("o", "z", "dy"):
        tensors[x][:, :2] = 0
    results = check(case, tensors)
    assert not results["y"][:, :2].any()
    tensors["o"][:, :2] = 1
    tensors["z"][:, 2:4] = -1e4
    assert all(x.isfinite().all() for x in run(case, tensors).values())


def test_nan_stays_in_its_row(device):
    for name in ("o", "z", "dy"):
        for activation, before in KINDS:
            case = Case(activation=activation, norm_before_gate=before)
            tensors = make(case, device)
            expected = run(case, tensors)
            tensors[name][0, 3, 1, 5] = torch.nan
            for of, x in run(case, tensors).items():
                if of == "y" and name == "dy":
                    assert torch.equal(x, expected[of])
                elif of != "dweight":
                    assert x[0, 3, 1].isnan().any(), (name, of, case)
                    x[0, 3, 1] = expected[of][0, 3, 1]
                    assert torch.equal(x, expected[of])


@pytest.mark.parametrize("shape", ((0, 3, 8), (2, 0, 3, 128)), ids=str)
def test_no_rows(device, shape):
    case = Case(shape)
    tensors = make(case, device)
    with poisoned(device):
        results = run(case, tensors)
    assert results["y"].shape == shape and results["do"].shape == shape and results["dz"].shape == shape
    assert results["dweight"].shape == shape[-1:] and not results["dweight"].any()


@pytest.mark.parametrize("needed", ("o", "z", "oz"))
def test_some_gradients(device, needed):
    """dy may come in another dtype, as that of the sum of y in fp32."""
    case = Case()
    tensors = make(case, device)
    o, z = (tensors[x].clone().requires_grad_(x in needed) for x in "oz")
    flash_qla.gated_rms_norm(o, z, tensors["weight"]).float().mul(tensors["dy"]).sum().backward()
    expected = run(case, tensors)
    for name, x in (("o", o), ("z", z)):
        assert (x.grad is not None) == (name in needed)
        assert x.grad is None or torch.equal(x.grad, expected[f"d{name}"])


@pytest.mark.parametrize(("activation", "before"), KINDS)
def test_gradcheck(activation, before):
    tensors = make(Case((2, 3, 2, 5), torch.float64, weight_dtype=torch.float64), "cpu")
    leaves = [tensors[x].requires_grad_() for x in ("o", "z", "weight")]
    assert torch.autograd.gradcheck(lambda *x: ops.gated_rms_norm(*x, 1e-3, activation, before), leaves)


def test_no_second_derivative(device):
    tensors = make(Case(), device)
    leaves = [tensors[x].requires_grad_() for x in ("o", "z", "weight")]
    grads = torch.autograd.grad(flash_qla.gated_rms_norm(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gated_rms_norm_bwd is not implemented \(double"):
        grads[0].sum().backward()


def test_the_norm_of_transformers():
    """At most as far from the formula as the module of transformers, which rounds once more."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = Case(weight_dtype=torch.bfloat16)
    tensors = make(case, "cpu")
    module = qwen.Qwen3NextRMSNormGated(128, eps=case.eps).bfloat16()

    def theirs(o, z, weight, **_):
        return torch.func.functional_call(module, {"weight": weight}, (o, z))

    expected = expected_of(case, tensors)
    for name, ours, other in zip(NAMES, run(case, tensors).values(), run(case, tensors, theirs).values(), strict=True):
        exact = expected[name]
        ours, other = ((x.double() - exact).norm() / exact.norm() for x in (ours, other))
        assert ours <= 1.02 * other and other < 0.02, name


@pytest.mark.parametrize("case", (Case(), Case((5, 100), torch.float16, "sigmoid", False)), ids=str)
def test_opcheck(device, case):
    tensors = make(case, device)
    dy, forward = tensors.pop("dy"), list(tensors.values())
    options = (case.eps, case.activation, case.norm_before_gate)
    torch.library.opcheck(ops.gated_rms_norm_bwd.default, (*forward, dy, *options))
    for x in forward:
        x.requires_grad_()
    torch.library.opcheck(ops.gated_rms_norm.default, (*forward, *options))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile(device, backend):
    torch._dynamo.reset()
    case = Case((2, 65, 3, 128), activation="sigmoid")
    tensors = make(case, device)
    compiled = torch.compile(flash_qla.gated_rms_norm, fullgraph=True, backend=backend)
    assert equal(run(case, tensors, compiled), run(case, tensors))
    case = case._replace(shape=(3, 33, 3, 128))  # other sizes become dynamic
    tensors = make(case, device)
    assert equal(run(case, tensors, compiled), run(case, tensors))


@pytest.mark.gpu
def test_same_bits_every_time():
    case = Case((4, 4096, 8, 128))
    tensors = make(case, "cuda")
    expected = run(case, tensors)
    for _ in range(3):
        assert equal(run(case, tensors), expected)


@pytest.mark.gpu
@pytest.mark.whole_card
def test_large_tensors():
    """More elements than 32 bits count; the last rows are those of a small call."""
    rows, V = 2**31 // 128 + 1000, 128
    o, z, dy = (torch.randn(1000, V, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(V, device="cuda")
    large = [x.new_zeros(rows, V) for x in (o, z, dy)]
    for x, part in zip(large, (o, z, dy), strict=True):
        x[-1000:] = part
    y = flash_qla.gated_rms_norm(*large[:2], weight)
    assert torch.equal(y[-1000:], flash_qla.gated_rms_norm(o, z, weight)) and not y[:-1000].any()
    do, dz, dweight = ops.gated_rms_norm_bwd(*large[:2], weight, large[2])
    expected = ops.gated_rms_norm_bwd(o, z, weight, dy)
    assert torch.equal(do[-1000:], expected[0]) and torch.equal(dz[-1000:], expected[1])
    assert (dweight - expected[2]).norm() <= 1e-6 * expected[2].norm()


@pytest.mark.gpu
def test_cuda_graph():
    """Captured once, replayed on other numbers."""
    first = make(Case((2, 300, 4, 128)), "cuda")
    buffers = {x: y.clone() for x, y in first.items()}

    def step():
        o, z, weight, dy = buffers.values()
        return ops.gated_rms_norm(o, z, weight), *ops.gated_rms_norm_bwd(o, z, weight, dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for scale in (1, -2):
        for x, buffer in buffers.items():
            buffer.copy_(scale * first[x])
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, results, step()))


def wrong(device: str) -> dict:
    """Arguments, and what the error says."""
    tensors = make(Case(), device)
    o, z, weight, dy = tensors.values()
    changes = {
        "z has dtype float32, expected bfloat16, the dtype of o": {"z": z.float()},
        "o has dtype int64, expected bfloat16, float16, float32 or float64": {"o": o.long()},
        r"z has shape \[2, 7, 3, 64\], expected \[2, 7, 3, 128\] \(\[.., V\], like o\)": {"z": z[..., :64]},
        r"z has shape \[7, 3, 128\], expected": {"z": z[0]},
        r"weight has shape \[64\], expected \[128\] \(\[V\], the channels of o\)": {"weight": weight[:64]},
        "weight has dtype int64, expected": {"weight": weight.long()},
        r"dy has shape \[2, 7, 2, 128\], expected": {"dy": dy[:, :, :2]},
        "dy has dtype int64": {"dy": dy.long()},
        "eps is -0.5, expected at least 0": {"eps": -0.5},
        "eps is nan": {"eps": float("nan")},
        'activation is "gelu", expected "silu" or "sigmoid"': {"activation": "gelu"},
        r"o has shape \[2, 0\], expected at least one channel": {"o": o[0, :2, 0, :0]},
        r"o has shape \[\], expected": {"o": o[0, 0, 0, 0]},
    }
    if device == "cuda":
        changes |= {
            "o has dtype float64, expected bfloat16, float16 or float32 on a GPU": {"o": o.double(), "z": z.double()},
            "o has 520 channels, expected at most 512 on a GPU": make(Case((2, 520)), device),
            "weight is on cpu, expected cuda:0, the device of o": {"weight": weight.cpu()},
        }
    return {text: tensors | change for text, change in changes.items()}


@pytest.mark.usefixtures("errors_change_nothing")
def test_errors(device):
    for text, arguments in wrong(device).items():
        forward = {x: y for x, y in arguments.items() if x != "dy"}
        with pytest.raises(RuntimeError, match=f"flash_qla::gated_rms_norm_bwd: {text}"):
            ops.gated_rms_norm_bwd(**arguments)
        if not text.startswith("dy"):
            with pytest.raises(RuntimeError, match=f"flash_qla::gated_rms_norm: {text}"):
                flash_qla.gated_rms_norm(**forward)
        if "GPU" not in text and "device" not in text:
            fake = {x: y.to("meta") if torch.is_tensor(y) else y for x, y in arguments.items()}
            with pytest.raises(RuntimeError, match=f"flash_qla::gated_rms_norm_bwd: {text}"):
                ops.gated_rms_norm_bwd(**fake)
