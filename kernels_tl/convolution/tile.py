"""Tiles of the convolution's kernels. A CTA has WARPS warps; the lanes of a warp have neighbouring pieces of a row."""

from dataclasses import dataclass

WARPS = 4  # kConvWarps


@dataclass(frozen=True)
class ConvTile:
    ctas: int  # per SM
    channels: int = 4  # of a piece

    @property
    def facts(self):
        """What csrc/gpu/convolution.cpp needs for the grid."""
        return {"channels": self.channels, "ctas": self.ctas}


# Keyed by dtype. At most 96 registers for 5 CTAs, 168 for 3, 255 for 2.
FORWARD = dict.fromkeys(("bfloat16", "float16", "float32"), ConvTile(ctas=5))
BACKWARD = {"bfloat16": ConvTile(ctas=3), "float16": ConvTile(ctas=3), "float32": ConvTile(ctas=2)}

# Threads of the kernels that take a channel per thread
CHANNEL_THREADS = 128
