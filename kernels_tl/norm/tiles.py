"""How the gated norm shares rows out among threads; this module does not import TileLang.

A thread has `channels` channels of a row, in pieces of 16 bytes (`vectors`) or, if V is no whole number of these, of
one element. The V channels of a row take the fewest neighbouring threads that are a power of two, at most a warp. A CTA
loops over rows: the grid takes consecutive ones at a time, and a thread loads some rows before it uses the first.
"""

from dataclasses import dataclass

BYTES = {"bits16": 2, "float32": 4}
LANES = 32  # at most, of a row
THREADS = 256


@dataclass(frozen=True)
class Pass:
    """in_flight: bytes of each tensor that a thread loads before it computes. ctas: CTAs per SM, by channels and
    vectors, as many as registers allow."""

    in_flight: int
    ctas: dict[tuple[int, bool], int]

    def rows(self, dtype, channels):
        """How many rows these are."""
        return max(1, self.in_flight // (channels * BYTES[dtype]))

    def facts(self, dtype, channels, vectors):
        """What the host needs for the grid."""
        return {"ctas": self.ctas[channels, vectors], "threads": THREADS}


# In flight per SM: 4 * 256 threads * 2 tensors * 32 bytes = 64 KB, and 3 * 256 * 3 * 32 = 72 KB.
FORWARD = Pass(in_flight=32, ctas={(8, True): 4, (16, True): 3, (16, False): 2})
BACKWARD = Pass(in_flight=32, ctas={(8, True): 3, (16, True): 2, (16, False): 1})
