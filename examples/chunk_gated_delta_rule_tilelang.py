"""The chunked forward in plain TileLang, to read before the kernels of kernels_tl/: docs/design.md has the formulas.

One CTA per value head and batch row, K = V = 128. The state stays in registers from the first chunk to the last.
"""

import tilelang.language as T

C, K, V = 64, 128, 128


def chunk_gated_delta_rule(B: int, tokens: int, H_k: int, H_v: int, dtype: str = "bfloat16"):
    """The kernel for q, k [B, tokens, H_k, K], v [B, tokens, H_v, V], g and beta [B, tokens, H_v]."""
    group, scale = H_v // H_k, K**-0.5

    @T.prim_func
    def forward(
        q: T.Tensor((B, tokens, H_k, K), dtype),
        k: T.Tensor((B, tokens, H_k, K), dtype),
        v: T.Tensor((B, tokens, H_v, V), dtype),
        g: T.Tensor((B, tokens, H_v), "float32"),
        beta: T.Tensor((B, tokens, H_v), "float32"),
        initial_state: T.Tensor((B, H_v, K, V), "float32"),
        o: T.Tensor((B, tokens, H_v, V), dtype),
        final_state: T.Tensor((B, H_v, K, V), "float32"),
    ):
        with T.Kernel(H_v, B, threads=256) as (head, row):
            Q_s = T.alloc_shared((C, K), dtype)
            K_s = T.alloc_shared((C, K), dtype)
            V_s = T.alloc_shared((C, V), dtype)
            V_new_s = T.alloc_shared((C, V), dtype)  # the residual, then V_new
            S_s = T.alloc_shared((K, V), dtype)
            P_s = T.alloc_shared((C, C), dtype)  # A * D, then P
            N_s = T.alloc_shared((C, C), "float32")  # stril(diag(beta) K K^T)
            A_s = T.alloc_shared((C, C), "float32")  # (I + N)^-1
            g_s = T.alloc_shared((C,), "float32")
            b_s = T.alloc_shared((C,), "float32")  # cumulative sum of g: gamma = exp(b), D_ij = exp(b_i - b_j)
            beta_s = T.alloc_shared((C,), "float32")
            S = T.alloc_fragment((K, V), "float32")
            X = T.alloc_fragment((C, C), "float32")
            V_new = T.alloc_fragment((C, V), "float32")
            O = T.alloc_fragment((C, V), "float32")

            T.copy(initial_state[row, head, :, :], S)
            for chunk in T.Pipelined(T.ceildiv(tokens, C), num_stages=2):
                start, end = chunk * C, (chunk + 1) * C  # tokens past the end are read as zeros, and not written
                T.copy(q[row, start:end, head // group, :], Q_s)
                T.copy(k[row, start:end, head // group, :], K_s)
                T.copy(v[row, start:end, head, :], V_s)
                T.copy(g[row, start:end, head], g_s)
                T.copy(beta[row, start:end, head], beta_s)
                for i in T.Parallel(C):
                    b_s[i] = 0.0
                    for j in T.serial(C):
                        b_s[i] += T.if_then_else(j <= i, g_s[j], 0.0)

                # A, by forward substitution: one thread per column
                T.gemm(K_s, K_s, X, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    N_s[i, j] = T.if_then_else(i > j, beta_s[i] * X[i, j], 0.0)
                    A_s[i, j] = T.if_then_else(i == j, 1.0, 0.0)
                for j in T.Parallel(C):
                    for i in T.serial(C):
                        for m in T.serial(i):
                            A_s[i, j] -= N_s[i, m] * A_s[m, j]

                # V_new = (A * D) diag(beta) (V - diag(gamma) K S)
                T.copy(S, S_s)
                T.gemm(K_s, S_s, V_new, clear_accum=True)
                for i, j in T.Parallel(C, V):
                    V_new_s[i, j] = beta_s[i] * (V_s[i, j] - T.exp(b_s[i]) * V_new[i, j])
                for i, j in T.Parallel(C, C):
                    P_s[i, j] = T.if_then_else(i >= j, A_s[i, j] * T.exp(b_s[i] - b_s[j]), 0.0)
                T.gemm(P_s, V_new_s, V_new, clear_accum=True)

                # O = scale (diag(gamma) Q S + (tril(Q K^T) * D) V_new)
                T.gemm(Q_s, K_s, X, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    P_s[i, j] = T.if_then_else(i >= j, scale * X[i, j] * T.exp(b_s[i] - b_s[j]), 0.0)
                T.copy(V_new, V_new_s)
                T.gemm(Q_s, S_s, O, clear_accum=True)
                for i, j in T.Parallel(C, V):
                    O[i, j] *= scale * T.exp(b_s[i])
                T.gemm(P_s, V_new_s, O)
                T.copy(O, o[row, start:end, head, :])

                # S' = gamma_C S + K^T diag(gamma_C / gamma) V_new
                for i, j in T.Parallel(C, V):
                    V_new_s[i, j] = T.exp(b_s[C - 1] - b_s[i]) * V_new[i, j]
                for i, j in T.Parallel(K, V):
                    S[i, j] *= T.exp(b_s[C - 1])
                T.gemm(K_s, V_new_s, S, transpose_A=True)
            T.copy(S, final_state[row, head, :, :])

    return forward
