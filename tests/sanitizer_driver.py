"""A short tour of every kernel instance, for compute-sanitizer: test_gpu_sanitizer.py runs it under each tool.

Inputs are made on the CPU and outputs are checked there, so that nearly all instrumented kernels are ours. Run it with
PYTORCH_NO_CUDA_MEMORY_CACHING=1: each tensor is then an allocation of its own, and memcheck sees accesses beyond it.
"""

import dataclasses
import itertools

import begin_finish
import pytest
import test_convolution
import test_decode
import test_decode_buffered
import test_decode_region
import test_decode_region_drafts
import test_norm
import test_prefill
import test_region
import test_region_prefill
import torch
from cases import (
    Case,
    backward_mode,
    forward_mode,
    make_gradients,
    make_inputs,
    run_backward,
    run_forward,
    run_forwards,
)
from every_op import NAMES, make_call

import flash_qla
from flash_qla.testing import forced_dispatch

RAW = {"g_dtype": torch.bfloat16, "beta_dtype": torch.float16}
INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, **RAW}
CASES = (
    Case(lengths=(65, 0, 7, 130), padding=9),
    Case(lengths=(65, 0, 7, 130), padding=9, H_v=6, **INSIDE),
    Case(lengths=(65, 0, 7, 130), padding=9, K=40, V=200, **INSIDE),
    Case(B=2, T=70, dtype=torch.float16, **INSIDE, A_log=torch.bfloat16, dt_bias=None),
    Case(B=2, T=100, state_v_first=True, dtype=torch.float16, initial_state=None, H_k=1, H_v=3),
    Case(T=64, keys="raw", use_qk_l2norm_in_kernel=True, H_k=1, H_v=1, dht=None, do_strides="expanded"),
    Case(
        lengths=(70, 1),
        keys="raw",
        use_qk_l2norm_in_kernel=True,
        dtype=torch.float16,
        cu_dtype=torch.int64,
        H_k=1,
        H_v=2,
    ),
    Case(T=700, H_k=1, H_v=1, gate="logsigmoid"),
    Case(T=0),
    Case(lengths=(0, 0), padding=3),
)
# Cases of the forward alone, by the arguments of forward_mode: enough segments and chunks to use every
# stage again, one head whose maps are left out and one whose maps are not.
SEGMENTED = Case(lengths=(650, 0, 65), padding=9, H_k=1, H_v=2)
MODES = ((64, 2), (128, 5), (128, 0, 1), (128, 2, None, 1))
SHARED = Case(T=400, H_k=2, H_v=128, gate="logsigmoid")  # enough heads that some share a CTA's K K^T
TURNS = Case(lengths=(1, 65, 0, 7, 64, 30, 130), H_k=16, H_v=64)  # more segments and heads than SMs: CTAs take turns
BAD_OFFSETS = ([0, 100, 50, 300], [-7, 100, 2**31 - 1, 9], [0, -1, -(2**31), 500], [300, 200, 100, 0])

# Offsets or indices, over and over: none is right, and none names a slot twice
HOSTILE = (
    ([1000, -7, 2**31 - 1, -(2**31)], torch.int32),
    ([2**40, -1, -(2**62), 2**62], torch.int64),
)


def finite(outputs) -> bool:
    return all(x.cpu().isfinite().all() for x in outputs if x is not None)


def run_low_level(inputs: dict, gradients: dict):
    outputs = run_forward(inputs)
    return [*outputs, *run_backward(inputs, **gradients, intermediates=outputs[:2]).values()]


for case in CASES:
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    assert finite(flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)), case
    assert finite(run_low_level(inputs, gradients)), case
    print("done:", case, flush=True)

