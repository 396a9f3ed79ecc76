"""DTensor: calls that are sharded over heads or over the batch, on ranks, against the same call on one.

Ranks have gloo on the CPU, and NCCL on two and four GPUs.
"""

import pytest
from cases import Case
from dtensor_ranks import (
    PLACEMENTS,
    compiled,
    convolution,
    norm,
    over_two_dimensions,
    partial_gradients,
    partial_gradients_beside_heads,
    refusals,
    training,
    with_context,
    without_derivatives,
)
from every_op import NAMES, REGIONS, WITH_POOL
from ranks import on_gpus, run_on_ranks

SIZES = {"H_k": 2, "H_v": 4, "K": 16, "V": 8, "gate": "logsigmoid"}
INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
BATCH = (
    Case(B=4, T=70, **SIZES),
    Case(B=3, T=5, **SIZES, initial_state=None),  # shards of two and one
    Case(B=2, T=70, **SIZES, **INSIDE, state_v_first=True),
)
PACKED = (
    Case(lengths=(70, 0, 3), **SIZES, use_qk_l2norm_in_kernel=True),
    Case(lengths=(70, 0, 3), padding=2, **SIZES, **INSIDE, dt_bias=None),
)


GPU_SIZES = {"H_k": 4, "H_v": 8, "gate": "logsigmoid"}
GPU_BATCH = (
    Case(B=4, T=300, **GPU_SIZES),
    Case(B=4, T=300, **GPU_SIZES, K=96, V=192, **INSIDE, state_v_first=True),
)
GPU_PACKED = (Case(lengths=(300, 0, 129), **GPU_SIZES, keys="raw", use_qk_l2norm_in_kernel=True, **INSIDE),)
on_both = pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), on_gpus(2), on_gpus(4)])


@on_both
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training(placement, device, world_size):
    """Results and gradients are the bits of one rank, and nothing is exchanged; sums over the batch are sums."""
    batch, packed = (BATCH, PACKED) if device == "cpu" else (GPU_BATCH, GPU_PACKED)
    cases = batch if placement == "batch" else batch + packed
    assert run_on_ranks(world_size, training, cases, placement, device=device) == [len(cases)] * world_size


@on_both
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_convolution(placement, device, world_size):
    assert run_on_ranks(world_size, convolution, placement, device=device) == [None] * world_size


@on_both
@pytest.mark.parametrize("placement", ("batch", "heads"))
def test_compile(placement, device, world_size):
    case = BATCH[0] if device == "cpu" else GPU_BATCH[0]
    assert run_on_ranks(world_size, compiled, case, placement, device=device) == [None] * world_size


@pytest.mark.parametrize(
    ("device", "world_size", "cases"),
    [("cpu", 4, (Case(B=2, T=70, **SIZES, **INSIDE),)), on_gpus(2, GPU_BATCH), on_gpus(4, GPU_BATCH)],
    ids=str,
)
def test_a_mesh_of_two_dimensions(device, world_size, cases):
    """The batch over one, heads over the other, of which two GPUs leave one."""
    assert run_on_ranks(world_size, training, cases, "both", device=device) == [len(cases)] * world_size


@on_both
def test_partial_gradients(device, world_size):
    """They are reduced first."""
    case = BATCH[0] if device == "cpu" else GPU_BATCH[0]
    assert run_on_ranks(world_size, partial_gradients, case, device=device) == [None] * world_size


@pytest.mark.parametrize("H_k", (4, 6))
def test_partial_gradients_beside_heads(H_k):
    """With 6 heads DTensor might cut them into 4 uneven shards, which have no whole groups."""
    case = Case(B=2, T=5, **SIZES | {"H_k": H_k, "H_v": 2 * H_k})
    for error in run_on_ranks(4, partial_gradients_beside_heads, case):
        if H_k == 4:
            assert error == "nothing"
        else:
            assert "do is a DTensor placed" in error and "expected Replicate() on dimension 0 of the mesh" in error


@pytest.mark.parametrize("H_k", (2, 4, 6))
def test_heads_over_two_dimensions(H_k):
    """Each of the 4 shards has whole groups, or the call is refused, also where each dimension alone divides them."""
    for error in run_on_ranks(4, over_two_dimensions, H_k):
        assert error == "nothing" if H_k == 4 else f"q has {H_k} heads, expected a multiple of 4" in error


@pytest.mark.parametrize("name", WITH_POOL)
@on_both
def test_ops_on_a_pool(name, device, world_size):
    """The shards of states are written in place."""
    assert run_on_ranks(world_size, without_derivatives, name, device=device) == [None] * world_size


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_both
def test_norm(placement, device, world_size):
    """Rows are apart, and nothing is exchanged; the weight's gradient is a sum."""
    assert run_on_ranks(world_size, norm, placement, device=device) == [None] * world_size


def test_every_op_is_here():
    """begin and finish, whose ranks exchange, are not for DTensors."""
    others = {x for x in NAMES if not x.endswith("_begin")}
    suffixes = ("", "_fwd", "_bwd", "_packed", "_packed_bwd")
    of_chunks = {f"chunk_gated_delta_rule{suffix}" for suffix in suffixes}
    around = {"causal_conv1d", "causal_conv1d_bwd", "gated_rms_norm", "gated_rms_norm_bwd"}
    assert others == {*WITH_POOL, *REGIONS} | of_chunks | around


def test_refusals():
    """Each message names the op, the argument, what it is and what is expected."""
    for messages in run_on_ranks(2, refusals):
        for words in (
            ("tokens", "chunk_gated_delta_rule: q is", "Shard(dim=1)", "Replicate() or", "Shard(dim=2) over heads"),
            ("channels", "chunk_gated_delta_rule: v is", "Shard(dim=3)", "over the batch"),
            ("packed batch", "chunk_gated_delta_rule: q is", "Shard(dim=0)", "Shard(dim=2) over heads"),
            ("odd heads", "q has 3 heads, expected a multiple of 2, the number of shards"),
            ("backward", "chunk_gated_delta_rule_bwd: do is", "Shard(dim=1)", "expected"),
            ("pool", "decode_gated_delta_rule: state_pool is", "expected", "writes in place"),
            ("packed decode", "decode_gated_delta_rule_packed: state_pool is", "expected Replicate()"),
            ("cp_context", "q is a DTensor, expected with cp_context the rank's own tensor, such as its to_local()"),
        ):
            assert all(word in messages[words[0]] for word in words[1:]), (words, messages[words[0]])


@on_both
def test_a_layer_with_heads_in_parallel(device, world_size):
    """A layer whose projections are sharded by torch's tensor parallelism: its output and weight gradients."""
    assert run_on_ranks(world_size, with_context, device=device) == [None] * world_size
