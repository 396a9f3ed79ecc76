"""Tiles of decode_region and decode_region_drafts; this module does not import TileLang.

A warp has DECODE_WARP_ROWS value rows at a time.
"""

from dataclasses import dataclass

from kernels_tl.layout import DECODE_WARP_ROWS, DECODE_WARPS, REGION_ROWS, REGION_VALUES


@dataclass(frozen=True)
class RegionTile:
    ctas: int  # per SM, which registers and shared memory allow
    warps: int = DECODE_WARPS
    values: int = REGION_VALUES  # most value rows of a key head
    rows: int = REGION_ROWS  # most of a CTA; a quarter of those or more, because a cluster may have four CTAs
    fp16_spills: int = 0  # bytes, with fp16 states

    @property
    def wave_rows(self):
        """Value rows of a CTA at a time."""
        return self.warps * DECODE_WARP_ROWS

    @property
    def facts(self):
        """What the host needs for the grid."""
        return {"ctas": self.ctas, "values": self.values, "rows": self.rows, "wave_rows": self.wave_rows}


ONE_TOKEN = RegionTile(ctas=6, fp16_spills=16)
# o of eight tokens is in shared memory.
DRAFTS = RegionTile(ctas=2, warps=8, values=512, rows=128)