for dtype in (torch.bfloat16, torch.float16):
    for inside in ({}, INSIDE):
        inputs = make_inputs(dataclasses.replace(SEGMENTED, dtype=dtype, **inside), "cuda")
        for mode in MODES:
            with forward_mode(*mode):
                assert finite(run_forwards(inputs).values()), (dtype, mode, inside)
            print("done:", SEGMENTED, dtype, mode, *inside, flush=True)
        for K in (128, 256):
            with forced_dispatch(kernels="portable"):
                case = dataclasses.replace(SEGMENTED, dtype=dtype, K=K, **inside)
                inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
                assert finite(run_forwards(inputs).values()), (dtype, K, inside)
                assert finite(run_low_level(inputs, gradients)), (dtype, K, inside)
        print("done: portable kernels,", SEGMENTED, dtype, *inside, flush=True)
assert finite(run_forward(make_inputs(SHARED, "cuda"), output_h=False)), SHARED
print("done:", SHARED, flush=True)
for mode in ((64, 0), (128, 0), (128, 0, 1), (128, 1, 1)):
    with forward_mode(*mode):
        assert finite(run_forwards(make_inputs(TURNS, "cuda")).values()), (TURNS, mode)
print("done:", TURNS, flush=True)

for case, sequences in (
    (dataclasses.replace(SEGMENTED, dtype=dtype), [0, 2]) for dtype in (torch.bfloat16, torch.float16)
):
    arguments = make_inputs(case, "cuda") | make_gradients(case, "cuda")
    for kernels in ("device", "portable"):
        with forced_dispatch(kernels=kernels):
            outputs, *maps = begin_finish.run_begin_finish(arguments, sequences)
        assert finite([*outputs.values(), *maps]), (case, kernels)
    print("done: begin and finish of", case, flush=True)

case = dataclasses.replace(CASES[0], lengths=(100, 100, 100), padding=0)
inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
for offsets in BAD_OFFSETS:
    inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32).cuda()
    assert finite(run_low_level(inputs, gradients)), offsets
    for mode in ((64, 1), (128, 0, 1), (128, 1, 1)):
        with forward_mode(*mode):
            assert finite(run_forwards(inputs).values()), (offsets, mode)
    with forced_dispatch(kernels="portable"):
        assert finite(run_forwards(inputs).values()), offsets
        assert finite(run_low_level(inputs, gradients)), offsets
    for segment_chunks in (0, 1):
        with backward_mode(segment_chunks):
            assert finite(run_low_level(inputs, gradients)), (offsets, segment_chunks)
    print("done:", offsets, flush=True)

# Every op, as it is and with each table of offsets or indices holding anything
for name in NAMES:
    try:
        call = make_call(name, "cuda")
    except pytest.skip.Exception:
        continue
    assert finite(call().values()), name
    for argument, x in call.arguments.items():
        if torch.is_tensor(x) and not x.is_floating_point():
            for values, dtype in HOSTILE:
                table = torch.tensor((values * x.numel())[: x.numel()], dtype=dtype).reshape(x.shape).cuda()
                hostile = dataclasses.replace(call, arguments=call.arguments | {argument: table})
                assert finite(hostile().values()), (name, argument, values)
    print("done:", name, flush=True)

# Decoding: drafts, a tree, and indices that are outside
DTYPES = (torch.bfloat16, torch.float16)
for dtype, state_dtype, T, v_first in itertools.product(DTYPES, test_decode.BARS, (1, 3, 7), (True, False)):
    if state_dtype == torch.float64:
        continue
    case = test_decode.Case(T=T, K=96, V=136, dtype=dtype, state_dtype=state_dtype, gap=8, v_first=v_first)
    inputs = test_decode.make_inputs(case, "cuda")
    wrong = {"state_indices": torch.tensor([3, 40, -7]).cuda(), "parents": torch.full((3, T), 9).cuda()}
    for change in ({}, wrong | {"write_indices": torch.full((3, 2), 99).cuda()}):
        assert finite([flash_qla.decode_gated_delta_rule(**inputs | change)]), (case, change)
    print("done:", case, flush=True)

