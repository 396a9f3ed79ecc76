"""Stages of shared memory between the roles of a CTA.

The producer warp and the roles that compute share rings of tiles. Chunk n goes to stage n % stages of a ring. Each
stage has barriers: by convention `xs_loaded` completes when the producer warp's tiles have arrived, `xs_released` when
all users have arrived after their last read. A barrier completes once per round, n // stages, so

    to use chunk n     wait for the parity of its round
    to refill a stage  wait for the other parity, which in the first round passes at once

A ring of one stage is a pair of barriers without an index, whose round is n.

The kernels' docstrings have timelines: a row per role, time to the right, not to scale. `x>` waits for barrier x, `>x`
arrives at it, and a number is the chunk's. Waits that pass at once in the first chunks are left out.
"""

import tilelang.language as T

WARP = 32  # threads


class Stage:
    """The stage of one chunk: its index in the ring, and the parity of its round."""

    def __init__(self, index, parity):
        self.index, self.parity = index, parity

    def wait_for(self, barriers):
        """Waits until the barrier of the stage has completed for this chunk."""
        return T.barrier_wait(barriers[self.index], self.parity)

    def wait_until_free(self, barriers):
        """Waits until the barrier of the stage has completed for the chunk that had the stage before."""
        return T.barrier_wait(barriers[self.index], self.parity ^ 1)

    def arrive(self, barriers):
        return T.barrier_arrive(barriers[self.index])


def stage_of(n, stages, index=None):
    """The stage of chunk n. `index`: a variable that holds n % stages already."""
    return Stage(n % stages if index is None else index, (n // stages) % 2)


def is_producer_warp(consumers):
    """Whether a producer thread is in the producer warp, the first one after the consumers."""
    return T.get_thread_binding() < consumers + WARP


def epilogue_warp(consumers):
    """The consumer warpgroup whose epilogue warp the thread is in: the warps after the producer warp, which is -1."""
    return T.truncdiv(T.get_thread_binding() - consumers, WARP) - 1
