"""The CTAs of decode_region per SM; this module does not import TileLang.

Its registers allow so many. A CTA has DECODE_WARPS warps, and a warp DECODE_WARP_ROWS value rows at a time.
"""

from kernels_tl.layout import DECODE_WARP_ROWS, DECODE_WARPS

TURN_ROWS = DECODE_WARPS * DECODE_WARP_ROWS
CTAS = {4: 6, 2: 6, 1: 6}  # by the bytes of a state's number


def facts(state_bytes):
    """What the host needs for the grid."""
    return {"ctas": CTAS[state_bytes]}
