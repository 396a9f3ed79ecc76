"""The gradients of the inputs, chunk-parallel, from what the two passes over the states left.

With S the state at the chunk's start (h), dS' the gradient of the state at its end (dh), D, V_new and U as in
replay_states and state_gradients, dV = diag(beta) U, and for each value head

    G   = scale * tril(dO V_new^T) * D                  gradient of Q K^T
    F   = -stril(U V_new^T) * D                         diag(beta) F is the gradient of K K^T
    Q_S = dO S^T,   U_S = U S^T,   V_S = V_new dS'^T    [C, K]

    dQ    = diag(scale gamma) Q_S + G K
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dbeta = rowsum(U * V) - x + rowsum(F * K K^T)
    dg_t  = sum_{i >= t} y_i + sum_{i < t} z_i + sum_{i >= t > j} E_ij + gamma_C <S, dS'>
            x = gamma rowsum(K * U_S)
            y = scale gamma rowsum(Q * Q_S) - beta x            what a later output reads of S
            z = (gamma_C / gamma) rowsum(K * V_S)               what an earlier token leaves in S'
            E = G * Q K^T + diag(beta) F * K K^T                pairs of tokens that the gate of t parts

Every term of dg carries the decay across t, so that it is accurate, however strong the decay is; for that its products
stay in fp32. The diagonal of G * Q K^T would cancel and is left out. With use_l2norm, q and k are the normalised ones
and rstd their factors; then dQ becomes diag(rstd) (dQ - diag(rowsum(Q * dQ)) Q) at the end, in fp32, and dK likewise.

dQ and dK sum over the value heads of a group: one CTA goes through them in order, so there are no atomics and the same
bits come every time. Padding rows get zeros.

One CTA fills an SM, so what overlaps loads with arithmetic is that the CTAs stay: each takes every `ctas`-th pair of a
chunk and a query/key head, and fills a tile with what comes next as soon as it has been used.

Launched on [ctas], as many as there are SMs.
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
)
from kernels_tl.cta import Variables, barriers, clear_rows_behind, fragments, shared
from kernels_tl.layout import (
    PADDING,
    STATE_PRODUCT_ROWS,
    BackwardGate,
    ChunkColumn,
)

THREADS = 256  # two warpgroups, each of which computes half the columns of every product
HALVES = 2
WARPS = 4  # of a warpgroup, 16 rows each


def row_sums(matrix, sums, clear=True):
    """Of each half of the columns: what the lanes of a warp can add up."""
    return T.reduce_sum(T.reshape(matrix, [C, HALVES, matrix.shape[1] // HALVES]), sums, dim=2, clear=clear)


def input_gradients(dtype, K, V):
    tokens, H_k, H_v, chunk_slots = dims("tokens", "H_k", "H_v", "chunk_slots")
    assert K == V, "U * V goes through the registers of the products with K columns"

    def make_tiles():
        return shared(
            182.0390625,
            Q=([C, K], dtype),  # then dQ
            K=([C, K], dtype),  # then dK
            dO=([C, V], dtype),
            V=([C, V], dtype),  # then dV
            V_new=([V, C], dtype),  # V_new^T
            U=([V, C], dtype),  # U^T
            h=([V, K], dtype),
            dh=([V, K], dtype),
            G=([C, C], dtype),
            beta_F=([C, C], dtype),  # diag(beta) F
            gates=([2, BackwardGate.COUNT, C], "float32"),  # of this head and the next
            y=([C, HALVES], "float32"),  # without x; of the l2norm rowsum(Q * dQ)
            z=([C, HALVES], "float32"),  # of the l2norm rowsum(K * dK)
            x=([C, HALVES], "float32"),
            beta_terms=([C, HALVES], "float32"),  # rowsum(U * V) + rowsum(F * K K^T)
            E_columns=([WARPS, C], "float32"),  # sums over the rows of a warp
            gate_terms=([2, C], "float32"),  # y less E's column sums, and z: what dg adds up
            state_product=([V // STATE_PRODUCT_ROWS], "float32"),
            place=([2], "int32"),  # row, hk: for the end, as registers are scarce meanwhile
            swizzle=("V",),
        )

    def make_barriers():
        return barriers(
            # All threads arrive, and wait, at each of them.
            keys_loaded=[THREADS],  # Q, K
            tokens_loaded=[THREADS],  # dO, V_new, U and the gates
            states_loaded=[THREADS],  # h, dh
            values_loaded=[THREADS],  # V
        )

    def make_registers():
        return fragments(
            QK=([C, C], "float32"),
            KK=([C, C], "float32"),
            G=([C, C], "float32"),  # then E
            F=([C, C], "float32"),  # then F * K K^T
            beta_F=([C, C], dtype),
            product=([C, K], "float32"),  # Q_S, U_S, V_S in turn, and what row sums are of
            dQ=([C, K], "float32"),
            dK=([C, K], "float32"),
            y=([C, HALVES], "float32"),
            z=([C, HALVES], "float32"),
            x=([C, HALVES], "float32"),
            beta_terms=([C, HALVES], "float32"),
            E_columns=([WARPS, C], "float32"),
        )

    @T.macro
    def locate(work, chunks):
        """A chunk and a query/key head. The row is -1 where nothing is to be loaded: chunks come before padding in the
        table."""
        slot = T.alloc_var("int32", init=T.truncdiv(work, H_k))
        row = T.alloc_var("int32", init=-1)
        if slot < chunk_slots:  # noqa: SIM102 (the table ends there)
            if chunks[slot, ChunkColumn.SEQUENCE] != PADDING:
                row = chunks[slot, ChunkColumn.ROW]
        return Variables(slot=slot, hk=work - slot * H_k, row=row)

    # What is loaded together, by all threads: into tiles that have all been used. `head` is where a value head's rows
    # and chunk are.

    @T.macro
    def load_keys(tiles, ready, pair, inputs):
        T.tma_copy(inputs.q[pair.row : pair.row + C, pair.hk, :], tiles.Q[:, :], barrier=ready.keys_loaded[0])
        T.tma_copy(inputs.k[pair.row : pair.row + C, pair.hk, :], tiles.K[:, :], barrier=ready.keys_loaded[0])
        T.barrier_arrive(ready.keys_loaded[0])

    @T.macro
    def load_tokens(tiles, ready, head, p, inputs):
        T.tma_copy(inputs.grad_o[head.row : head.row + C, head.hv, :], tiles.dO[:, :], barrier=ready.tokens_loaded[0])
        T.tma_copy(inputs.v_new[head.slot, head.hv, :, :], tiles.V_new[:, :], barrier=ready.tokens_loaded[0])
        T.tma_copy(inputs.u[head.slot, head.hv, :, :], tiles.U[:, :], barrier=ready.tokens_loaded[0])
        T.tma_copy(inputs.gates[head.slot, head.hv, :, :], tiles.gates[p, :, :], barrier=ready.tokens_loaded[0])
        T.barrier_arrive(ready.tokens_loaded[0])

    @T.macro
    def load_states(tiles, ready, head, inputs):
        T.tma_copy(inputs.h[head.slot, head.hv, :, :], tiles.h[:, :], barrier=ready.states_loaded[0])
        T.tma_copy(inputs.dh[head.slot, head.hv, :, :], tiles.dh[:, :], barrier=ready.states_loaded[0])
        T.barrier_arrive(ready.states_loaded[0])

    @T.macro
    def load_values(tiles, ready, head, inputs):
        T.tma_copy(inputs.v[head.row : head.row + C, head.hv, :], tiles.V[:, :], barrier=ready.values_loaded[0])
        T.barrier_arrive(ready.values_loaded[0])

    @T.macro
    def load_first(tiles, ready, pair, group, inputs):
        """The CTA's first pair, and its first value head."""
        if pair.row >= 0:
            head = SimpleNamespace(slot=pair.slot, row=pair.row, hv=pair.hk * group)
            load_keys(tiles, ready, pair, inputs)
            load_tokens(tiles, ready, head, 0, inputs)
            load_states(tiles, ready, head, inputs)
            load_values(tiles, ready, head, inputs)

    @T.macro
    def fill_padding(row, length, hk, group, outputs):
        """Zeros for rows that no sequence covers."""
        tx = T.get_thread_binding()
        for i, j in T.Parallel(C, K):
            if i < length:
                outputs.dq[row + i, hk, j] = 0
                outputs.dk[row + i, hk, j] = 0
        for member in T.serial(group):
            hv = hk * group + member
            for i, j in T.Parallel(C, V):
                if i < length:
                    outputs.dv[row + i, hv, j] = 0
            if tx < length:
                outputs.db[row + tx, hv] = 0.0
                outputs.dg[row + tx, hv] = 0.0

    @T.macro
    def through_states(r, tiles, ready, head, following, p, scale, inputs):
        """What passes through the states: in dQ and dK, x, y and z."""
        T.barrier_wait(ready.states_loaded[0], p)
        T.wgmma_gemm(tiles.dO, tiles.h, r.product, clear_accum=True)
        T.wait_wgmma(0)
        for i, j in T.Parallel(C, K):
            r.product[i, j] *= tiles.gates[p, BackwardGate.GAMMA, i] * scale
            r.dQ[i, j] += r.product[i, j]
            r.product[i, j] *= tiles.Q[i, j]
        row_sums(r.product, r.y)
        T.wgmma_gemm(tiles.U, tiles.h, r.product, transpose_A=True, clear_accum=True)
        T.wait_wgmma(0)
        for i, j in T.Parallel(C, K):
            r.product[i, j] *= tiles.gates[p, BackwardGate.GAMMA, i]
            r.dK[i, j] -= tiles.gates[p, BackwardGate.BETA, i] * r.product[i, j]
            r.product[i, j] *= tiles.K[i, j]
        row_sums(r.product, r.x)
        T.copy(r.x, tiles.x)
        T.wgmma_gemm(tiles.V_new, tiles.dh, r.product, transpose_A=True, clear_accum=True)
        if T.get_thread_binding() < V // STATE_PRODUCT_ROWS:
            tiles.state_product[T.get_thread_binding()] = inputs.state_product[
                head.slot, head.hv, T.get_thread_binding()
            ]
        T.wait_wgmma(0)
        T.sync_threads()
        if following.row >= 0:
            load_states(tiles, ready, following, inputs)
        for i, j in T.Parallel(C, K):
            r.product[i, j] *= tiles.gates[p, BackwardGate.DECAY, i]
            r.dK[i, j] += r.product[i, j]
            r.product[i, j] *= tiles.K[i, j]
        row_sums(r.product, r.z)
        T.copy(r.z, tiles.z)

    @T.macro
    def through_values(r, tiles, ready, head, following, length, p, inputs, dv):
        """dO V_new^T in G, U V_new^T in F, rowsum(U * V) in beta_terms; stores dV."""
        T.wgmma_gemm(tiles.dO, tiles.V_new, r.G, clear_accum=True)
        T.wgmma_gemm(tiles.U, tiles.V_new, r.F, transpose_A=True, clear_accum=True)
        T.barrier_wait(ready.values_loaded[0], p)
        for i, j in T.Parallel(C, V):
            r.product[i, j] = T.Cast("float32", tiles.V[i, j])
        for i, j in T.Parallel(C, V):
            tiles.V[i, j] = tiles.gates[p, BackwardGate.BETA, i] * tiles.U[j, i]
            r.product[i, j] = T.Select(i < length, r.product[i, j] * tiles.U[j, i], 0.0)
        row_sums(r.product, r.beta_terms)
        T.wait_wgmma(0)
        T.sync_threads()
        if following.row >= 0:
            load_tokens(tiles, ready, following, p ^ 1, inputs)
        for i, j in T.Parallel(C, V):
            if i < length:
                dv[head.row + i, head.hv, j] = tiles.V[i, j]

    @T.macro
    def between_tokens(r, tiles, ready, following, p, scale, inputs):
        """What passes between tokens of the chunk: in dQ and dK, y, beta_terms, and E. Q K^T and K K^T are the group's,
        but would take 32 registers of all that happens between two heads."""
        T.wgmma_gemm(tiles.Q, tiles.K, r.QK, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(tiles.K, tiles.K, r.KK, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(C, C):
            D_ij = T.exp(T.min(tiles.gates[p, BackwardGate.LOG, i] - tiles.gates[p, BackwardGate.LOG, j], 0.0))
            r.G[i, j] = T.Select(i >= j, r.G[i, j] * (D_ij * scale), 0.0)
            r.F[i, j] = T.Select(i > j, -r.F[i, j] * D_ij, 0.0)
            r.beta_F[i, j] = tiles.gates[p, BackwardGate.BETA, i] * r.F[i, j]
        T.copy(r.G, tiles.G)
        T.copy(r.beta_F, tiles.beta_F)
        T.fence_proxy_async()
        T.wait_wgmma(0)
        T.sync_threads()
        if following.row >= 0:
            load_values(tiles, ready, following, inputs)
        T.wgmma_gemm(tiles.G, tiles.K, r.dQ)
        T.wgmma_gemm(tiles.G, tiles.Q, r.dK, transpose_A=True)
        T.wgmma_gemm(tiles.beta_F, tiles.K, r.dK)
        T.wgmma_gemm(tiles.beta_F, tiles.K, r.dK, transpose_A=True)
        for i, j in T.Parallel(C, C):
            r.F[i, j] *= r.KK[i, j]
            r.G[i, j] = T.Select(i > j, r.G[i, j] * r.QK[i, j], 0.0)
            r.G[i, j] += tiles.gates[p, BackwardGate.BETA, i] * r.F[i, j]
        row_sums(r.F, r.beta_terms, clear=False)
        row_sums(r.G, r.y, clear=False)
        T.reduce_sum(T.reshape(r.G, [WARPS, C // WARPS, C]), r.E_columns, dim=1)
        T.copy(r.y, tiles.y)
        T.copy(r.beta_terms, tiles.beta_terms)
        T.copy(r.E_columns, tiles.E_columns)
        T.wait_wgmma(0)
        T.sync_threads()

    @T.macro
    def store_gates(tiles, head, length, p, db, dg):
        """dbeta and dg, each thread those of a token."""
        tx = T.get_thread_binding()
        if tx < C:
            x = T.alloc_var("float32", init=tiles.x[tx, 0] + tiles.x[tx, 1])
            y = T.alloc_var("float32", init=tiles.y[tx, 0] + tiles.y[tx, 1] - tiles.gates[p, BackwardGate.BETA, tx] * x)
            for warp in T.unroll(WARPS):
                y -= tiles.E_columns[warp, tx]
            tiles.gate_terms[0, tx] = y
            tiles.gate_terms[1, tx] = tiles.z[tx, 0] + tiles.z[tx, 1]
            if tx < length:
                db[head.row + tx, head.hv] = tiles.beta_terms[tx, 0] + tiles.beta_terms[tx, 1] - x
        T.sync_threads()
        if tx < length:
            total = T.alloc_var("float32", init=0.0)
            for i in T.unroll(V // STATE_PRODUCT_ROWS):
                total += tiles.state_product[i]
            total *= tiles.gates[p, BackwardGate.GAMMA, C - 1]
            for i in T.unroll(C):
                total += T.Select(i >= tx, tiles.gate_terms[0, i], tiles.gate_terms[1, i])
            dg[head.row + tx, head.hv] = total

    @T.macro
    def add_head(r, tiles, ready, head, following, length, heads_done, scale, inputs, outputs):
        """A value head: its part of dQ and dK; stores its dV, dbeta and dg."""
        p = heads_done & 1
        T.barrier_wait(ready.tokens_loaded[0], p)
        if length < C:
            clear_rows_behind(tiles.dO, length)
            T.fence_proxy_async()
            T.sync_threads()
        through_states(r, tiles, ready, head, following, p, scale, inputs)
        through_values(r, tiles, ready, head, following, length, p, inputs, outputs.dv)
        between_tokens(r, tiles, ready, following, p, scale, inputs)
        store_gates(tiles, head, length, p, outputs.db, outputs.dg)

    @T.macro
    def through_norm(r, tiles, row, hk, length, q_rstd, k_rstd):
        """From the gradients of the normalised queries and keys to those of the op's arguments."""
        for i, j in T.Parallel(C, K):
            r.product[i, j] = tiles.Q[i, j] * r.dQ[i, j]
        row_sums(r.product, r.y)
        for i, j in T.Parallel(C, K):
            r.product[i, j] = tiles.K[i, j] * r.dK[i, j]
        row_sums(r.product, r.z)
        T.sync_threads()
        T.copy(r.y, tiles.y)
        T.copy(r.z, tiles.z)
        T.sync_threads()
        for i, j in T.Parallel(C, K):
            if i < length:
                r.dQ[i, j] = q_rstd[row + i, hk] * (r.dQ[i, j] - tiles.Q[i, j] * (tiles.y[i, 0] + tiles.y[i, 1]))
                r.dK[i, j] = k_rstd[row + i, hk] * (r.dK[i, j] - tiles.K[i, j] * (tiles.z[i, 0] + tiles.z[i, 1]))

    @T.macro
    def store_keys(r, tiles, row, hk, length, dq, dk):
        """dQ and dK, by way of the tiles of Q and K."""
        for i, j in T.Parallel(C, K):
            tiles.Q[i, j] = r.dQ[i, j]
            tiles.K[i, j] = r.dK[i, j]
        T.fence_proxy_async()
        T.sync_threads()
        for i, j in T.Parallel(C, K):
            if i < length:
                dq[row + i, hk, j] = tiles.Q[i, j]
                dk[row + i, hk, j] = tiles.K[i, j]
        T.fence_proxy_async()
        T.sync_threads()

    @T.macro
    def compute(tiles, ready, cta, ctas, group, scale, use_l2norm, chunks, inputs, outputs):
        """All pairs of a chunk and a query/key head that are the CTA's, and the loads of what follows each."""
        r = make_registers()
        pairs_done = T.alloc_var("int32", init=0)  # without padding
        heads_done = T.alloc_var("int32", init=0)
        slot = T.alloc_var("int32", init=T.truncdiv(cta, H_k))
        hk = T.alloc_var("int32", init=cta - slot * H_k)
        while slot < chunk_slots:
            row = T.alloc_var("int32", init=chunks[slot, ChunkColumn.ROW])
            length = T.alloc_var("int32", init=chunks[slot, ChunkColumn.LENGTH])
            next_pair = locate(slot * H_k + hk + ctas, chunks)
            if chunks[slot, ChunkColumn.SEQUENCE] == PADDING:
                fill_padding(row, length, hk, group, outputs)
            else:
                T.barrier_wait(ready.keys_loaded[0], pairs_done % 2)
                if length < C:
                    clear_rows_behind(tiles.Q, length)
                    clear_rows_behind(tiles.K, length)
                    T.fence_proxy_async()
                    T.sync_threads()
                if T.get_thread_binding() == 0:
                    tiles.place[0] = row
                    tiles.place[1] = hk
                T.clear(r.dQ)
                T.clear(r.dK)
                for member in T.serial(group):
                    hv = hk * group + member
                    head = SimpleNamespace(slot=slot, row=row, hv=hv)
                    is_last = member + 1 == group
                    following = Variables(
                        slot=T.if_then_else(is_last, next_pair.slot, slot),
                        hv=T.if_then_else(is_last, next_pair.hk * group, hv + 1),
                        row=T.if_then_else(is_last, next_pair.row, row),
                    )
                    add_head(r, tiles, ready, head, following, length, heads_done, scale, inputs, outputs)
                    heads_done += 1
                row = tiles.place[0]
                hk = tiles.place[1]
                if use_l2norm != 0:
                    through_norm(r, tiles, row, hk, length, inputs.q_rstd, inputs.k_rstd)
                store_keys(r, tiles, row, hk, length, outputs.dq, outputs.dk)
                if next_pair.row >= 0:
                    load_keys(tiles, ready, next_pair, inputs)
                pairs_done += 1
            slot = next_pair.slot
            hk = next_pair.hk

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        grad_o: T.Tensor([tokens, H_v, V], dtype),
        q_rstd: T.Tensor([tokens, H_k], "float32"),
        k_rstd: T.Tensor([tokens, H_k], "float32"),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        h: T.Tensor([chunk_slots, H_v, V, K], dtype),
        dh: T.Tensor([chunk_slots, H_v, V, K], dtype),
        v_new: T.Tensor([chunk_slots, H_v, V, C], dtype),
        u: T.Tensor([chunk_slots, H_v, V, C], dtype),
        state_product: T.Tensor([chunk_slots, H_v, V // STATE_PRODUCT_ROWS], "float32"),
        dq: T.Tensor([tokens, H_k, K], dtype),
        dk: T.Tensor([tokens, H_k, K], dtype),
        dv: T.Tensor([tokens, H_v, V], dtype),
        db: T.Tensor([tokens, H_v], "float32"),
        dg: T.Tensor([tokens, H_v], "float32"),
        group: T.int32,  # H_v / H_k
        scale: T.float32,
        use_l2norm: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            inputs = SimpleNamespace(
                q=q,
                k=k,
                v=v,
                grad_o=grad_o,
                q_rstd=q_rstd,
                k_rstd=k_rstd,
                gates=gates,
                h=h,
                dh=dh,
                v_new=v_new,
                u=u,
                state_product=state_product,
            )
            outputs = SimpleNamespace(dq=dq, dk=dk, dv=dv, db=db, dg=dg)
            load_first(tiles, ready, locate(cta, chunks), group, inputs)
            compute(tiles, ready, cta, ctas, group, scale, use_l2norm, chunks, inputs, outputs)

    return main
