"""The gradients of the inputs, chunk-parallel, from what the two passes over the states left.

With S the state at the chunk's start (h), dS' the gradient of the state at its end (dh), V_new, U, D as in replay_states
and state_gradients, dV = diag(beta) U, and for each value head

    G   = scale * tril(dO V_new^T) * D                  gradient of Q K^T
    F   = -stril(U V_new^T) * D                         diag(beta) F is the gradient of K K^T
    Q_S = dO S^T,   U_S = U S^T,   V_S = V_new dS'^T    [C, K]

    dQ    = diag(scale gamma) Q_S + G K
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dbeta = rowsum(U * V) - gamma rowsum(K * U_S) + rowsum(F * K K^T)
    dg_t  = sum_{i >= t} y_i + sum_{i < t} z_i + sum_{i >= t > j} E_ij + gamma_C <S, dS'> (passed)
            y = scale gamma rowsum(Q * Q_S) - beta gamma rowsum(K * U_S)        what a later output reads of S
            z = (gamma_C / gamma) rowsum(K * V_S)                               what an earlier token leaves in S'
            E = G * Q K^T + diag(beta) F * K K^T                                pairs of tokens that the gate of t parts

Every term of dg carries the decay across t, so that it is accurate, however strong the decay is; for that its products
stay in fp32. The diagonal of G * Q K^T would cancel and is left out. With use_l2norm, q and k are the normalised ones
and rstd their factors; then dx = rstd (dy - y (y . dy)) is applied at the end, in fp32.

dQ and dK sum over the value heads of a group: one CTA goes through them in order, so there are no atomics and the same
bits come every time. Padding rows get zeros.

    shared memory a CTA: Q, K, dO, V, V_new, U 96 + h, dh 64 + two 64 x 64 gradients 16 + gates and sums 6 KB = 182 KB

One CTA an SM, then, and what overlaps loads with arithmetic is that the CTAs stay: each takes every `ctas`-th pair of a
chunk and a query/key head, and fills a buffer for what comes next as soon as it has been used.

Launched on [SMs], two warpgroups, each of which computes half the columns of every product.
"""

# ruff: noqa: E731 (inside a kernel the builder takes lambdas, but no functions)
import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
    swizzled,
)
from kernels_tl.layout import (
    PADDING,
    STATE_PRODUCT_PARTS,
    BackwardGate,
    ChunkColumn,
)

THREADS = 256
HALVES = 2  # of the columns, one a warpgroup
WARPS = 4  # of a warpgroup, 16 rows each


@T.macro
def load(copies, loaded, stage):
    """Starts the copies (from, to) by TMA; loaded[stage] is complete when all have arrived."""
    for source, target in copies:
        T.tma_copy(source, target, barrier=loaded[stage])
    T.barrier_arrive(loaded[stage])


