"""Context parallelism: sequences whose tokens are spread over the ranks of a process group.

    context = build_cp_context(cu_seqlens, group)  # the offsets of whole sequences
    o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)  # this rank's tokens

The tokens that a rank holds of a sequence change the state by an affine map:

    S'  = M S + Z         forward: S is the state before these tokens, S' the state after them
    dS  = M^T dS' + dZ    backward: the gradients of S and S'

A pass has two ops, begin and finish. Begin computes M and Z of the sequences that go on in other ranks. The ranks
exchange these maps in one all-gather. Each rank folds the maps of the parts before its own, in the order of the tokens,
into the initial state of its first sequence. Finish runs the rank's own tokens from there. The backward folds the maps
of the parts after its own into the gradient of the final state of its last sequence.
"""

from flash_qla.cp.context import CPContext, build_cp_context
from flash_qla.cp.halo import exchange_halo

__all__ = ["CPContext", "build_cp_context", "exchange_halo"]
