"""The work tiles of chunk_forward and fused_forward, in a queue that all CTAs share: see states/work_queue.cuh."""

import tilelang.language as T

from kernels_tl.core.common import extern
from kernels_tl.core.cta import WorkTiles


class Queue(WorkTiles):
    """A CTA's view of the queue. Its first work tile has the CTA's own number. After chunk_plan it draws the next
    ones."""

    def __init__(self, cta, ctas, drawn, *of_pieces):
        super().__init__(*of_pieces)
        self.cta, self.ctas, self.drawn = cta, ctas, drawn

    def next_work(self):
        """Draws a work tile. `work_tiles`: none is left."""
        return extern("next_work", T.access_ptr(self.drawn[0], "rw"), self.ctas, self.work_tiles, returns="int32")

    def next_empty(self, segments, first):
        """The first of the work tiles first, first + ctas, ... whose segment has a final state, but no token."""
        table = T.access_ptr(segments[0, 0], "r")
        of_segment = self.H_v * self.tiles
        return extern("next_empty", table, first, self.ctas, self.work_tiles, of_segment, returns="int32")
