"""A Gated DeltaNet block saved twice, for a process without Python: as TorchScript and as an AOTInductor package.

    python examples/cpp/export_block.py --out build/cpp

The command writes block.pt, block.pt2, inputs.pt and expected.pt (the block's results in Python). It prints commands
that build the C++ program of this directory and run both models in it. Both take any numbers of tokens and sequences.

TorchScript is deprecated in PyTorch; torch.export with AOTInductor replaces it. AOTInductor compiles with $CXX, which
has to link libstdc++ dynamically: PyTorch's loader crashes on any package with a libstdc++ of its own.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_qla


class GatedDeltaNet(torch.nn.Module):
    """Projections, gates, l2norm and the Gated Delta Rule on packed sequences, in TorchScript's subset of Python.

    forward(x [1, T, hidden], cu_seqlens [N + 1] or None, state [N, H_v, D, D] or None) gives y [1, T, hidden] and the
    new state, fp32. Without cu_seqlens x is a batch [N, T, hidden].
    """

    def __init__(self, hidden: int = 64, H_k: int = 2, H_v: int = 4, D: int = 128):
        super().__init__()
        self.H_k, self.H_v, self.D = H_k, H_v, D
        self.qkv = torch.nn.Linear(hidden, (2 * H_k + H_v) * D, bias=False)
        self.gates = torch.nn.Linear(hidden, 2 * H_v, bias=False)
        # Some heads remember many tokens, others a few.
        self.A_log = torch.nn.Parameter(torch.linspace(-3, 1, H_v))
        self.dt_bias = torch.nn.Parameter(torch.zeros(H_v))
        self.out = torch.nn.Linear(H_v * D, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, 2 * self.H_k + self.H_v, self.D)
        q, k, v = heads.split([self.H_k, self.H_k, self.H_v], dim=2)
        a, b = self.gates(x).float().chunk(2, dim=-1)
        g = -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float())
        o, state = torch.ops.flash_qla.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            b.sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        return self.out(o.flatten(2)), state


def make_block(device: str) -> GatedDeltaNet:
    """fp32 on a CPU, bf16 on a GPU."""
    torch.manual_seed(0)
    return GatedDeltaNet().to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def make_inputs(block: GatedDeltaNet, lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(x, cu_seqlens, state) for packed sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    weight = block.out.weight
    x = torch.randn(1, sum(lengths), weight.shape[0], generator=generator)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    state = 0.1 * torch.randn(len(lengths), block.H_v, block.D, block.D, generator=generator)
    return x.to(weight), cu_seqlens.to(weight.device), state.to(weight.device)


@torch.no_grad()
def save_torchscript(block: GatedDeltaNet, path: Path) -> None:
    torch.jit.script(block).save(str(path))


@torch.no_grad()
def export(block: GatedDeltaNet) -> torch.export.ExportedProgram:
    """The graph with cu_seqlens and states, for any T and N from 2 on.

    PyTorch would need another graph for a dimension of size 1. A single sequence is given as two, the second one empty.
    """
    T, N = torch.export.Dim("T", min=2, max=1 << 20), torch.export.Dim("sequences", min=2, max=1 << 16)
    shapes = {"x": {1: T}, "cu_seqlens": {0: N + 1}, "state": {0: N}}
    return torch.export.export(block, make_inputs(block, (65, 30, 4)), dynamic_shapes=shapes)


def save_aoti_package(block: GatedDeltaNet, path: Path) -> None:
    torch._inductor.aoti_compile_and_package(export(block), package_path=str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/cpp"))
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if hopper else "cpu")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    block = make_block(args.device)
    save_torchscript(block, args.out / "block.pt")
    save_aoti_package(block, args.out / "block.pt2")
    inputs = make_inputs(block, (200, 0, 65, 1))
    with torch.no_grad():
        expected = block(*inputs)
    torch.save(tuple(x.cpu() for x in inputs), args.out / "inputs.pt")
    torch.save(tuple(x.cpu() for x in expected), args.out / "expected.pt")

    library = Path(flash_qla.__file__).with_name("libflash_qla.so")
    print(f"cmake -S {Path(__file__).parent} -B {args.out} -DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    print(f"cmake --build {args.out}")
    for model in ("block.pt", "block.pt2"):
        print(
            f"{args.out}/flash_qla_run {library} {args.out}/{model} {args.out}/inputs.pt {args.out}/outputs.pt"
            f" {args.device}"
        )


if __name__ == "__main__":
    main()
