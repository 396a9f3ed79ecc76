"""gated_delta_net, the region of a layer: against a plain recurrence in float64, and by the bits of its parts."""

import dataclasses
import itertools

import pytest
import reference
import torch
from poison import poisoned

import flash_qla

FP64 = torch.float64
GRADIENTS = (  # in the order of the arguments
    *("mixed", "z", "a", "b", "conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias"),
    *("initial_state", "initial_window"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] | None = (5, 0, 1, 2, 3, 70)  # packed; None: B x T
    B: int = 2
    T: int = 66
    padding: int = 0  # tokens after the last offset
    H_k: int = 1
    H_v: int = 2
    K: int = 8
    V: int = 16
    W: int = 4
    columns: int = 0  # of windows; 0: W - 1
    with_bias: bool = True
    with_dt_bias: bool = True
    with_states: bool = True
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, object], ...] = ()


def make(case: Case, device: str, seed: int = 0) -> tuple[dict, tuple]:
    """Arguments, and gradients of the results."""
    generator = torch.Generator().manual_seed(seed)
    B, T, N = case.B, case.T, case.B
    if case.lengths is not None:
        B, T, N = 1, sum(case.lengths) + case.padding, len(case.lengths)
    H_v, V, D = case.H_v, case.V, 2 * case.H_k * case.K + case.H_v * case.V
    options = dict(case.options)
    of_states = torch.float64 if case.dtype == FP64 else torch.float32

    def randn(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator, dtype=FP64).to(device, dtype)

    state = (N, H_v, V, case.K) if options.get("state_v_first") else (N, H_v, case.K, V)
    windows = (N, D, case.columns or case.W - 1) if case.with_states else (N, D, case.W - 1)
    arguments = {
        "mixed": randn(B, T, D),
        "z": randn(B, T, H_v, V),
        "a": randn(B, T, H_v),
        "b": randn(B, T, H_v),
        "conv_weight": randn(D, case.W),
        "conv_bias": randn(D) if case.with_bias else None,
        "norm_weight": randn(V),
        "A_log": randn(H_v, dtype=of_states),
        "dt_bias": randn(H_v, dtype=of_states) if case.with_dt_bias else None,
        "initial_state": randn(*state, dtype=of_states) if case.with_states else None,
        "initial_window": randn(*windows) if case.with_states else None,
        "output_final_state": True,
        **options,
        **{"num_k_heads": case.H_k, "head_k_dim": case.K},
    }
    if case.lengths is not None:
        arguments["cu_seqlens"] = torch.tensor((0, *case.lengths)).cumsum(0).to(device)
    return arguments, (randn(B, T, H_v, V), randn(*state, dtype=of_states), randn(*windows))


