"""Runs one kernel in the emulator on one shape, in the op that launches it, and compares the op's results with the fp64
reference; after a build of the package:

    python -m emulator --kernel chunk_backward --shape 2x130 --heads 2x4 --head-dims 96x64 --l2norm
    python -m emulator --kernel segment_scan --shape 300+0+64 --mode segment_chunks=2 value_tile=64

It prints each launch with its grid and seconds, and each error with its bar. The exit status is 1 if the kernel is not
launched, or an error is over its bar.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEGMENTS, FUSED_SEGMENTS = {"segment_chunks": 1}, {"value_tile": 128, "segment_chunks": 1, "fused": 1}
WHOLE = {"value_tile": 128, "segment_chunks": 0}
WIDE, L2NORM = {"K": 256}, {"use_qk_l2norm_in_kernel": True, "keys": "raw"}
# The call that launches a kernel, the mode of its dispatch, and fields of Case
KERNELS = {
    "copy_tokens": ("forward", {}, {"strides": "reversed_dims"}),
    "chunk_plan": ("forward", SEGMENTS, {}),
    "chunk_matrices": ("intermediates", WHOLE, {}),
    "chunk_forward": ("intermediates", WHOLE, {}),
    "portable_forward": ("portable", {}, {}),
    "portable_scan": ("portable", SEGMENTS, {}),
    **dict.fromkeys(
        ("portable_replay", "portable_replay_gradients", "portable_token_gradients"), ("portable backward", {}, {})
    ),
    "fused_forward": ("forward", {"fused": 1}, {}),
    "segment_memory": ("forward", FUSED_SEGMENTS, {}),
    "segment_maps": ("forward", SEGMENTS, {}),
    "segment_scan": ("forward", SEGMENTS, {}),
    "compose_maps": ("ranks", {}, {}),
    "backward_maps": ("backward", SEGMENTS, {}),
    "replay_states": ("backward", {}, {}),
    "chunk_backward": ("backward", {}, {}),
    "replay_gradients": ("backward", {}, WIDE),
    "token_gradients": ("backward", {}, WIDE),
    "gate_gradients": ("backward", {}, {"use_gate_in_kernel": True}),
    "l2norm": ("backward", {}, WIDE | L2NORM),
    "l2norm_backward": ("backward", {}, WIDE | L2NORM),
    **dict.fromkeys(("causal_conv1d", "causal_conv1d_backward", "conv_windows"), ("convolution", {}, {})),
    "conv_gradients": ("convolution", {}, {}),
    "decode": ("decode", {}, {"state_v_first": True}),
    "decode_buffered": ("decode_buffered", {}, {"state_v_first": True}),
    **dict.fromkeys(("decode_region", "decode_region_drafts"), ("decode_region", {}, {})),
    "gated_rms_norm": ("norm", {}, {}),
    "gated_rms_norm_backward": ("norm", {}, {}),
    "sum_rows": ("norm", {}, {}),
}


def case_of(options: argparse.Namespace, defaults: dict):
    import torch
    from cases import ALL_INSIDE, Case

    B, _, T = options.shape.partition("x")
    fields = {"B": int(B), "T": int(T)} if T else {"lengths": tuple(map(int, options.shape.split("+")))}
    for names, text in ((("H_k", "H_v"), options.heads), (("K", "V"), options.head_dims)):
        fields |= zip(names, map(int, text.split("x")), strict=True) if text else {}
    flags = (L2NORM if options.l2norm else {}) | (ALL_INSIDE if options.activations else {})
    return Case(**defaults | flags | fields, dtype=getattr(torch, options.dtype), gate="logsigmoid")


def check(call: str, case, mode: dict) -> list[str]:
    """Makes a call. Returns lines about the errors, and those over their bars after MISS."""
    import accuracy
    import cases
    import test_convolution
    import test_decode_region
    import test_norm
    import trials
    from begin_finish import run_begin_finish

    if call == "norm":  # raises an error
        norm_case = test_norm.Case((*cases.shapes(case)[:2], case.H_v, case.V), case.dtype)
        test_norm.check(norm_case, test_norm.make(norm_case, "cuda"))
        return ["y and the gradients are within their bars"]
    if call == "convolution":
        fields = {name: getattr(case, name) for name in ("B", "T", "lengths", "dtype")}
        ratios = test_convolution.ratios(test_convolution.Case(**fields, D=2 * case.H_k * case.K + case.H_v * case.V))
        lines = [f"{name:12} {ratio:.2f} of its bar" for name, ratio in ratios.items()]
        return [*lines, *(f"MISS {name}" for name, ratio in ratios.items() if not ratio <= 1)]
    if call == "decode_region":  # raises an error
        sizes = {name: getattr(case, name) for name in ("T", "H_k", "H_v", "K", "V", "dtype")}
        test_decode_region.check(test_decode_region.Case(indices=tuple(range(case.B)), **sizes), "cuda")
        return ["y, windows and states are within their bars"]
    if call.startswith("decode"):  # a trial has its own bars, and raises an error
        ratios = trials.run(trials.Trial(call, case), "cuda")
        return [f"{name:12} {ratio:.2f} of its bar" for name, ratio in ratios.items()]
    inputs, gradients = cases.make_inputs(case, "cuda"), cases.make_gradients(case, "cuda")
    kernels = "portable" if call.startswith("portable") else None
    forced_mode = cases.backward_mode if call.endswith("backward") else cases.forward_mode
    with cases.forced_dispatch(kernels=kernels), forced_mode(**mode):
        if call.endswith("backward"):
            outputs = cases.run_autograd(inputs, **gradients)
        elif call == "ranks":
            outputs = run_begin_finish(inputs | gradients, [0])[0]
        elif call in ("intermediates", "portable"):
            outputs = dict(zip(("g_cumsum", "A", "o", "h", "final_state"), cases.run_forward(inputs), strict=True))
        else:
            results = cases.flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
            outputs = dict(zip(("o", "final_state"), results, strict=True))
    expected = cases.expected_of_both(inputs, gradients)
    misses = accuracy.compare(outputs, *expected, dtype=case.dtype, case=case)[1]
    return [*accuracy.table(accuracy.worst_errors()), *(f"MISS {miss}" for miss in misses)]


def main() -> int:
    parser = argparse.ArgumentParser("python -m emulator", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", required=True, choices=KERNELS)
    parser.add_argument("--shape", default="1x130", help="B x T, or lengths of packed sequences as in 300+0+64")
    parser.add_argument("--heads", default="2x4", help="H_k x H_v")
    parser.add_argument("--head-dims", metavar="KxV", help="128x128, or 256x128 for kernels of wide keys")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--l2norm", action="store_true", help="of queries and keys, inside")
    parser.add_argument("--activations", action="store_true", help="pre-activation gates and betas")
    parser.add_argument("--mode", nargs="+", metavar="FIELD=N", help="of flash_qla.testing.forced_dispatch")
    options = parser.parse_args()
    call, mode, fields = KERNELS[options.kernel]
    if options.mode is not None:
        mode = {name: int(value) for name, value in (field.split("=") for field in options.mode)}
    command = [sys.executable, ROOT / "emulator/build.py", ROOT / "build/emulator"]
    package = subprocess.check_output(command, text=True).strip()
    sys.path[:0] = [package, str(ROOT / "tests"), str(ROOT / "emulator")]
    with tempfile.NamedTemporaryFile("r") as launches:
        os.environ |= {"EMULATED_LAUNCHES": launches.name, "FLASH_QLA_QUIET": "1"}
        import plugin

        plugin.pytest_configure()
        with plugin.OnTheCpu():
            lines = check(call, case_of(options, fields), mode)
        launched = [line.split() for line in launches]
    for _, name, grid, seconds in launched:
        print(f"{name:60} {grid:>12} CTAs {float(seconds):8.2f} s")
    print(*lines, sep="\n")
    if options.kernel not in {kernel for kernel, *_ in launched}:
        print(f"{options.kernel} was not launched: see --mode, --head-dims, --l2norm and --activations")
        return 1
    return 1 if any(line.startswith("MISS") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
