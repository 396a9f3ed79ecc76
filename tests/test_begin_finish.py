"""begin, replay and finish of the two passes, and the affine maps of a state and of its gradient that the first ones
give. How ranks put them together is in test_cp.py."""

import math

import accuracy
import pytest
import reference
import torch
from begin_finish import BEGIN, FINISH, REPLAY, by_name, run_begin_finish, with_identities
from cases import (
    ALL_GRADIENTS_OF,
    ALL_INSIDE,
    Case,
    activated,
    backward_mode,
    covered_tokens,
    equal,
    forward_mode,
    make_gradients,
    make_inputs,
    on_meta,
    parametrize,
    reference_gradients,
    reference_of,
    run_backward,
)
from poison import poisoned
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla

ops = torch.ops.flash_qla
IN_PLACE = (REPLAY, *FINISH)
FP64 = dict.fromkeys(("dtype", "g_dtype", "beta_dtype", "initial_state", "dht"), torch.float64)

CASES = (
    *(Case(B=2, T=T, K=16, V=24, **FP64, state_v_first=T > 1) for T in (0, 1, 64, 150)),
    Case(T=70, H_k=1, H_v=3, K=13, V=5, dtype=torch.float32, gate="logsigmoid", scale=0.5, initial_state=None),
    Case(
        lengths=(30, 0, 100),
        padding=2,
        K=16,
        V=8,
        **FP64 | {"g_dtype": torch.bfloat16, "beta_dtype": torch.float16},
        keys="raw",
        use_qk_l2norm_in_kernel=True,
        **ALL_INSIDE,
    ),
    Case(B=2, T=200, H_k=1, H_v=2, gate="logsigmoid"),
    Case(lengths=(100, 150, 0, 33), H_k=1, H_v=2, gate="logsigmoid", padding=70),
    Case(lengths=(150, 40), H_k=1, H_v=1, gate="tiny", dtype=torch.float16, K=64, V=96, state_v_first=True),
    Case(lengths=(20, 130), H_k=1, H_v=1, gate="zero", beta="two", V=184, initial_state=None, dht=None),
    Case(T=130, H_k=1, H_v=2, gate="logsigmoid", keys="raw", use_qk_l2norm_in_kernel=True, **ALL_INSIDE),
    Case(lengths=(20, 130), H_k=1, H_v=2, gate="zero", K=192, V=64),
    Case(T=200, H_k=1, H_v=1, gate="logsigmoid", K=256, V=136, dtype=torch.float16, state_v_first=True),
    Case(T=200, H_k=1, H_v=2, auto_cp=False, strides="heads_first", do_strides="heads_first"),
)


def for_device(case: Case, device: str):
    if device == "cuda" and (case.K % 8 or case.V % 8 or case.dtype in (torch.float32, torch.float64)):
        pytest.skip("the GPU has multiples of 8 as K and V, in bf16 and fp16")


def sequences_of(case: Case) -> list[list[int]]:
    """Which may be asked for together: the last ones, the first ones, one without tokens, none."""
    lengths = case.lengths or (case.T,) * case.B
    last = len(lengths) - 1
    some = [[last], [0, last]] if last else [[0]]
    return [*some, *([[last, lengths.index(0)]] if 0 in lengths and case.lengths else []), []]