def formula(mixed, z, a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, num_k_heads, head_k_dim, **more):
    """The region token by token; it can be differentiated. rounded(x): what the op rounds to the tokens' dtype."""
    rounded = more.get("rounded", lambda x: x)
    cu_seqlens, state, window = (more.get(x) for x in ("cu_seqlens", "initial_state", "initial_window"))
    x, windows = mixed, None
    if conv_weight is not None:
        x, windows = reference.causal_conv1d(mixed, conv_weight, conv_bias, True, window, cu_seqlens)
    H_k, K, (B, T, H_v, V) = num_k_heads, head_k_dim, z.shape
    q, k, v = rounded(x).split([H_k * K, H_k * K, H_v * V], -1)
    q, k = (reference.l2norm(y.unflatten(-1, (H_k, K)).repeat_interleave(H_v // H_k, 2)) for y in (q, k))
    v = v.unflatten(-1, (H_v, V))
    g = -A_log.exp() * torch.nn.functional.softplus(a if dt_bias is None else a + dt_bias)
    beta = b.sigmoid() * (2 if more.get("allow_neg_eigval") else 1)
    v_first, scale = more.get("state_v_first", False), more.get("scale") or K**-0.5
    ranges = [(n, 0, T) for n in range(B)]
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        ranges = [(0, begin, end) for begin, end in itertools.pairwise(offsets)]
    o, states = [[torch.zeros_like(v[0, 0])] * T for _ in range(B)], []
    for n, (row, begin, end) in enumerate(ranges):
        S = x.new_zeros(H_v, K, V) if state is None else state[n].transpose(-2, -1) if v_first else state[n]
        for t in range(begin, end):
            S = g[row, t].exp()[:, None, None] * S
            change = beta[row, t, :, None] * (v[row, t] - torch.einsum("hkv,hk->hv", S, k[row, t]))
            S = S + torch.einsum("hk,hv->hkv", k[row, t], change)
            o[row][t] = scale * torch.einsum("hkv,hk->hv", S, q[row, t])
        states.append(S.transpose(-2, -1) if v_first else S)
    o = rounded(torch.stack([torch.stack(row) for row in o]))
    y = reference.gated_rms_norm(
        o, z, norm_weight, eps=more.get("norm_eps", 1e-6), activation=more.get("norm_activation", "silu")
    )
    return y, torch.stack(states), windows


def parts(mixed, z, a, b, conv_weight, conv_bias, norm_weight, A_log, dt_bias, num_k_heads, head_k_dim, **more):
    """The region by the functions of its parts."""
    norm = {x: more.pop(f"norm_{x}") for x in ("eps", "activation") if f"norm_{x}" in more}
    shared = {x: more.get(x) for x in ("output_final_state", "cu_seqlens")}
    x, window = flash_qla.causal_conv1d(
        mixed, conv_weight, conv_bias, initial_state=more.pop("initial_window", None), **shared
    )
    inside = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel"), True)
    o, state = flash_qla.chunk_gated_delta_rule_packed(
        x, a, b, num_k_heads, head_k_dim, A_log=A_log, dt_bias=dt_bias, **inside, **more
    )
    return flash_qla.gated_rms_norm(o, z, norm_weight, **norm), state, window


def step(function, arguments: dict, gradients: tuple) -> dict[str, torch.Tensor]:
    """Results, and the gradients of all tensors."""
    leaves = {x: arguments[x].detach().requires_grad_() for x in GRADIENTS if arguments.get(x) is not None}
    results = function(**arguments | leaves)
    leaf_gradients = torch.autograd.grad(results, list(leaves.values()), gradients)
    return dict(zip(("y", "final_state", "final_window"), results, strict=True)) | {
        f"d{x}": dx for x, dx in zip(leaves, leaf_gradients, strict=True)
    }


CASES = (
    Case(),
    Case(lengths=None, with_bias=False, W=2),
    Case(lengths=(3, 65), H_k=2, H_v=2, W=3, columns=3, options=(("state_v_first", True), ("allow_neg_eigval", True))),
    Case(lengths=(64, 1), with_states=False, with_dt_bias=False, options=(("norm_activation", "sigmoid"),)),
    Case(lengths=(7, 66), H_v=3, padding=3, options=(("scale", 0.7), ("norm_eps", 1e-2), ("max_seqlen", 66))),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula(case):
    arguments, gradients = make(dataclasses.replace(case, dtype=FP64), "cpu")
    actual, expected = (step(x, arguments, gradients) for x in (flash_qla.gated_delta_net, formula))
    for name, x in actual.items():
        y, total = expected[name], sum(case.lengths or ())
        if case.padding and name in ("y", "dmixed", "dz", "da", "db"):  # there y is zeros, and so are its gradients
            assert not x[:, total:].any()
            x, y = x[:, :total], y[:, :total]
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def check_bits_of_the_parts(case: Case, device: str, seed: int = 0) -> None:
    arguments, gradients = make(case, device, seed)
    with poisoned(device):
        actual, expected = (step(x, arguments, gradients) for x in (flash_qla.gated_delta_net, parts))
    for name, x in expected.items():
        assert torch.equal(actual[name], x) and actual[name].dtype == x.dtype, name


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_parts(case, dtype, device):
    check_bits_of_the_parts(dataclasses.replace(case, dtype=dtype), device)


def test_slices_and_one_dimension_of_heads(device):
    """mixed and z as slices of one projection, z without its heads, the weight as torch.nn.Conv1d has it: the same
    bits."""
    arguments, _ = make(Case(lengths=None), device)
    mixed, z = arguments["mixed"], arguments["z"].flatten(-2)
    slices = torch.cat([mixed, z], -1).split([mixed.shape[-1], z.shape[-1]], -1)
    moved = {"mixed": slices[0], "z": slices[1], "conv_weight": arguments["conv_weight"][:, None]}
    expected, actual = flash_qla.gated_delta_net(**arguments), flash_qla.gated_delta_net(**arguments | moved)
    assert actual[0].shape == z.shape and torch.equal(actual[0], expected[0].flatten(-2))
    assert all(map(torch.equal, actual[1:], expected[1:]))


def test_pieces():
    """A sequence in pieces of 1, 2 and more tokens, each from the state and the window of the one before."""
    arguments, _ = make(Case(lengths=None, B=2, T=80, dtype=FP64), "cpu")
    expected = flash_qla.gated_delta_net(**arguments)
    begin, outputs, states = 0, [], {x: arguments[x] for x in ("initial_state", "initial_window")}
    for length in (1, 2, 64, 13):
        piece = {x: arguments[x][:, begin : begin + length] for x in ("mixed", "z", "a", "b")}
        y, *last = flash_qla.gated_delta_net(**arguments | piece | states)
        begin, states = begin + length, dict(zip(states, last, strict=True))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(states["initial_state"], expected[1], rtol=1e-10, atol=1e-10)
    assert torch.equal(states["initial_window"], expected[2])


def test_what_autograd_saves(device):
    """The arguments and o."""
    arguments, _ = make(Case(), device)
    leaves = {x: arguments[x].requires_grad_() for x in GRADIENTS}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        results = flash_qla.gated_delta_net(**arguments)
    assert results[0].requires_grad
    known = {x.data_ptr() for x in (*leaves.values(), arguments["cu_seqlens"])}
    assert len({*saved} - known) == 1 and known <= {*saved}


def test_without_final_states(device):
    arguments, _ = make(Case(), device)
    y, *none = flash_qla.gated_delta_net(**arguments | {"output_final_state": False})
    assert none == [None, None] and torch.equal(y, flash_qla.gated_delta_net(**arguments)[0])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_final_state_in_another_dtype(dtype, device):
    arguments, _ = make(Case(), device)
    actual, expected = (x(**arguments, state_dtype=dtype) for x in (flash_qla.gated_delta_net, parts))
    assert actual[1].dtype == dtype and all(map(torch.equal, actual, expected))


def test_compiled(device):
    """In one graph, with gradients: the bits of an eager call."""
    arguments, gradients = make(Case(lengths=None), device)
    compiled = torch.compile(flash_qla.gated_delta_net, fullgraph=True, backend="aot_eager")
    actual, expected = (step(x, arguments, gradients) for x in (compiled, flash_qla.gated_delta_net))
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_func_grad():
    arguments, (dy, *_) = make(Case(lengths=None, dtype=FP64), "cpu")
    others = {x: y for x, y in arguments.items() if x != "mixed"}

    def loss(mixed):
        return (flash_qla.gated_delta_net(mixed, **others)[0] * dy).sum()

    mixed = arguments["mixed"].clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(arguments["mixed"]), torch.autograd.grad(loss(mixed), mixed)[0])


@pytest.mark.gpu
def test_graph_with_other_lengths():
    """A captured call, replayed on other numbers and offsets."""
    (arguments, _), (others, _) = (make(Case(lengths=x, K=64, V=64), "cuda", seed=len(x)) for x in ((70, 3), (1, 72)))
    for _ in range(2):
        flash_qla.gated_delta_net(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_qla.gated_delta_net(**arguments)
    for name, x in others.items():
        if torch.is_tensor(x):
            arguments[name].copy_(x)
    graph.replay()
    assert all(map(torch.equal, results, flash_qla.gated_delta_net(**others)))


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    (
        (
            "mixed",
            lambda x: x[..., :-1],
            "conv_weight has shape [48, 4], expected [47, W] or [47, 1, W]",
        ),
        ("z", lambda x: x[..., :-1], "mixed has 48 channels, expected 2 H_k K + H_v V, with num_k_heads H_k = 1, "),
        ("z", lambda x: x.flatten(2)[..., :-1], "z has 3 dimensions (shape [1, 81, 31]), expected 4 ([B, T, H_v, V])"),
        ("z", lambda x: x.double(), "z has dtype float64, expected bfloat16, the dtype of mixed"),
        ("a", lambda x: x[:, :-1], "a has shape [1, 80, 2], expected [1, 81, 2] ([B, T, H_v])"),
        ("b", lambda x: x.long(), "b has dtype int64, expected "),
        ("conv_bias", lambda x: x[:-1], "conv_bias has shape [47], expected [48] ([D])"),
        ("norm_weight", lambda x: x[:-1], "norm_weight has shape [15], expected [16] ([V], the channels of o)"),
        ("A_log", lambda x: x[:-1], "A_log has shape [1], expected [2] ([H_v])"),
        ("initial_state", lambda x: x[:-1], "initial_state has shape [5, 2, 8, 16], expected [6, 2, 8, 16]"),
        ("initial_window", lambda x: x[..., :-1], "initial_window has shape [6, 48, 2], expected [6, 48, 3 or 4]"),
        ("cu_seqlens", lambda x: x.float(), "cu_seqlens has dtype float32, expected int32 or int64"),
        ("num_k_heads", lambda x: 0, "mixed has 48 channels, expected 2 H_k K + H_v V, with num_k_heads H_k = 0, "),
        ("norm_eps", lambda x: -1.0, "norm_eps is -1, expected at least 0"),
        ("norm_activation", lambda x: "relu", 'norm_activation is "relu", expected "silu" or "sigmoid"'),
    ),
)
def test_errors(name, wrong, text, device, errors_change_nothing):
    """An argument has the name that the caller gave it."""
    arguments, _ = make(Case(), device)
    with pytest.raises(RuntimeError) as error:
        flash_qla.gated_delta_net(**arguments | {name: wrong(arguments.get(name))})
    assert f"flash_qla::gated_delta_net: {text}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    (
        ("o", torch.Tensor.double, "o has dtype float64, expected bfloat16, the dtype of z"),
        ("o", lambda x: x[:, :-1], "o has shape [1, 80, 2, 16], expected [1, 81, 2, 16] ([B, T, H_v, V], like z)"),
        ("dy", lambda x: x[:, :-1], "dy has shape [1, 80, 2, 16], expected [1, 81, 2, 16] ([.., V], like o)"),
        ("dy", torch.Tensor.long, "dy has dtype int64, expected "),
    ),
)
def test_errors_of_the_backward(name, wrong, text, device):
    arguments, _ = make(Case(), device)
    del arguments["output_final_state"]
    arguments |= {"o": torch.zeros_like(arguments["z"]), "dy": torch.zeros_like(arguments["z"])}
    with pytest.raises(RuntimeError) as error:
        torch.ops.flash_qla.gated_delta_net_bwd(**arguments | {name: wrong(arguments[name])})
    assert f"flash_qla::gated_delta_net_bwd: {text}" in str(error.value)
