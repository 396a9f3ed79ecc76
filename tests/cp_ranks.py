"""Functions that the tests of context parallelism run on each rank of a group. The places of tokens and sequences are
computed independently of the package, by a loop over all of them."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from accuracy import BARS, GRADIENT_BF16_BARS, relative_error
from cases import ALL_GRADIENTS_OF, Case, make_gradients, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import flash_qla
from flash_qla.cp import build_cp_context, exchange_halo

LAYOUTS = ("contiguous", "zigzag")


def of_this_rank(device: str) -> str:
    return f"cuda:{dist.get_rank()}" if device == "cuda" else device


def parts_of(total: int, world_size: int, rank: int, layout: str) -> list[tuple[int, int]]:
    """Begin and end of the tokens that a rank has."""
    count = world_size if layout == "contiguous" else 2 * world_size
    parts = [(total * i // count, total * (i + 1) // count) for i in range(count)]
    return [parts[rank]] if layout == "contiguous" else [parts[rank], parts[-1 - rank]]


def rows_of(lengths: tuple[int, ...], parts: list[tuple[int, int]]) -> list[tuple[int, bool, bool]]:
    """(number, whether its first token is in the part, whether its last token is) of each of a rank's sequences."""
    offsets = list(itertools.accumulate(lengths, initial=0))
    rows = []
    for begin, end in parts:
        for n, (first, end_of_n) in enumerate(itertools.pairwise(offsets)):
            if any(begin <= t < end for t in range(first, end_of_n)):
                rows.append((n, begin <= first < end, begin <= end_of_n - 1 < end))
    return rows


