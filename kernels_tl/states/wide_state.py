"""Products of a state with K > 128 (is_wide of config.py). states/wide_state.cuh rounds 16 channels at a time."""

from kernels_tl.core.common import extern


def multiply_state(element, K, state, keys, product, *queries, staged=None):
    """Begins product = state keys^T. `queries`, if any, is (Q, another product): it also begins the product with Q. At
    the end only the products of the last 32 channels are in flight. `staged`, if any, is a tile that gets the state in
    16 bits, and the thread's place in it (rows_offset of core/tiles.cuh)."""
    name, others = ("multiply_state", queries) if staged is None else ("multiply_and_stage_state", staged)
    return extern(f"{name}<{element}, {K}>", state.data, keys, product.data, *others)
