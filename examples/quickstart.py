"""The Gated Delta Rule in three calls: a prefill, its continuation, and packed sequences.

python examples/quickstart.py
"""

import torch

from flash_qla import chunk_gated_delta_rule

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device, dtype = ("cuda", torch.bfloat16) if hopper else ("cpu", torch.float32)
torch.manual_seed(0)
T, H_k, H_v, D = 1000, 2, 4, 128  # tokens, query/key heads, value heads, head size
q = torch.randn(1, T, H_k, D, device=device, dtype=dtype)
k = torch.randn(1, T, H_k, D, device=device, dtype=dtype)
v = torch.randn(1, T, H_v, D, device=device, dtype=dtype)
g = -0.1 * torch.rand(1, T, H_v, device=device)  # log of the decay of each token
beta = torch.rand(1, T, H_v, device=device)  # how much of the old value each token overwrites
options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


def piece(start, end):
    return [x[:, start:end] for x in (q, k, v, g, beta)]


# 1. A prefill: outputs of all tokens and the state after the last one, float32 [1, H_v, D, D].
o, state = chunk_gated_delta_rule(q, k, v, g, beta, **options)

# 2. The same in two pieces: the second starts from the state that the first left.
o_1, state_1 = chunk_gated_delta_rule(*piece(0, 600), **options)
o_2, state_2 = chunk_gated_delta_rule(*piece(600, T), initial_state=state_1, **options)

# 3. The two pieces as separate sequences packed into one row, each with its own initial state.
cu_seqlens = torch.tensor([0, 600, T], device=device)
states = torch.cat([torch.zeros_like(state_1), state_1])
o_3, state_3 = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=states, cu_seqlens=cu_seqlens, **options)


def difference(x, y):
    return f"{((x - y).float().norm() / y.float().norm()).item():.1e}"


print(f"on {device}: o {tuple(o.shape)} {o.dtype}, state {tuple(state.shape)} {state.dtype}")
print("two pieces against one: o", difference(torch.cat([o_1, o_2], 1), o), "state", difference(state_2, state))
print("packed against pieces:  o", difference(o_3, o), "state", difference(state_3[1:], state))
