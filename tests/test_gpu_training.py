"""Training on the GPU: a whole step in a CUDA graph, and the memory it takes."""

import accuracy
import pytest
import torch
import torch.nn.functional as F
from cases import Case, make_gradients, make_inputs

import flash_qla

pytestmark = pytest.mark.gpu

# Most that forward and backward may take beside their inputs and do, in bytes per token and value head at 16x32 heads.
# Results take 776: o and dv 512, dq and dk 256, db and dg 8. The workspace of the backward takes some 1100: h 512,
# V_new 256, the blocks of two matrices 160, gates 40 or, with the l2norm, 48, and the maps and states of segments.
# The portable kernels also keep dS' 512 and U 256.
TRAINING_STEP_BYTES = {"device": 2000, "portable": 3000}

H_K, H_V, D, WIDTH = 2, 4, 128, 256


class Layer(torch.nn.Module):
    """fp32 weights, bf16 arithmetic."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(WIDTH, H_K * D, bias=False) for _ in range(2))
        self.v, self.gates = torch.nn.Linear(WIDTH, H_V * D, bias=False), torch.nn.Linear(WIDTH, 2 * H_V)
        self.out = torch.nn.Linear(H_V * D, WIDTH, bias=False)

    def forward(self, x, cu_seqlens):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k, v = (project(x).unflatten(-1, (-1, D)) for project in (self.q, self.k, self.v))
            g, beta = self.gates(x).float().chunk(2, -1)
            o, _ = flash_qla.chunk_gated_delta_rule(
                q,
                k,
                v,
                F.logsigmoid(g),
                beta.sigmoid(),
                cu_seqlens=cu_seqlens,
                use_qk_l2norm_in_kernel=True,
            )
            return self.out(o.flatten(2))


def test_training_step_in_a_cuda_graph():
    """Forward, loss, backward and update, captured once; each replay finds another batch, packed in another way, in the
    same buffers. The weights move as they do in eager mode."""
    torch.manual_seed(0)
    layer = Layer().cuda()
    weights = list(layer.parameters())
    start = [weight.detach().clone() for weight in weights]
    generator = torch.Generator("cuda").manual_seed(1)
    batches = [
        (
            torch.randn(1, 872, WIDTH, generator=generator, device="cuda"),
            torch.randn(1, 872, WIDTH, generator=generator, device="cuda"),
            torch.tensor([0, *lengths], device="cuda").cumsum(0),
        )
        for lengths in ((300, 65, 0, 7, 500), (1, 1, 870, 0, 0), (64, 64, 64, 64, 64), (100, 200, 100, 200, 272))
    ]

    def step(x, target, cu_seqlens):
        loss = (layer(x, cu_seqlens).float() - target).square().sum()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.01 * gradient
        return loss.detach()

    def reset():
        with torch.no_grad():
            for weight, value in zip(weights, start, strict=True):
                weight.copy_(value)

    eager_losses = [step(*batch) for batch in batches]
    expected = [weight.detach() - value for weight, value in zip(weights, start, strict=True)]

    buffers = [x.clone() for x in batches[0]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*buffers)
    reset()
    for batch, eager_loss in zip(batches, eager_losses, strict=True):
        for buffer, x in zip(buffers, batch, strict=True):
            buffer.copy_(x)
        graph.replay()
        torch.testing.assert_close(loss, eager_loss, rtol=1e-5, atol=0)
    for name, weight, value, change in zip(dict(layer.named_parameters()), weights, start, expected, strict=True):
        assert change.norm() > 1e-2 * value.norm(), f"{name} hardly moved"
        # Not equal: the matrix products may add up in another order on another stream.
        assert accuracy.relative_error(weight.detach() - value, change.double()) <= accuracy.BF16_BAR, name


@pytest.mark.parametrize("l2norm", (False, True))
def test_peak_memory_of_a_training_step(l2norm, request):
    case = Case(
        T=8192,
        H_k=16,
        H_v=32,
        initial_state=None,
        dht=None,
        gate="logsigmoid",
        keys="raw" if l2norm else "unit",
        use_qk_l2norm_in_kernel=l2norm,
    )
    inputs, do = make_inputs(case, "cuda"), make_gradients(case, "cuda")["do"]
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def step():
        o, _ = flash_qla.chunk_gated_delta_rule(**inputs)
        return o, torch.autograd.grad(o, leaves, do)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / (case.T * case.H_v)
    assert peak <= TRAINING_STEP_BYTES[request.config.getoption("--kernels")], (
        f"{peak:.0f} bytes per token and value head"
    )
