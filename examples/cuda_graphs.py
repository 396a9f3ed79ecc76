"""A server's prefill: one CUDA graph per token budget, captured once and replayed for any sequences that fit.

    python examples/cuda_graphs.py

A graph has fixed shapes, and the Gated Delta Rule needs nothing else to be fixed: the host never reads cu_seqlens. A
graph of T tokens and N sequences serves any smaller batch. Rows from the last offset on are padding. Missing sequences
are empty ones at the end, whose states do not change.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from flash_qla import chunk_gated_delta_rule


class PrefillGraphs:
    """layer(*tokens, cu_seqlens, states) -> (o, new states), captured for each token budget.

    All graphs read the same buffers and write the new states over the old ones. They share memory for intermediate
    results, because only one runs at a time. A CPU has no graphs; the same steps run there eagerly.

    Args:
        layer: the function; its o is [1, T, ...], and it reads no tensor back to the host.
        budgets: the most tokens of each graph.
        tokens: for each of layer's first arguments a tensor [1, any, ...] of its dtype, device and further dimensions.
        states: zeros [N, H_v, K, V], for at most N sequences.
    """

    def __init__(
        self, layer: Callable, budgets: Sequence[int], tokens: Sequence[torch.Tensor], states: torch.Tensor
    ) -> None:
        self.layer = layer
        self.budgets = sorted(budgets)
        self.tokens = [x.new_zeros(1, self.budgets[-1], *x.shape[2:]) for x in tokens]
        self.states = states
        self.cu_seqlens = torch.zeros(len(states) + 1, dtype=torch.int32, device=states.device)
        self.steps = {}
        pool = None
        for budget in reversed(self.budgets):  # the largest first: the others fit into its memory
            self.steps[budget], pool = self._capture(budget, pool)

    def _run(self, budget: int) -> torch.Tensor:
        o, new_states = self.layer(*(x[:, :budget] for x in self.tokens), self.cu_seqlens, self.states)
        self.states.copy_(new_states)
        return o

    @torch.no_grad()
    def _capture(self, budget: int, pool):
        if not self.states.is_cuda:
            return (lambda: self._run(budget)), None
        self._run(budget)  # kernels are loaded outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            o = self._run(budget)

        def replay() -> torch.Tensor:
            graph.replay()
            return o

        return replay, graph.pool()

    def budget_of(self, lengths: Sequence[int]) -> int:
        """The smallest budget that these sequences fit in."""
        for budget in self.budgets:
            if budget >= sum(lengths):
                return budget
        raise ValueError(f"{sum(lengths)} tokens came, expected at most {self.budgets[-1]}, the largest budget")

    @torch.no_grad()
    def prefill(
        self, tokens: Sequence[torch.Tensor], lengths: Sequence[int], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of len(lengths) sequences, packed.

        Args:
            tokens: layer's first arguments, [1, sum(lengths), ...] each.
            lengths: tokens of each sequence.
            states: initial states, [len(lengths), H_v, K, V].

        Returns:
            o [1, sum(lengths), ...] and the new states, both in buffers that the next call overwrites.

        Raises:
            ValueError: too many tokens or sequences.
        """
        total, N, room = sum(lengths), len(lengths), len(self.states)
        budget = self.budget_of(lengths)
        if room < N:
            raise ValueError(f"{N} sequences came, expected at most {room}, as there are states")
        offsets = [*itertools.accumulate(lengths, initial=0), *[total] * (room - N)]
        pinned = torch.tensor(offsets, dtype=torch.int32, pin_memory=self.states.is_cuda)  # or the copy would wait
        self.cu_seqlens.copy_(pinned, non_blocking=True)
        for buffer, x in zip(self.tokens, tokens, strict=True):
            buffer[:, :total].copy_(x)
        self.states[:N].copy_(states)
        return self.steps[budget]()[:, :total], self.states[:N]


def gated_delta_rule(q, k, v, g, beta, cu_seqlens, states):
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device, dtype = ("cuda", torch.bfloat16) if hopper else ("cpu", torch.float32)
    H_k, H_v, D = (16, 32, 128) if hopper else (1, 2, 128)
    torch.manual_seed(0)

    def random_tokens(T):
        q, k = torch.randn(2, 1, T, H_k, D, device=device, dtype=dtype).unbind()
        v = torch.randn(1, T, H_v, D, device=device, dtype=dtype)
        g, beta = torch.rand(2, 1, T, H_v, device=device).unbind()
        return q, k, v, -0.1 * g, beta

    graphs = PrefillGraphs(gated_delta_rule, (256, 1024), random_tokens(1), torch.zeros(8, H_v, D, D, device=device))
    for lengths in ((200,), (100, 30, 70), (1, 2, 3, 4, 5, 6, 7, 8), (500, 0, 400), (256,)):
        tokens, states = random_tokens(sum(lengths)), torch.randn(len(lengths), H_v, D, D, device=device)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        expected = gated_delta_rule(*tokens, cu_seqlens, states)
        start = time.perf_counter()
        actual = graphs.prefill(tokens, lengths, states)
        host = time.perf_counter() - start
        errors = [((x - y).float().norm() / y.float().norm()).item() for x, y in zip(actual, expected, strict=True)]
        print(
            f"{len(lengths)} sequences, {sum(lengths):4} tokens on {device}: {1e6 * host:.0f} us of host time; against "
            f"an eager call of these shapes: o {errors[0]:.1e}, states {errors[1]:.1e}"
        )


if __name__ == "__main__":
    main()
