"""What test_dtensor.py runs on each rank of a group, on the CPU with gloo and on the GPU with NCCL."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from accuracy import BARS, CUMSUM_BARS, GRADIENT_BF16_BARS, relative_error
from cases import ALL_GRADIENTS_OF, Case, make_gradients, make_inputs, packed
from every_op import make_call, op_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flash_qla
from flash_qla.cp import build_cp_context

# Tensor -> (its dimension of the batch, that of the heads)
DIMENSIONS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "do", "o", "A", "g_cumsum", "h", "a", "b"), (0, 2)),
    **dict.fromkeys(("x", "y", "dy"), (0, 2)),  # channels count as heads
    **dict.fromkeys(("weight", "bias"), (None, 0)),
    "mixed_qkv": (0, None),
    **dict.fromkeys(("initial_state", "dht", "final_state"), (0, 1)),
    **dict.fromkeys(("A_log", "dt_bias"), (None, 0)),
    **dict.fromkeys(("state_pool", "checkpoints", "d_cache", "k_cache", "g_cache"), (None, 1)),
    "intermediate_states": (None, 2),
}
PLACEMENTS = ("replicas", "batch", "heads")
GRADIENT_OF = ALL_GRADIENTS_OF | {"mixed_qkv": "dmixed_qkv"}


def placements_of(name: str, placement: str) -> list:
    batch, heads = DIMENSIONS.get(name, (None, None))
    dims = {"replicas": (None,), "batch": (batch,), "heads": (heads,), "both": (batch, heads)}[placement]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def device_of_ranks() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def make_mesh(placement: str):
    shape = (2, dist.get_world_size() // 2) if placement == "both" else (dist.get_world_size(),)
    return init_device_mesh(device_of_ranks(), shape)


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor, is_sum: bool = False) -> None:
    """The same bits on the CPU, but for sums over ranks. The GPU's kernels are chosen by the numbers of heads and
    sequences, so either result may be a bar away from the truth."""
    if actual.is_cuda:
        bar = CUMSUM_BARS[actual.dtype] if name == "g_cumsum" else GRADIENT_BF16_BARS.get(name, BARS[torch.bfloat16])
        assert relative_error(actual, expected.double()) < 2 * bar, name
    elif is_sum:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(actual, expected), name


def distributed(tensors: dict, mesh, placement: str) -> dict:
    """The tensors as DTensors, and everything else as it is."""
    return {
        name: distribute_tensor(x, mesh, placements_of(name, placement)) if torch.is_tensor(x) else x
        for name, x in tensors.items()
    }


def step(inputs: dict, gradients: dict) -> dict:
    """o, the final state and all gradients, by name."""
    names = [name for name in GRADIENT_OF if inputs.get(name) is not None]
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    is_packed = "mixed_qkv" in inputs
    function = flash_qla.chunk_gated_delta_rule_packed if is_packed else flash_qla.chunk_gated_delta_rule
    o, final_state = function(**inputs | leaves, output_final_state=True)
    grads = torch.autograd.grad((o, final_state), list(leaves.values()), (gradients["do"], gradients["dht"]))
    named = {GRADIENT_OF[name]: dx for name, dx in zip(leaves, grads, strict=True)}
    return {"o": o.detach(), "final_state": final_state.detach()} | named


def training(cases: tuple[Case, ...], placement: str) -> int:
    mesh, device = make_mesh(placement), device_of_ranks()
    for case in cases:
        inputs, gradients = make_inputs(case, device), make_gradients(case, device)
        gradients["do"] = gradients["do"].nan_to_num()  # that of padding
        local, local_gradients = (distributed(x, mesh, placement) for x in (inputs, gradients))
        check_step(inputs, gradients, local, local_gradients, placement)
        check_low_level(inputs, gradients, local, local_gradients, placement)
        if placement in ("replicas", "batch"):  # heads of q, k and v follow each other in mixed_qkv
            whole = packed(inputs)
            check_step(whole, gradients, distributed(whole, mesh, placement), local_gradients, placement)
    return len(cases)


def check_step(inputs: dict, gradients: dict, local: dict, local_gradients: dict, placement: str) -> None:
    expected = step(inputs, gradients)
    with CommDebugMode() as communication:
        actual = step(local, local_gradients)
    assert communication.get_total_counts() == 0
    sources = {dx: name for name, dx in GRADIENT_OF.items()} | {"o": "o", "final_state": "final_state"}
    for name, x in actual.items():
        expected_placements = placements_of(sources[name], placement)
        if name in ("dA_log", "ddt_bias") and placement in ("batch", "both"):
            expected_placements[0] = Partial()
        assert list(x.placements) == expected_placements, name
        assert_same(name, x.full_tensor(), expected[name], is_sum=Partial() in expected_placements)


@torch.no_grad()
def check_low_level(inputs: dict, gradients: dict, local: dict, local_gradients: dict, placement: str) -> None:
    """Both low-level functions with all results; without states in the first round."""
    for with_states in (False, True):
        options = {"output_h": with_states, "output_final_state": with_states}
        forward = flash_qla.chunk_gated_delta_rule_intermediates
        results = [forward(**x, **options) for x in (inputs, local)]
        names = ("g_cumsum", "A", "o", "h", "final_state")
        for name, whole, x in zip(names, *results, strict=True):
            if whole is None:
                assert x is None
            else:
                assert list(x.placements) == placements_of(name, placement), (name, x.placements)
                assert_same(name, x.full_tensor(), whole)
        grads = []
        for x, dx, (g, A, *_) in zip((inputs, local), (gradients, local_gradients), results, strict=True):
            g_raw = x["g"] if x.get("use_gate_in_kernel") else None
            arguments = x | {"g": g, "A": A, "g_raw": g_raw, "do": dx["do"], "dht": dx["dht"] if with_states else None}
            grads.append(flash_qla.chunk_gated_delta_rule_bwd(**arguments))
        backward = op_of("chunk_gated_delta_rule_bwd")  # whose empty results are not shards
        results = backward(**{x.name: arguments[x.name] for x in backward._schema.arguments if x.name in arguments})
        assert all(placement == Replicate() for x in results if not x.numel() for placement in x.placements)
        for name, whole, x in zip(ALL_GRADIENTS_OF.values(), *grads, strict=False):
            if whole is None:
                assert x is None
            else:
                assert_same(name, x.full_tensor(), whole, is_sum=name in ("dA_log", "ddt_bias"))


def norm(placement: str) -> None:
    """y and the gradients of gated_rms_norm, whose weight has as many parts as there are ranks."""
    device, mesh = device_of_ranks(), make_mesh(placement)
    tokens = placements_of("o", placement)
    shape = (4, 7, dist.get_world_size(), 64)
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3)]
    whole.append(torch.linspace(-1, 1, 64, device=device))
    local = [distribute_tensor(x, mesh, tokens if x.dim() == 4 else [Replicate()]) for x in whole]
    results = []
    for o, z, dy, weight in (whole, local):
        leaves = [x.detach().requires_grad_() for x in (o, z, weight)]
        with CommDebugMode() as communication:
            y = flash_qla.gated_rms_norm(*leaves)
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
        assert communication.get_total_counts() == 0
    for x, expected in zip(results[1][:3], results[0][:3], strict=True):
        assert list(x.placements) == tokens and torch.equal(x.full_tensor(), expected)
    assert list(results[1][3].placements) == [Replicate() if tokens == [Replicate()] else Partial()]
    torch.testing.assert_close(results[1][3].full_tensor(), results[0][3], rtol=1e-5, atol=1e-5)
    by_channels = [distribute_tensor(x, mesh, [Shard(3)]) for x in whole[:2]]  # moved: a row needs all its channels
    assert torch.equal(flash_qla.gated_rms_norm(*by_channels, local[3]).full_tensor(), results[0][0])


def convolution(placement: str) -> None:
    """A step with windows. Results and gradients are those of one rank; sums over the batch are sums."""
    mesh, generator = make_mesh(placement), torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device_of_ranks(), torch.bfloat16)

    tensors = {"x": randn(4, 70, 24), "weight": randn(24, 4), "bias": randn(24), "initial_state": randn(4, 24, 3)}
    gradients = {"dy": randn(4, 70, 24), "dht": randn(4, 24, 3)}

    def step(tensors: dict, gradients: dict) -> list[torch.Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        results = flash_qla.causal_conv1d(**leaves, output_final_state=True)
        return [*results, *torch.autograd.grad(results, list(leaves.values()), list(gradients.values()))]

    expected = step(tensors, gradients)
    local = [distributed(x, mesh, placement) for x in (tensors, gradients)]
    with CommDebugMode() as communication:
        actual = step(*local)
    assert communication.get_total_counts() == 0
    for name, x, expected_tensor in zip(("y", "final_state", *tensors), actual, expected, strict=True):
        is_sum = name in ("weight", "bias") and placement == "batch"
        assert list(x.placements) == ([Partial()] if is_sum else placements_of(name, placement)), name
        if is_sum:  # rounded to bf16 on each rank
            torch.testing.assert_close(x.full_tensor(), expected_tensor, rtol=2e-2, atol=2e-1)
        else:
            assert torch.equal(x.full_tensor(), expected_tensor), name


def compiled(case: Case, placement: str) -> None:
    """A step in one graph, the same as without."""

    def function(**inputs):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        return o * 2, final_state

    inputs, gradients = (
        distributed(make(case, device_of_ranks()), make_mesh(placement), placement)
        for make in (make_inputs, make_gradients)
    )
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")}
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        outputs = f(**inputs | leaves)
        grads = torch.autograd.grad(outputs, list(leaves.values()), (gradients["do"], gradients["dht"]))
        results.append([x.full_tensor() for x in (*outputs, *grads)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def partial_gradients(case: Case) -> None:
    """A gradient of o that is a sum over the ranks, as of a projection that is parallel over its columns."""
    mesh = make_mesh("replicas")
    device = device_of_ranks()
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    expected = step(inputs, gradients)
    local, local_gradients = (distributed(x, mesh, "replicas") for x in (inputs, gradients))
    local_do = gradients["do"] if mesh.get_local_rank() == 0 else torch.zeros_like(gradients["do"])
    local_gradients["do"] = DTensor.from_local(local_do, mesh, [Partial()])
    for name, x in step(local, local_gradients).items():
        assert_same(name, x.full_tensor(), expected[name])


def partial_gradients_beside_heads(case: Case) -> str:
    """The batch has no shards, heads have, and do is a sum over the other dimension of the mesh."""
    mesh = make_mesh("both")
    inputs = make_inputs(case, "cpu")
    local = {
        name: distribute_tensor(x, mesh, [Replicate(), *placements_of(name, "heads")]) if torch.is_tensor(x) else x
        for name, x in inputs.items()
    }
    v = local["v"].requires_grad_()
    o, _ = flash_qla.chunk_gated_delta_rule(**local)
    do = DTensor.from_local(torch.ones_like(o.to_local()), mesh, [Partial(), Shard(2)])
    try:
        torch.autograd.grad(o, v, do)
    except Exception as error:
        return str(error)
    return "nothing"


def without_derivatives(name: str) -> None:
    mesh = make_mesh("heads")
    kinds = ("replicas",) if name.endswith(("packed", "delta_net")) else ("replicas", "heads")
    for placement in kinds:
        call = make_call(name, device_of_ranks(), H_k=dist.get_world_size(), H_v=2 * dist.get_world_size())
        expected = call()
        arguments = {x: y.clone() if torch.is_tensor(y) else y for x, y in call.arguments.items()}
        local = distributed(arguments, mesh, placement)
        with CommDebugMode() as communication, torch.inference_mode():
            o = op_of(name)(**local)
        (of,) = (x.name for x in op_of(name)._schema.returns)
        assert communication.get_total_counts() == 0
        assert list(o.placements) == placements_of(of, placement)
        assert_same(of, o.full_tensor(), expected.pop(of))
        assert expected
        for written, x in expected.items():
            assert_same(written, local[written].full_tensor(), x)
            assert not torch.equal(x, call.arguments[written])


def refusals() -> dict[str, str]:
    """What the errors say."""
    mesh = make_mesh("heads")
    messages = {}

    def refused(what, function, *args, **kwargs):
        try:
            function(*args, **kwargs)
            messages[what] = "nothing"
        except Exception as error:
            messages[what] = str(error)

    def with_placement(x, placement):
        return distribute_tensor(x, mesh, [placement])

    def call_of(case: Case, **placements):
        inputs = make_inputs(case, "cpu")
        return distributed(inputs, mesh, "replicas") | {
            name: with_placement(inputs[name], placement) for name, placement in placements.items()
        }

    case = Case(B=2, T=6, H_k=2, H_v=4, K=8, V=8)
    packed = Case(lengths=(4, 2), H_k=2, H_v=4, K=8, V=8)
    function = flash_qla.chunk_gated_delta_rule
    refused("tokens", function, **call_of(case, q=Shard(1)))
    refused("channels", function, **call_of(case, v=Shard(3)))
    refused("packed batch", function, **call_of(packed, q=Shard(0)))
    refused("odd heads", function, **call_of(Case(T=6, H_k=3, H_v=6, K=8, V=8), v=Shard(2)))
    inputs = call_of(case, v=Shard(0))
    inputs["v"].requires_grad_()
    o, _ = function(**inputs)
    do = with_placement(torch.ones(o.shape, dtype=o.dtype), Shard(1))
    refused("backward", torch.autograd.grad, o, inputs["v"], do)

    for name, what in (("decode_gated_delta_rule", "pool"), ("decode_gated_delta_rule_packed", "packed decode")):
        call = make_call(name, "cpu", H_k=2, H_v=4)
        arguments = distributed(call.arguments, mesh, "replicas")
        if what == "pool":
            arguments = distributed(call.arguments, mesh, "heads")
            arguments["state_pool"] = with_placement(call.arguments["state_pool"], Replicate())
        else:
            arguments["state_pool"] = with_placement(call.arguments["state_pool"], Shard(1))
        refused(what, op_of(name), **arguments)

    inputs = call_of(Case(lengths=(6,), H_k=2, H_v=4, K=8, V=8))
    inputs["cp_context"] = build_cp_context(torch.tensor([0, 12]))
    del inputs["cu_seqlens"]
    refused("cp_context", function, **inputs)
    return messages


def over_two_dimensions(H_k: int) -> str:
    """The heads over both dimensions of a mesh: what the error says, or "nothing" if the results are those of one."""
    mesh = init_device_mesh(device_of_ranks(), (2, 2))
    inputs = make_inputs(Case(B=2, T=6, H_k=H_k, H_v=2 * H_k, K=8, V=8), device_of_ranks())
    local = {
        name: distribute_tensor(x, mesh, placements_of(name, "heads") * 2) if torch.is_tensor(x) else x
        for name, x in inputs.items()
    }
    try:
        o, _ = flash_qla.chunk_gated_delta_rule(**local)
    except Exception as error:
        return str(error)
    assert list(o.placements) == placements_of("o", "heads") * 2
    assert_same("o", o.full_tensor(), flash_qla.chunk_gated_delta_rule(**inputs)[0])
    return "nothing"


class Block(nn.Module):
    """Projections to q, k, v, the gate and beta, the Gated Delta Rule, and a projection back."""

    def __init__(self, width: int, heads: int, dim: int):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.q, self.k, self.v = (nn.Linear(width, heads * dim, bias=False) for _ in range(3))
        self.g, self.beta = (nn.Linear(width, heads, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.dim)) for layer in (self.q, self.k, self.v))
        g, beta = -self.g(x).sigmoid(), self.beta(x).sigmoid()
        o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return self.out(o.flatten(2))


def with_context() -> None:
    """Tensor parallelism as models have it: outputs of the projections stay DTensors."""
    device = device_of_ranks()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    block, x = Block(32, 4, 16).to(device, dtype), torch.randn(2, 70, 32).to(device, dtype)
    expected = block(x)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    columns = ColwiseParallel(use_local_output=False)
    plan = dict.fromkeys(("q", "k", "v", "g", "beta"), columns) | {"out": RowwiseParallel()}
    parallelize_module(block, make_mesh("heads"), plan)
    assert all(isinstance(x, DTensor) for x in itertools.islice(block.parameters(), 3))
    actual = block(x)
    actual.square().sum().backward()
    of_both = {"output": (actual, expected)} | {
        name: (parameter.grad.full_tensor(), gradients[name]) for name, parameter in block.named_parameters()
    }
    for name, (one, other) in of_both.items():
        if device == "cuda":  # the projections round to bf16 too, and the last one's sum over ranks
            assert relative_error(one, other.double()) < 3e-2, name
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