def expected_maps(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The maps of all sequences, by the recurrence from [state; I], V-first [N, H_v, V + K, K]."""
    arguments = with_identities(arguments)
    inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
    gradients = reference_gradients(inputs, do=arguments["do"], dht=arguments["dht"])
    return reference_of(inputs).final_state, gradients.dh0


def check_maps(case: Case, maps: torch.Tensor, expected: torch.Tensor, bar: float, name: str):
    """The rows of Z and of M, by heads. Of M, and through it of a state, less than 2^-24 may be dropped. M consists of
    16-bit numbers, and those of fp16 are multiples of 2^-24."""
    assert maps.shape == expected.shape and maps.is_contiguous()
    assert maps.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    dropped = 2.0**-24 * case.K**0.5 * (case.dtype not in (torch.float32, torch.float64))
    dropped += 2.0**-25 * case.K * (case.dtype == torch.float16)  # half a multiple in each of M's K * K entries
    for part, x, y in zip(
        "ZM", maps.double().split([case.V, case.K], 2), expected.split([case.V, case.K], 2), strict=True
    ):
        error, norm = (z.flatten(2).norm(dim=2) for z in (x - y, y))
        assert (error <= bar * norm + dropped).all(), f"{part} of the {name}: {error / norm}"


@parametrize(*CASES)
def test_against_the_recurrence(device, case):
    """Maps, and all outputs of both passes: put together they are the pass."""
    for_device(case, device)
    arguments = make_inputs(case, device) | make_gradients(case, device)
    inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
    expected, gradients = reference_of(inputs), reference_gradients(inputs, do=arguments["do"], dht=arguments["dht"])
    b = reference.chunk_cumsum(activated(inputs)["g"], inputs["cu_seqlens"])
    all_maps = expected_maps(arguments)
    modes = [(-1, -1)] if device == "cpu" else [(-1, -1), (1, 1), (2, 0)]  # of the GPU also other segments
    for (segments, reverse), sequences in ((x, y) for x in modes for y in sequences_of(case)):
        with forward_mode(segment_chunks=segments), backward_mode(reverse), poisoned(device):
            actual, *maps = run_begin_finish(arguments, sequences)
        name = f"begin and finish, segments of {segments} and {reverse}, {case}"
        for x, y, what in zip(maps, all_maps, ("forward", "backward"), strict=True):
            bar = accuracy.BARS[case.dtype] if what == "forward" else accuracy.gradient_bar("dh0", case.dtype, b)
            check_maps(case, x, y[sequences], accuracy.BLOCK_FACTOR * bar, f"{what}, {name}")
        assert not any(actual[x][:, covered_tokens(case) :].any() for x in ("o", "dq", "dv", "dg"))
        for output in ("o", "final_state"):
            accuracy.check(output, actual.pop(output), getattr(expected, output), dtype=case.dtype, case=name)
        assert actual.keys() == {x for a, x in ALL_GRADIENTS_OF.items() if inputs.get(a) is not None}
        accuracy.check_gradients(actual, gradients, dtype=case.dtype, case=name, g_cumsum=b)


@parametrize(*CASES)
def test_the_same_every_time(device, case):
    for_device(case, device)
    arguments = make_inputs(case, device) | make_gradients(case, device)
    for sequences in sequences_of(case):
        (outputs, *maps), (again, *others) = (run_begin_finish(arguments, sequences) for _ in range(2))
        assert equal(outputs, again) and all(torch.equal(x, y) for x, y in zip(maps, others, strict=True))
        if device == "cpu":  # on the GPU the passes may run in other modes
            inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
            o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
            passes = {"o": o, "final_state": final_state}
            passes |= run_backward(inputs, arguments["do"], arguments["dht"])
            assert equal(outputs, passes)


@parametrize(CASES[2], CASES[6], CASES[8])
def test_states_that_one_half_is_given(device, case):
    """Outputs depend on what finish is given alone: a rank's begin has no states of others."""
    for_device(case, device)
    arguments = make_inputs(case, device) | make_gradients(case, device)
    states = {name: arguments[name] for name in ("initial_state", "dht")}
    nothing = dict.fromkeys(states)
    for of_first, of_second in ((nothing, states), (states, nothing)):
        with poisoned(device):
            expected, *_ = run_begin_finish(arguments | of_second, [0])
            actual, *_ = run_begin_finish(arguments | of_second, [0], of_first)
            others, *_ = run_begin_finish(arguments | of_second | {"output_final_state": False}, [0], of_first)
        assert equal(actual, expected)
        assert others.pop("final_state").shape == (0,)
        assert equal(others, {name: actual[name] for name in others})


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [1, 3])
def test_nothing_is_left_of_decayed_states(segments):
    """M is 0, to the last bit, where the gates of a segment make it negligible."""
    case = Case(T=320, H_k=1, H_v=2, gate="underflow")
    arguments = make_inputs(case, "cuda") | make_gradients(case, "cuda")
    with forward_mode(segment_chunks=segments), backward_mode(segments):
        _, *maps = run_begin_finish(arguments, [0])
    for x in maps:
        assert not x[:, :, case.V :].any() and x[:, :, : case.V].any()


@pytest.mark.gpu
def test_what_is_negligible_is_dropped():
    """M of a segment is made where its norm may be 2^-20, and is 0, to the last bit, where it is at most 2^-28."""
    case = Case(T=128, H_k=1, H_v=2, gate="zero", beta="0.01")
    arguments = make_inputs(case, "cuda")
    arguments["g"] -= torch.tensor((20.0, 28.0), device="cuda") * math.log(2) / 128
    expected = expected_maps(arguments | make_gradients(case, "cuda"))
    with forward_mode(segment_chunks=2), backward_mode(2):
        _, *maps = run_begin_finish(arguments | make_gradients(case, "cuda"), [0])
    for x, y in zip(maps, expected, strict=True):
        assert accuracy.relative_error(x[:, 0, case.V :], y[:, 0, case.V :]) < accuracy.BF16_BAR
        assert not x[:, 1, case.V :].any()