def input_gradients(dtype, K, V):
    tokens, H_k, H_v, chunk_slots = dims("tokens", "H_k", "H_v", "chunk_slots")

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
        passed: T.Tensor([chunk_slots, H_v, STATE_PRODUCT_PARTS], "float32"),
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
            Q_s = T.alloc_shared([C, K], dtype)
            K_s = T.alloc_shared([C, K], dtype)
            dO_s = T.alloc_shared([C, V], dtype)
            V_s = T.alloc_shared([C, V], dtype)  # V, then dV
            V_new_s = T.alloc_shared([V, C], dtype)
            U_s = T.alloc_shared([V, C], dtype)
            h_s = T.alloc_shared([V, K], dtype)
            dh_s = T.alloc_shared([V, K], dtype)
            G_s = T.alloc_shared([C, C], dtype)
            F_s = T.alloc_shared([C, C], dtype)  # diag(beta) F
            gates_s = T.alloc_shared([2, BackwardGate.COUNT, C], "float32")
            # Row sums of each half of the columns, column sums of each quarter of the rows: what a warp can add up.
            # read: of K * gamma U_S; beta_terms: of U * V and F * K K^T
            y_s = T.alloc_shared([C, HALVES], "float32")
            z_s = T.alloc_shared([C, HALVES], "float32")
            read_s = T.alloc_shared([C, HALVES], "float32")
            beta_terms_s = T.alloc_shared([C, HALVES], "float32")
            E_columns_s = T.alloc_shared([WARPS, C], "float32")
            terms_s = T.alloc_shared([2, C], "float32")  # y - column sums of E, z
            passed_s = T.alloc_shared([STATE_PRODUCT_PARTS], "float32")
            place_s = T.alloc_shared([2], "int32")  # row, hk: for the end, as registers are scarce meanwhile
            T.annotate_layout({V_s: swizzled(V_s)})

            QK = T.alloc_fragment([C, C], "float32")
            KK = T.alloc_fragment([C, C], "float32")
            G = T.alloc_fragment([C, C], "float32")
            F = T.alloc_fragment([C, C], "float32")
            beta_F = T.alloc_fragment([C, C], dtype)
            acc = T.alloc_fragment([C, K], "float32")  # Q_S, U_S, V_S and terms of row sums in turn
            dQ = T.alloc_fragment([C, K], "float32")
            dK = T.alloc_fragment([C, K], "float32")
            y = T.alloc_fragment([C, HALVES], "float32")
            z = T.alloc_fragment([C, HALVES], "float32")
            read = T.alloc_fragment([C, HALVES], "float32")
            beta_terms = T.alloc_fragment([C, HALVES], "float32")
            E_columns = T.alloc_fragment([WARPS, C], "float32")

            qk_loaded = T.alloc_barrier([THREADS])
            tokens_loaded = T.alloc_barrier([THREADS])  # dO, V_new, U and the gates
            states_loaded = T.alloc_barrier([THREADS])  # h, dh
            values_loaded = T.alloc_barrier([THREADS])  # V

            tx = T.get_thread_binding()
            # What is loaded together, (from, to): for first token row t0, head at, chunk slot sl, gates buffer st.
            keys = lambda t0, at: ((q[t0 : t0 + C, at, :], Q_s[:, :]), (k[t0 : t0 + C, at, :], K_s[:, :]))
            tokens = lambda t0, at, sl, st: (
                (grad_o[t0 : t0 + C, at, :], dO_s[:, :]),
                (v_new[sl, at, :, :], V_new_s[:, :]),
                (u[sl, at, :, :], U_s[:, :]),
                (gates[sl, at, :, :], gates_s[st, :, :]),
            )
            states = lambda at, sl: ((h[sl, at, :, :], h_s[:, :]), (dh[sl, at, :, :], dh_s[:, :]))
            values = lambda t0, at: ((v[t0 : t0 + C, at, :], V_s[:, :]),)

            # This CTA's chunk and query/key head, and its next ones
            slot = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            row = T.alloc_var("int32")
            length = T.alloc_var("int32")
            next_slot = T.alloc_var("int32")
            next_hk = T.alloc_var("int32")
            next_row = T.alloc_var("int32")  # -1 where nothing is left to load
            # The value head after this one
            at_slot = T.alloc_var("int32")
            at_head = T.alloc_var("int32")
            at_row = T.alloc_var("int32")
            chunk = T.alloc_var("int32", init=0)  # chunks done
            step = T.alloc_var("int32", init=0)  # value heads done

            slot = T.truncdiv(cta, H_k)
            hk = cta - slot * H_k
            # Chunks come before padding in the table, so the first padding slot ends the loads.
            if chunks[slot, ChunkColumn.SEQUENCE] != PADDING:
                row = chunks[slot, ChunkColumn.ROW]
                load(keys(row, hk), qk_loaded, 0)
                load(tokens(row, hk * group, slot, 0), tokens_loaded, 0)
                load(states(hk * group, slot), states_loaded, 0)
                load(values(row, hk * group), values_loaded, 0)

            while slot < chunk_slots:
                row = chunks[slot, ChunkColumn.ROW]
                length = chunks[slot, ChunkColumn.LENGTH]
                next_slot = T.truncdiv(slot * H_k + hk + ctas, H_k)
                next_hk = slot * H_k + hk + ctas - next_slot * H_k
                next_row = -1
                if next_slot < chunk_slots:  # noqa: SIM102 (the table ends there)
                    if chunks[next_slot, ChunkColumn.SEQUENCE] != PADDING:
                        next_row = chunks[next_slot, ChunkColumn.ROW]
                if chunks[slot, ChunkColumn.SEQUENCE] == PADDING:
                    for i, j in T.Parallel(C, K):
                        if i < length:
                            dq[row + i, hk, j] = 0
                            dk[row + i, hk, j] = 0
                    for head in T.serial(group):
                        for i, j in T.Parallel(C, K):
                            if i < length:
                                dv[row + i, hk * group + head, j] = 0
                        if tx < length:
                            db[row + tx, hk * group + head] = 0.0
                            dg[row + tx, hk * group + head] = 0.0
                else:
                    T.barrier_wait(qk_loaded[0], chunk % 2)
                    if length < C:
                        # Rows behind the sequence belong to others. Whatever they hold, even NaN, must not meet the
                        # zeros of the other factors.
                        for i, j in T.Parallel(C, K):
                            if i >= length:
                                Q_s[i, j] = 0
                                K_s[i, j] = 0
                        T.fence_proxy_async()
                        T.sync_threads()
                    if tx == 0:
                        place_s[0] = row
                        place_s[1] = hk
                    T.clear(dQ)
                    T.clear(dK)

                    for head in T.serial(group):
                        hv = hk * group + head
                        p = step & 1
                        at_slot = slot
                        at_head = hv + 1
                        at_row = row
                        if head + 1 == group:
                            at_slot = next_slot
                            at_head = next_hk * group
                            at_row = next_row

                        T.barrier_wait(tokens_loaded[0], p)
                        if length < C:
                            for i, j in T.Parallel(C, K):
                                if i >= length:
                                    dO_s[i, j] = 0
                            T.fence_proxy_async()
                            T.sync_threads()

                        # What passes through the states
                        T.barrier_wait(states_loaded[0], p)
                        T.wgmma_gemm(dO_s, h_s, acc, clear_accum=True)
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(C, K):
                            acc[i, j] *= gates_s[step % 2, BackwardGate.GAMMA, i] * scale
                            dQ[i, j] += acc[i, j]
                            acc[i, j] *= Q_s[i, j]
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), y, dim=2)
                        T.wgmma_gemm(U_s, h_s, acc, transpose_A=True, clear_accum=True)
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(C, K):
                            acc[i, j] *= gates_s[step % 2, BackwardGate.GAMMA, i]
                            dK[i, j] -= gates_s[step % 2, BackwardGate.BETA, i] * acc[i, j]
                            acc[i, j] *= K_s[i, j]
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), read, dim=2)
                        T.copy(read, read_s)
                        T.wgmma_gemm(V_new_s, dh_s, acc, transpose_A=True, clear_accum=True)
                        if tx < STATE_PRODUCT_PARTS:
                            passed_s[tx] = passed[slot, hv, tx]
                        T.wait_wgmma(0)
                        T.sync_threads()
                        if at_row >= 0:
                            load(states(at_head, at_slot), states_loaded, 0)
                        for i, j in T.Parallel(C, K):
                            acc[i, j] *= gates_s[step % 2, BackwardGate.DECAY, i]
                            dK[i, j] += acc[i, j]
                            acc[i, j] *= K_s[i, j]
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), z, dim=2)
                        T.copy(z, z_s)

                        T.wgmma_gemm(dO_s, V_new_s, G, clear_accum=True)
                        T.wgmma_gemm(U_s, V_new_s, F, transpose_A=True, clear_accum=True)
                        T.barrier_wait(values_loaded[0], p)
                        for i, j in T.Parallel(C, K):
                            acc[i, j] = T.Cast("float32", V_s[i, j])
                        for i, j in T.Parallel(C, K):
                            V_s[i, j] = gates_s[step % 2, BackwardGate.BETA, i] * U_s[j, i]
                            acc[i, j] = T.Select(i < length, acc[i, j] * U_s[j, i], 0.0)
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), beta_terms, dim=2)
                        T.wait_wgmma(0)
                        T.sync_threads()
                        if at_row >= 0:
                            load(tokens(at_row, at_head, at_slot, p ^ 1), tokens_loaded, 0)
                        for i, j in T.Parallel(C, K):
                            if i < length:
                                dv[row + i, hv, j] = V_s[i, j]

                        # What passes between tokens of the chunk. Q K^T and K K^T are the group's, but would take 32
                        # registers of all that happens between two heads.
                        T.wgmma_gemm(Q_s, K_s, QK, transpose_B=True, clear_accum=True)
                        T.wgmma_gemm(K_s, K_s, KK, transpose_B=True, clear_accum=True)
                        for i, j in T.Parallel(C, C):
                            D_ij = T.exp(
                                T.min(
                                    gates_s[step % 2, BackwardGate.LOG, i] - gates_s[step % 2, BackwardGate.LOG, j], 0.0
                                )
                            )
                            G[i, j] = T.Select(i >= j, G[i, j] * (D_ij * scale), 0.0)
                            F[i, j] = T.Select(i > j, -F[i, j] * D_ij, 0.0)
                            beta_F[i, j] = gates_s[step % 2, BackwardGate.BETA, i] * F[i, j]
                        T.copy(G, G_s)
                        T.copy(beta_F, F_s)
                        T.fence_proxy_async()
                        T.wait_wgmma(0)
                        T.sync_threads()
                        if at_row >= 0:
                            load(values(at_row, at_head), values_loaded, 0)
                        T.wgmma_gemm(G_s, K_s, dQ)
                        T.wgmma_gemm(G_s, Q_s, dK, transpose_A=True)
                        T.wgmma_gemm(F_s, K_s, dK)
                        T.wgmma_gemm(F_s, K_s, dK, transpose_A=True)
                        for i, j in T.Parallel(C, C):
                            F[i, j] *= KK[i, j]
                            G[i, j] = T.Select(i > j, G[i, j] * QK[i, j], 0.0)
                            G[i, j] += gates_s[step % 2, BackwardGate.BETA, i] * F[i, j]
                        T.reduce_sum(T.reshape(F, [C, HALVES, C // HALVES]), beta_terms, dim=2, clear=False)
                        T.reduce_sum(T.reshape(G, [C, HALVES, C // HALVES]), y, dim=2, clear=False)
                        T.reduce_sum(T.reshape(G, [WARPS, C // WARPS, C]), E_columns, dim=1)
                        T.copy(y, y_s)
                        T.copy(beta_terms, beta_terms_s)
                        T.copy(E_columns, E_columns_s)
                        T.wait_wgmma(0)
                        T.sync_threads()
                        if tx < C:
                            read_t = T.alloc_var("float32")
                            read_t = read_s[tx, 0] + read_s[tx, 1]
                            y_t = T.alloc_var("float32")
                            y_t = y_s[tx, 0] + y_s[tx, 1] - gates_s[step % 2, BackwardGate.BETA, tx] * read_t
                            for w in T.unroll(WARPS):
                                y_t -= E_columns_s[w, tx]
                            terms_s[0, tx] = y_t
                            terms_s[1, tx] = z_s[tx, 0] + z_s[tx, 1]
                            if tx < length:
                                db[row + tx, hv] = beta_terms_s[tx, 0] + beta_terms_s[tx, 1] - read_t
                        T.sync_threads()
                        if tx < length:
                            total = T.alloc_var("float32", init=0.0)
                            for i in T.unroll(STATE_PRODUCT_PARTS):
                                total += passed_s[i]
                            total *= gates_s[step % 2, BackwardGate.GAMMA, C - 1]
                            for i in T.unroll(C):
                                total += T.Select(i >= tx, terms_s[0, i], terms_s[1, i])
                            dg[row + tx, hv] = total
                        step = step + 1

                    row = place_s[0]
                    hk = place_s[1]
                    if use_l2norm != 0:
                        for i, j in T.Parallel(C, K):
                            acc[i, j] = Q_s[i, j] * dQ[i, j]
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), y, dim=2)
                        for i, j in T.Parallel(C, K):
                            acc[i, j] = K_s[i, j] * dK[i, j]
                        T.reduce_sum(T.reshape(acc, [C, HALVES, K // HALVES]), z, dim=2)
                        T.sync_threads()
                        T.copy(y, y_s)
                        T.copy(z, z_s)
                        T.sync_threads()
                        for i, j in T.Parallel(C, K):
                            if i < length:
                                dQ[i, j] = q_rstd[row + i, hk] * (dQ[i, j] - Q_s[i, j] * (y_s[i, 0] + y_s[i, 1]))
                                dK[i, j] = k_rstd[row + i, hk] * (dK[i, j] - K_s[i, j] * (z_s[i, 0] + z_s[i, 1]))
                    for i, j in T.Parallel(C, K):
                        Q_s[i, j] = dQ[i, j]
                        K_s[i, j] = dK[i, j]
                    T.fence_proxy_async()
                    T.sync_threads()
                    for i, j in T.Parallel(C, K):
                        if i < length:
                            dq[row + i, hk, j] = Q_s[i, j]
                            dk[row + i, hk, j] = K_s[i, j]
                    T.fence_proxy_async()
                    T.sync_threads()
                    if next_row >= 0:
                        load(keys(next_row, next_hk), qk_loaded, 0)
                    chunk = chunk + 1
                slot = next_slot
                hk = next_hk

    return main