# Decoding on states that lag, from an empty backlog to a flush
for dtype, state_dtype in itertools.product((torch.bfloat16, torch.float16), test_decode.BARS):
    if state_dtype == torch.float64:
        continue
    case = test_decode.Case(T=4, K=96, V=136, dtype=dtype, state_dtype=state_dtype, gap=8)
    test_decode_buffered.check_steps(test_decode_buffered.make_call(case, 3, "cuda"))
    print("done: buffered", case, flush=True)

# Prefill on a pool: some checkpoints, indices that are outside, and a sequence without a slot
for dtype, pool_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
    case = test_prefill.Case(**test_prefill.SIZES | {"dtype": dtype, "K": 96, "V": 72}, **test_prefill.LENGTHS)
    arguments = test_prefill.make_arguments(case, pool_dtype, gap=8, device="cuda")
    arguments["state_indices"][2:4] = torch.tensor([-1, test_prefill.SLOTS])
    arguments |= {"checkpoint_every": 64, "checkpoint_indices": torch.full((6, 2), test_prefill.SLOTS).cuda()}
    arguments["checkpoint_indices"][0, 0] = 0
    for mode in test_prefill.MODES:
        with test_prefill.in_mode("cuda", mode):
            assert finite([flash_qla.prefill_gated_delta_rule(**arguments)]), (case, mode)
            short = {"checkpoint_every": 50, "batch_invariant": True}  # the chunks before checkpoints are short
            assert finite([flash_qla.prefill_gated_delta_rule(**arguments | short)]), (case, mode)
    print("done:", case, pool_dtype, flush=True)
# The convolution: widths, dtypes, rows in pieces and channel by channel, and offsets that are outside
for case in test_convolution.CASES:
    inputs = test_convolution.make_inputs(case, "cuda")
    gradients = test_convolution.make_gradients(case, inputs)
    finite_dy = gradients["dy"].cpu().nan_to_num().cuda()
    assert finite(test_convolution.run_ops(inputs, gradients | {"dy": finite_dy}).values()), case
    for layout in ("odd slices", "every second channel"):
        moved = {"x": test_convolution.LAYOUTS[layout](inputs["x"])}
        assert finite(test_convolution.run_ops(inputs | moved, gradients | {"dy": finite_dy}).values()), (case, layout)
    print("done:", case, flush=True)

# The region on pools: windows and states of a page, and checkpoints of both in slots and in rows
for kept in ("slots", "rows"):
    region = test_region.Case((130, 0, 2, 64), K=64, V=64)
    case = test_region_prefill.Case(region, memory="page", slots="some", other_slots=True, every=50, kept=kept)
    assert finite([flash_qla.prefill_gated_delta_net(**test_region_prefill.make(case, "cuda"))]), case
    print("done: region on pools", kept, flush=True)

# A token of the region: every instance, clusters of all sizes, several turns of a CTA
for case in test_decode_region.CASES:
    if case.V % 8 == 0:
        assert finite([flash_qla.decode_gated_delta_net(**test_decode_region.make(case, "cuda"))]), case
print("done: region of a token", flush=True)
for case in test_decode_region_drafts.CASES:
    assert finite([flash_qla.decode_gated_delta_net(**test_decode_region_drafts.make(case, "cuda"))]), case
print("done: region of drafts", flush=True)

# The norm: every instance, in steps over rows of three strides
for dtype, V in itertools.product(test_norm.DTYPES, (64, 100, 264)):
    case = test_norm.Case((2, 9, 3, V), dtype)
    tensors = test_norm.make(case, "cuda")
    tokens = test_norm.LAYOUTS["gaps"]([tensors[x] for x in ("o", "z", "dy")])
    assert finite(test_norm.run(case, tensors | dict(zip(("o", "z", "dy"), tokens, strict=True))).values()), case
    print("done: norm", case, flush=True)
print("driver finished", flush=True)
