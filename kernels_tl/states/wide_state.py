"""Products of a wide state (is_wide of config.py), which states/wide_state.cuh rounds piece by piece."""

from kernels_tl.core.common import extern


def multiply_state(element, K, state, keys, product, *queries, staged=None):
    """Begins product = state keys^T and, with (Q, another product) in `queries`, also that of Q. Only the last pieces'
    products are in flight at the end. `staged`: a tile that gets the state in 16 bits, and the thread's place in it
    (rows_offset of core/tiles.cuh)."""
    name, others = ("multiply_state", queries) if staged is None else ("multiply_and_stage_state", staged)
    return extern(f"{name}<{element}, {K}>", state.data, keys, product.data, *others)
