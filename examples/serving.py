"""A serving engine's way of calling: the states of all requests live in one pool, and every step packs the new tokens
of many requests into one call. The step's states are gathered from their slots, and scattered back behind it.

python examples/serving.py

Two steps run here. The first starts 24 requests with short prompts; the second brings more tokens of half of them, in
another order, and new requests in slots that have become free. Outputs and states are compared with the recurrence,
token by token in float64, over the whole of each request.
"""

import torch
import torch.nn.functional as F

from flash_qla import chunk_gated_delta_rule

SLOTS, H_K, H_V, D = 32, 2, 4, 128  # slots of the pool, query/key heads, value heads, head size
TOLERANCE = 5e-3  # of the relative error; a bfloat16 number alone is off by up to 3.9e-3


def step(pool, slots, continues, q, k, v, g, beta, cu_seqlens):
    """o of the packed tokens; the pool gets the states behind them.

    pool: [slots, H_v, V, K], float32 or bfloat16; slots: [N], the slot of each sequence; continues: [N], whether its
    state is that of the sequence's earlier tokens, or something left behind by a request that has ended.
    """
    states = pool[slots]
    states.masked_fill_(~continues[:, None, None, None], 0)
    o, states = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
        state_dtype=pool.dtype,
    )
    pool[slots] = states
    return o


class Request:
    """All tokens that a request has had so far, to check with."""

    def __init__(self):
        self.tokens = []  # of each step: q, k, v, g, beta
        self.outputs = []

    def add(self, length, device):
        heads = (H_K, H_K, H_V)
        q, k, v = (torch.randn(1, length, H, D, device=device, dtype=torch.bfloat16) for H in heads)
        g = F.logsigmoid(torch.randn(1, length, H_V, device=device)) / 4
        beta = torch.rand(1, length, H_V, device=device)
        self.tokens.append((q, k, v, g, beta))
        return self.tokens[-1]

    def recurrence(self):
        """o [T, H_v, V] and the state [H_v, V, K] of the whole request."""
        q, k, v, g, beta = (torch.cat(parts, 1)[0].cpu().double() for parts in zip(*self.tokens, strict=True))
        q, k = (
            (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(H_V // H_K, 1) for x in (q, k)
        )
        S = torch.zeros(H_V, D, D, dtype=torch.float64)
        o = []
        for t in range(len(q)):
            S = g[t].exp()[:, None, None] * S
            S = S + (beta[t][:, None] * (v[t] - (S @ k[t][..., None])[..., 0]))[..., None] * k[t][:, None]
            o.append(D**-0.5 * (S @ q[t][..., None])[..., 0])
        return torch.stack(o), S


def serve(requests, slots, lengths, pool):
    """One step for these requests."""
    device = pool.device
    packed = [request.add(length, device) for request, length in zip(requests, lengths, strict=True)]
    continues = torch.tensor([bool(request.outputs) for request in requests], device=device)
    cu_seqlens = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    inputs = (torch.cat(parts, 1) for parts in zip(*packed, strict=True))  # 1 x T
    o = step(pool, torch.tensor(slots, device=device), continues, *inputs, cu_seqlens)
    for request, part in zip(requests, o.split(lengths, 1), strict=True):
        request.outputs.append(part)


def relative_error(x, expected):
    return ((x.cpu().double() - expected).norm() / expected.norm()).item()


def run(device, pool_dtype):
    """The largest relative error of o and of a state, over all requests."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def lengths(n):
        return torch.randint(1, 70, (n,), generator=generator).tolist()

    pool = torch.full((SLOTS, H_V, D, D), float("nan"), device=device, dtype=pool_dtype)  # nothing of it may be read
    order = torch.randperm(SLOTS, generator=generator).tolist()
    running = {slot: Request() for slot in order[:24]}
    everyone = list(running.values())
    serve(everyone, list(running), lengths(24), pool)

    for slot in order[:6]:  # they have ended, and others take their slots
        running[slot] = Request()
        everyone.append(running[slot])
    slots = order[17::-1]
    states = pool[order[18:24]].clone()
    serve([running[slot] for slot in slots], slots, lengths(18), pool)
    if not torch.equal(pool[order[18:24]], states):
        raise RuntimeError("a step changed the states of requests that it had no tokens of")

    expected = {request: request.recurrence() for request in everyone}
    o = max(relative_error(torch.cat(request.outputs, 1)[0], expected[request][0]) for request in everyone)
    state = max(relative_error(pool[slot], expected[running[slot]][1]) for slot in running)
    return o, state


def main():
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if hopper else "cpu"
    for pool_dtype in (torch.float32, torch.bfloat16):
        o, state = run(device, pool_dtype)
        print(f"on {device}, {pool_dtype} pool: largest relative error of o {o:.1e}, of a state {state:.1e}")
        if not max(o, state) <= TOLERANCE:
            raise SystemExit(f"expected at most {TOLERANCE}")


if __name__ == "__main__":
    main()
