"""Tiles of decode_region and decode_region_drafts; this module does not import TileLang.

A CTA has DECODE_WARPS warps, and a warp DECODE_WARP_ROWS value rows at a time.
"""

from dataclasses import dataclass

from kernels_tl.layout import DECODE_WARP_ROWS, DECODE_WARPS, REGION_ROWS, REGION_VALUES

TURN_ROWS = DECODE_WARPS * DECODE_WARP_ROWS


@dataclass(frozen=True)
class RegionTile:
    ctas: int  # per SM, which registers and shared memory allow
    values: int = REGION_VALUES  # most value rows of a key head
    rows: int = REGION_ROWS  # most of a CTA: a quarter of those, because a cluster may have eight CTAs or half of them

    @property
    def facts(self):
        """What the host needs for the grid."""
        return {"ctas": self.ctas, "values": self.values}


ONE_TOKEN = RegionTile(ctas=6)
# By the bytes of a state's number. o of eight tokens is in shared memory.
DRAFTS = {4: RegionTile(4, 512, 128), 2: RegionTile(5, 512, 128), 1: RegionTile(5, 512, 128)}