def assert_near(name: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> None:
    """On the CPU, in fp64, as close as given. On the GPU either may be a bar away from the truth."""
    if actual.is_cuda:
        bar = GRADIENT_BF16_BARS.get(name, BARS[torch.bfloat16])
        assert relative_error(actual, expected.double()) < 2 * bar, name
    else:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def cut(x: torch.Tensor, layout: str, group=None) -> torch.Tensor:
    """This rank's tokens, of [1, T, ...]."""
    group = group or dist.group.WORLD
    parts = parts_of(x.shape[1], group.size(), group.rank(), layout)
    return torch.cat([x[:, begin:end] for begin, end in parts], 1)


def local_case(case: Case, layout: str, device: str, kernel_size: int | None = None, group=None) -> tuple[dict, dict]:
    """The rank's share of the case's inputs, the context among them, and of its gradients. An initial state of a
    sequence that begins elsewhere is NaN."""
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    cu_seqlens = inputs.pop("cu_seqlens")
    group = group or dist.group.WORLD
    total = inputs["q"].shape[1]
    rows = rows_of(case.lengths, parts_of(total, group.size(), group.rank(), layout))
    sequences = [n for n, _, _ in rows]
    begins, ends = (torch.tensor([row[i] for row in rows], device=device).bool()[:, None, None, None] for i in (1, 2))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = cut(inputs[name], layout, group)
    gradients["do"] = cut(gradients["do"], layout, group)
    if inputs["initial_state"] is not None:
        inputs["initial_state"] = inputs["initial_state"][sequences].where(begins, float("nan"))
    if gradients["dht"] is not None:
        gradients["dht"] = gradients["dht"][sequences].where(ends, 0)
    num_tokens = total if case.padding else None
    inputs["cp_context"] = build_cp_context(cu_seqlens, group, kernel_size, layout=layout, num_tokens=num_tokens)
    assert inputs["cp_context"].sequences == tuple(sequences)
    return inputs, gradients


def run_forward(inputs: dict, function=flash_qla.chunk_gated_delta_rule) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Leaves by name, o and the rank's final states."""
    names = [name for name in ALL_GRADIENTS_OF if inputs.get(name) is not None]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    return leaves, *function(**inputs | leaves, output_final_state=True)


def run_backward(
    leaves: dict, o: torch.Tensor, final_state: torch.Tensor, gradients: dict, retain_graph: bool = False
) -> dict:
    """The low-level backward with all gradients."""
    used = [(o, gradients["do"])] + [(final_state, gradients["dht"])] * (gradients["dht"] is not None)
    grads = torch.autograd.grad(
        [x for x, _ in used], list(leaves.values()), [dx for _, dx in used], retain_graph=retain_graph
    )
    named = {ALL_GRADIENTS_OF[name]: dx for name, dx in zip(leaves, grads, strict=True)}
    return {"o": o.detach(), "final_state": final_state.detach()} | named


def run(inputs: dict, gradients: dict, function=flash_qla.chunk_gated_delta_rule) -> dict:
    """o, the rank's final states and all gradients through autograd, by name."""
    return run_backward(*run_forward(inputs, function), gradients)


class CountGathers(TorchDispatchMode):
    """How many collectives were begun meanwhile, the backward's included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("_c10d_functional", "c10d") and "wait" not in function._schema.name:
            assert function._schema.name.endswith("all_gather_into_tensor"), function
            self.count += 1
        return function(*args, **(kwargs or {}))


def all_cases(cases: list[Case], device: str) -> dict:
    """The outputs of each case in each layout."""
    device = of_this_rank(device)
    outputs = {}
    for case, layout in itertools.product(cases, LAYOUTS):
        inputs, gradients = local_case(case, layout, device)
        with CountGathers() as gathers:
            results = run(inputs, gradients)
        assert gathers.count == (2 if dist.get_world_size() > 1 else 0)
        again = run(inputs, gradients)
        assert all(torch.equal(x, again[name]) for name, x in results.items()), "other bits the second time"
        with torch.inference_mode():
            o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        if device == "cpu":  # on the GPU these may be other kernels
            assert torch.equal(o, results["o"]) and torch.equal(final_state, results["final_state"])
        outputs[case, layout] = {name: x.cpu() for name, x in results.items()}
    return outputs


def in_a_group_of_the_last_two(case: Case) -> dict | None:
    """The outputs of the ranks of a group of ranks 1 and 2 alone."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    inputs, gradients = local_case(case, "contiguous", "cpu", group=group)
    return {(case, "contiguous"): run(inputs, gradients)}


def compiled(case: Case, device: str, backend: str) -> None:
    """A compiled call is one graph, with the results of an eager call, in each layout."""
    device = of_this_rank(device)
    for layout in LAYOUTS:
        torch._dynamo.reset()
        inputs, gradients = local_case(case, layout, device)
        function = torch.compile(flash_qla.chunk_gated_delta_rule, fullgraph=True, backend=backend)
        actual, expected = run(inputs, gradients, function), run(inputs, gradients)
        assert all(torch.equal(x, expected[name]) for name, x in actual.items()), layout


def compiled_for_other_lengths(cases: list[Case], device: str, backend: str) -> None:
    """The graph of the first case serves the others, whose contexts have other numbers of tokens."""
    device = of_this_rank(device)
    function = torch.compile(flash_qla.chunk_gated_delta_rule, fullgraph=True, backend=backend, dynamic=True)
    for i, case in enumerate(cases):
        inputs, gradients = local_case(case, "contiguous", device)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = run(inputs, gradients, function)
        expected = run(inputs, gradients)
        assert all(torch.equal(x, expected[name]) for name, x in actual.items())


def compiled_halo(case: Case, device: str, backend: str) -> None:
    """The same of exchange_halo, in the middle of other things."""
    for layout in LAYOUTS:
        torch._dynamo.reset()
        inputs, _ = local_case(case, layout, of_this_rank(device), 4)

        def function(x, context=inputs["cp_context"]):
            halo = exchange_halo(x * 2, context)
            return (x * 3).sum() + halo.square().sum()

        x = inputs["v"].requires_grad_()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        (actual,), (expected,) = (torch.autograd.grad(f(x), x) for f in (compiled, function))
        torch.testing.assert_close(actual, expected)


def captured(case: Case, layout: str) -> None:
    """A step in a CUDA graph: the same as without, and of other tokens when replayed with those."""
    inputs, gradients = local_case(case, layout, of_this_rank("cuda"))
    expected = [run(inputs, gradients)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        actual = run(inputs, gradients)
    inputs["v"].neg_()
    expected.append(run(inputs, gradients))
    for i in (1, 0):
        graph.replay()
        assert all(torch.equal(x, expected[i][name]) for name, x in actual.items())
        inputs["v"].neg_()


def states_between_ranks(case: Case) -> None:
    """The loss may depend on the state at a rank's end as well: against the same tokens in calls of their own, each
    from the state that the one before left."""
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    assert len(case.lengths) == 1 and inputs.pop("cu_seqlens") is not None
    options = {name: x for name, x in inputs.items() if not isinstance(x, torch.Tensor)}
    tensors = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = [name for name in tensors if name != "initial_state"]
    pieces = zip(*(tensors[name].chunk(world_size, 1) for name in tokens), strict=True)
    calls = [dict(zip(tokens, x, strict=True)) for x in pieces]
    loss, states = 0, [tensors["initial_state"]]
    for call, do in zip(calls, gradients["do"].chunk(world_size, 1), strict=True):
        o, state = flash_qla.chunk_gated_delta_rule(
            **options, **call, initial_state=states[-1], output_final_state=True
        )
        loss = loss + (o * do).sum() + (state * gradients["dht"]).sum()
        states.append(state)
    expected = torch.autograd.grad(loss, list(tensors.values()))

    local, _ = local_case(case, "contiguous", "cpu")
    if rank == 0:
        local["initial_state"] = inputs["initial_state"].detach()
    actual = run(local, {"do": cut(gradients["do"], "contiguous"), "dht": gradients["dht"]})
    torch.testing.assert_close(actual["final_state"], states[rank + 1], rtol=1e-10, atol=1e-10)
    for name, dx in zip(tensors, expected, strict=True):
        if name != "initial_state":
            torch.testing.assert_close(actual[ALL_GRADIENTS_OF[name]], cut(dx, "contiguous"), rtol=1e-10, atol=1e-10)
        elif rank == 0:
            torch.testing.assert_close(actual["dh0"], dx, rtol=1e-10, atol=1e-10)
        else:
            assert not actual["dh0"].any()


def partly(case: Case) -> None:
    """A loss may leave out o, the final state, or the gradients of all tensors but one. The others have the same
    gradients."""
    inputs, gradients = local_case(case, "contiguous", "cpu")
    leaf = inputs["initial_state"].clone().requires_grad_()  # alone: each rank has a backward because of it
    o, state = flash_qla.chunk_gated_delta_rule(**inputs | {"initial_state": leaf}, output_final_state=True)
    (dh0,) = torch.autograd.grad((o, state), leaf, (gradients["do"], gradients["dht"]))
    assert torch.equal(dh0, run(inputs, gradients)["dh0"]) and dh0.any() == (dist.get_rank() == 0)
    del inputs["initial_state"]

    def gradient(name, do, dht):
        x = inputs[name].clone().requires_grad_()
        o, state = flash_qla.chunk_gated_delta_rule(**inputs | {name: x}, output_final_state=dht is not None)
        loss = 0 if do is None else (o * do).sum()
        return torch.autograd.grad(loss if dht is None else loss + (state * dht).sum(), x)[0]

    for name in ("q", "v", "g"):
        both, from_o, from_state = (
            gradient(name, do, dht)
            for do, dht in itertools.product((gradients["do"], None), (gradients["dht"], None))
            if do is not None or dht is not None
        )
        torch.testing.assert_close(both, from_o + from_state, rtol=1e-10, atol=1e-10)


class WithoutGradient(torch.autograd.Function):
    """A sum whose gradient is None."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, _):
        return None


def gradients_that_are_none(cases: list[Case], device: str, backend: str | None) -> None:
    """Rank 0 has a gradient of o, rank 1 has none, rank 2 has one of the final state, rank 3 is as rank 0: the same as
    with zeros."""
    for case, layout in itertools.product(cases, LAYOUTS):
        torch._dynamo.reset()
        check_gradients_that_are_none(case, layout, of_this_rank(device), backend)


def check_gradients_that_are_none(case: Case, layout: str, device: str, backend: str | None) -> None:
    inputs, gradients = local_case(case, layout, device, 4)
    context = inputs["cp_context"]
    halo_weights = torch.ones(len(context._parts), 1, 1, 1, device=device)
    weights = {"o": gradients["do"], "state": gradients["dht"], "halo": halo_weights}
    weighted = (("o", "halo"), (), ("state", "halo"))[dist.get_rank() % 3]
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")}

    def loss(of_others):
        o, state = flash_qla.chunk_gated_delta_rule(**inputs | leaves, output_final_state=True)
        outputs = {"o": o, "state": state, "halo": exchange_halo(leaves["v"], context)}
        return sum((x * weights[name]).sum() if name in weighted else of_others(x) for name, x in outputs.items())

    def gradients_of(function, of_others):
        return torch.autograd.grad(function(of_others), list(leaves.values()), materialize_grads=True)

    function = loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend)
    actual, expected = gradients_of(function, WithoutGradient.apply), gradients_of(loss, lambda x: 0 * x.sum())
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def gradients_on_one_rank(case: Case, function: str, device: str = "cpu") -> None:
    """The others' backward would wait."""
    os.environ["FLASH_QLA_CHECK"] = "1"
    inputs, _ = local_case(case, "contiguous", of_this_rank(device), 4)
    inputs["v"].requires_grad_(dist.get_rank() == 1)
    if function == "exchange_halo":
        exchange_halo(inputs["v"], inputs["cp_context"])
    else:
        flash_qla.chunk_gated_delta_rule(**inputs)


def halos(batches: list[tuple[tuple[int, ...], int]], widths: tuple[int, ...], device: str) -> None:
    """exchange_halo and its gradient, against all tokens in one place, for sequences of these lengths, with padding."""
    device = of_this_rank(device)
    for lengths, padding in batches:
        check_halos(lengths, padding, widths, device)


def check_halos(lengths: tuple[int, ...], padding: int, widths: tuple[int, ...], device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    total, world_size = sum(lengths) + padding, dist.get_world_size()
    sequence = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor((*lengths, padding)))
    x = torch.randn(1, total, 3, 2, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    for layout, width in itertools.product(LAYOUTS, widths):

        def halo(x, begin, width=width):
            rows = []
            for t in range(begin - width + 1, begin):
                here = t >= 0 and bool(sequence[t] == sequence[begin] < len(lengths))
                rows.append(x[0, max(t, 0)] * here)
            return torch.stack(rows) if rows else x[0, :0]

        ranks = [parts_of(total, world_size, r, layout) for r in range(world_size)]
        whole = x.clone().requires_grad_()
        expected = [torch.stack([halo(whole, begin) for begin, _ in parts]) for parts in ranks]
        weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in expected]
        (dx,) = torch.autograd.grad(sum((y * w).sum() for y, w in zip(expected, weights, strict=True)), whole)

        context = build_cp_context(cu_seqlens, conv1d_kernel_size=width, layout=layout, num_tokens=total)
        local = cut(x, layout).to(device).requires_grad_()
        actual = exchange_halo(local, context)
        (gradient,) = torch.autograd.grad(actual, local, weights[dist.get_rank()].to(device))
        assert torch.equal(actual.cpu(), expected[dist.get_rank()])
        torch.testing.assert_close(gradient.cpu(), cut(dx, layout), rtol=1e-12, atol=1e-12)


def convolved(case: Case, width: int, device: str) -> None:
    """A causal convolution from the halo, then the Gated Delta Rule: the same as of the whole sequence."""
    device = of_this_rank(device)
    inputs, _ = local_case(case, "contiguous", device, width)
    weight = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    whole = make_inputs(case, device)
    leaves = [inputs["v"].requires_grad_(), whole["v"].requires_grad_()]

    def convolve(v, before):
        v = torch.cat([before, v], 1)
        return sum(weight[i] * v[:, i : v.shape[1] - width + 1 + i] for i in range(width))

    inputs["v"] = convolve(leaves[0], exchange_halo(leaves[0], inputs["cp_context"]))
    whole["v"] = convolve(leaves[1], leaves[1].new_zeros(1, width - 1, *leaves[1].shape[2:]))
    actual, expected = (flash_qla.chunk_gated_delta_rule(**x)[0] for x in (inputs, whole))
    assert_near("o", actual, cut(expected, "contiguous"), rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(o.square().sum(), x)[0] for o, x in zip((actual, expected), leaves, strict=True))
    assert_near("dv", next(gradients), cut(next(gradients), "contiguous"), rtol=1e-10, atol=1e-10)


def layer_tensors(case: Case, device: str) -> tuple[dict, dict]:
    """Tensors of all tokens of a layer's region, and its parameters."""
    generator, T = torch.Generator().manual_seed(1), sum(case.lengths) + case.padding
    D, V = 2 * case.H_k * case.K + case.H_v * case.V, case.V

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=case.dtype).to(device)

    tokens = {"mixed": randn(1, T, D), "z": randn(1, T, case.H_v, V), "a": randn(1, T, case.H_v)}
    parameters = {"conv_weight": randn(D, 4), "conv_bias": randn(D), "norm_weight": randn(V)}
    rates = {x: randn(case.H_v).to(torch.promote_types(case.dtype, torch.float32)) for x in ("A_log", "dt_bias")}
    return tokens | {"b": randn(1, T, case.H_v)}, parameters | rates


def region(case: Case, device: str) -> None:
    """gated_delta_net over the ranks, with its gradients: the same as of the whole sequences."""
    device = of_this_rank(device)
    tokens, parameters = layer_tensors(case, device)
    heads = {"num_k_heads": case.H_k, "head_k_dim": case.K, "allow_neg_eigval": True, "scale": 0.7}
    heads |= {"norm_eps": 1e-2, "norm_activation": "sigmoid"}
    offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    weight = torch.randn(tokens["z"].shape, generator=torch.Generator().manual_seed(2), dtype=case.dtype).to(device)
    whole = {x: y.clone().requires_grad_() for x, y in (tokens | parameters).items()}
    expected, *_ = flash_qla.gated_delta_net(**whole, **heads, cu_seqlens=offsets)
    expected_gradients = torch.autograd.grad(expected, list(whole.values()), weight)
    for layout in LAYOUTS:
        num_tokens = len(tokens["a"][0])
        context = build_cp_context(offsets, dist.group.WORLD, 4, layout=layout, num_tokens=num_tokens)
        local = {x: cut(y, layout) for x, y in tokens.items()} | parameters
        local = {x: y.clone().requires_grad_() for x, y in local.items()}
        actual, state, window = flash_qla.gated_delta_net(**local, **heads, cp_context=context, output_final_state=True)
        assert state.shape[0] == window.shape[0] == context.num_seqs
        assert_near("y", actual, cut(expected, layout), rtol=1e-9, atol=1e-9)
        gradients = torch.autograd.grad(actual, list(local.values()), cut(weight, layout))
        for name, ours, all_of_them in zip(local, gradients, expected_gradients, strict=True):
            if name in tokens:
                bar_of = "dg" if name == "a" else f"d{name}"  # a is the gate's input
                assert_near(bar_of, ours, cut(all_of_them, layout), rtol=1e-9, atol=1e-9)
            else:
                dist.all_reduce(ours)
                assert_near(f"d{name}", ours, all_of_them, rtol=1e-9, atol=1e-9)
    for wrong, text in (({"initial_window": window}, "initial_window is a tensor"), ({}, "conv1d_kernel_size None")):
        without = context if wrong else build_cp_context(offsets, dist.group.WORLD, num_tokens=num_tokens)
        with pytest.raises(ValueError, match=text):
            flash_qla.gated_delta_net(**local, **heads, cp_context=without, **wrong)


def wrong_tokens(case: Case) -> None:
    inputs, _ = local_case(case, "contiguous", "cpu")
    flash_qla.chunk_gated_delta_rule(**inputs | {"q": inputs["q"][:, 1:]})


def without_rank_1(case: Case, how: str) -> None:
    """The others shall fail."""
    inputs, _ = local_case(case, "contiguous", "cpu")
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(5)
        return
    flash_qla.chunk_gated_delta_rule(**inputs)


def other_heads_on_rank_1(case: Case, checked: str, device: str = "cpu") -> None:
    os.environ["FLASH_QLA_CHECK"] = checked
    inputs, _ = local_case(case, "contiguous", of_this_rank(device))
    if dist.get_rank() == 1:
        for name in ("q", "k", "v", "g", "beta"):
            inputs[name] = torch.cat([inputs[name]] * 2, 2)
        inputs["initial_state"] = None
    flash_qla.chunk_gated_delta_rule(**inputs)
    dist.barrier()