# The ops


def op_arguments(op: str, case: Case, device: str) -> dict:
    arguments = make_inputs(case, device) | make_gradients(case, device)
    arguments |= {"map_sequences": sequences_of(case)[0], "output_final_state": True}
    if op in (BEGIN[1], REPLAY, FINISH[1]):
        arguments |= {"g": None, "g_raw": arguments["g"]}
    if op == FINISH[0]:
        arguments |= zip(("maps", "workspace", "o"), by_name(BEGIN[0], arguments), strict=True)
    if op in (REPLAY, FINISH[1]):
        names = ("maps", "workspace", "dq", "dk", "dv", "db", "dg")
        arguments |= zip(names, by_name(BEGIN[1], arguments), strict=True)
    if op == FINISH[1]:
        by_name(REPLAY, arguments)
    names = [x.name for x in getattr(ops, op).default._schema.arguments]
    return {name: arguments[name] for name in names if name in arguments}


@pytest.mark.parametrize("op", (*BEGIN, *IN_PLACE))
@parametrize(*CASES)
def test_fake_outputs_are_like_the_real_ones(device, op, case):
    for_device(case, device)
    arguments = op_arguments(op, case, device)
    real = getattr(ops, op)(**arguments)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        fake = getattr(ops, op)(**fakes)
    for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (real, fake)), strict=True):
        if op == REPLAY:
            assert x is y is None
            continue
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
        assert not x.requires_grad


@pytest.mark.parametrize("state_dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_fake_final_states_have_the_dtype_that_is_asked_for(device, state_dtype):
    case = Case(B=2, T=70, K=64)
    arguments = op_arguments(FINISH[0], case, device) | {"state_dtype": state_dtype}
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        fake = getattr(ops, FINISH[0])(**fakes)
    assert fake.dtype == getattr(ops, FINISH[0])(**arguments).dtype == state_dtype


def reduced(x):
    return x[:, :5]


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(
    ("op", "name", "wrong"),
    [
        (BEGIN[0], "initial_state", lambda x: x[:, :, :5]),
        (BEGIN[0], "v", reduced),
        (BEGIN[0], "g", lambda x: x.long()),
        (BEGIN[0], "map_sequences", lambda x: [2]),
        (BEGIN[0], "map_sequences", lambda x: [-1]),
        (BEGIN[0], "map_sequences", lambda x: [0, 0, 0]),
        (BEGIN[1], "dht", lambda x: x[:, :1]),
        (BEGIN[1], "do", lambda x: x[..., :8]),
        (REPLAY, "initial_state", lambda x: x[:, :1]),
        (REPLAY, "workspace", lambda x: x.int()),
        (FINISH[0], "o", reduced),
        (FINISH[0], "o", lambda x: x.float()),
        (FINISH[0], "workspace", lambda x: x.int()),
        (FINISH[1], "dv", reduced),
        (FINISH[1], "db", lambda x: x.mT.contiguous().mT),
    ],
)
def test_errors_name_the_argument(device, op, name, wrong):
    arguments = op_arguments(op, Case(B=2, T=70, K=64, V=128), device)
    with pytest.raises(RuntimeError, match=rf"flash_qla::{op}: {name} .*expected"):
        getattr(ops, op)(**arguments | {name: wrong(arguments[name])})


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize("op", (*BEGIN, *IN_PLACE))
def test_inputs_of_another_shape_are_refused_by_the_op_and_its_fake(device, op):
    """Each tensor of the pass, also where only its other calls compute with it."""
    arguments = op_arguments(op, Case(B=2, T=70, K=64, V=128, **ALL_INSIDE), device)
    inputs = ("q", "k", "v", "g", "g_raw", "beta", "A_log", "dt_bias", "initial_state", "do", "dht")
    for name in (x for x in inputs if arguments.get(x) is not None):
        wrong = arguments | {name: arguments[name][..., :-1]}
        for given in (wrong, on_meta(wrong)):
            with pytest.raises(RuntimeError, match=rf"flash_qla::{op}: .*expected"):
                getattr(ops, op)(**given)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.gpu
@pytest.mark.parametrize("larger", (False, True))
@pytest.mark.parametrize("op", IN_PLACE)
def test_a_workspace_of_another_call(op, larger):
    arguments = op_arguments(op, Case(B=2, T=70), "cuda")
    workspace = arguments["workspace"]
    other = torch.cat([workspace, workspace[:256]]) if larger else workspace[256:]
    with pytest.raises(RuntimeError, match=r"workspace has .* bytes, expected the .* that begin returns"):
        getattr(ops, op)(**arguments | {"workspace": other})
