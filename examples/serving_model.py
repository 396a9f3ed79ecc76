"""The model of serving.py: a step of Hugging Face's Qwen3-Next for many requests, on a pool of states, keys and values.

Weights and modules are transformers' own.
"""

import collections

import torch
from transformers.activations import ACT2FN

from flash_qla import decode_gated_delta_rule_packed, prefill_gated_delta_rule

BLOCK = 64  # tokens of a page, and between two checkpoints
NULL = 0  # the slot and the page of padding; their contents do not matter
BEYOND = 2**40  # a position that no token has


class Pool:
    """The memory of all requests, and its owners.

    states: [slots, linear layers, H_v, V, K], fp32; states[:, i] is the pool of a layer, an argument of the operations.
    convs: [slots, linear layers, W - 1, channels], the inputs of the causal convolution (W wide) before the next token.
    keys, values: [full layers, H, pages * BLOCK, D].
    """

    def __init__(self, model: torch.nn.Module, slots: int, pages: int):
        config, new = model.config, model.lm_head.weight.new_zeros
        linear = [layer.linear_attn for layer in model.model.layers if layer.block_type == "linear_attention"]
        gdn, full = linear[0], config.num_hidden_layers - len(linear)
        state = gdn.num_v_heads, gdn.head_v_dim, gdn.head_k_dim
        self.layer_index = [
            config.layer_types[:i].count(kind) for i, kind in enumerate(config.layer_types)
        ]  # index among its kind
        self.states = new(slots, len(linear), *state, dtype=torch.float32)
        self.convs = new(slots, len(linear), gdn.conv_kernel_size - 1, gdn.conv_dim)
        self.keys, self.values = new(2, full, config.num_key_value_heads, pages * BLOCK, config.head_dim)
        self.free_slots, self.free_pages = list(range(NULL + 1, slots)), list(range(NULL + 1, pages))
        self.users = collections.Counter()  # page -> number of users
        self.prefixes = collections.OrderedDict()  # prefix -> page of its last block, slot of its checkpoint

    def allocate(self, slots: int, pages: int) -> tuple[list[int], list[int]] | None:
        """Takes slots and pages. If too few are free, the least recently used prefixes are forgotten."""
        while len(self.free_slots) < slots or len(self.free_pages) < pages:
            if not self.prefixes:
                return None
            page, slot = self.prefixes.popitem(last=False)[1]
            self.release([slot], [page])
        allocation = [self.free_slots.pop() for _ in range(slots)], [self.free_pages.pop() for _ in range(pages)]
        self.users.update(allocation[1])
        return allocation

    def release(self, slots: list[int], pages: list[int]) -> None:
        self.free_slots += slots
        self.users.subtract(pages)
        self.free_pages += [page for page in pages if not self.users[page]]

    def copy(self, slot: int, to: int) -> None:
        for x in (self.states, self.convs):
            x[to] = x[slot]

    def remember(self, new_prefixes: dict[tuple[int, ...], tuple[int, int]]) -> None:
        """Adds prefixes: the page of the last block, and the slot with the state after it."""
        for key in reversed(new_prefixes):  # the longest first: a block is forgotten before the blocks it continues
            self.prefixes[key] = new_prefixes[key]
            self.users[new_prefixes[key][0]] += 1

    def find_prefix(self, prompt: list[int]) -> tuple[list[int], int]:
        """The pages of the longest known prefix, which get the caller as a user, and the slot of its checkpoint."""
        pages, slot, keys = [], NULL, []
        for end in range(BLOCK, len(prompt), BLOCK):  # at least one token has to be computed
            key = tuple(prompt[:end])
            if key not in self.prefixes:
                break
            page, slot = self.prefixes[key]
            pages.append(page)
            keys.append(key)
        for key in reversed(keys):
            self.prefixes.move_to_end(key)
        self.users.update(pages)
        return pages, slot


class Step:
    """The tokens of a step, and the places of their states, inputs, keys and values, which the layers read.

    The device computes everything from `tables`, tensors of fixed shapes, so a graph serves any contents:

    tokens: [T], packed; tokens from the last offset on are padding.
    cu_seqlens: [N + 1], offsets of N requests.
    start: [N], position of each request's first token.
    slots: [N, S], slots of its states.
    accepted: [N], the column of slots, from 1, that is read.
    pages: [N, M], its pages.
    checkpoints: [N, C], slots. Unused slots and pages are NULL.
    """

    def __init__(self, pool: Pool, tables: dict[str, torch.Tensor], T: int, decoding: bool):
        self.pool, self.decoding = pool, decoding
        self.tokens, self.cu_seqlens = tables["tokens"][None, :T], tables["cu_seqlens"]
        self.start, self.slots, self.accepted = tables["start"], tables["slots"], tables["accepted"]
        self.checkpoints, pages = tables["checkpoints"], tables["pages"]
        N, C, device = len(self.start), self.checkpoints.shape[1], pages.device
        begin, end = self.cu_seqlens[:-1], self.cu_seqlens[1:]

        t = torch.arange(T, device=device)
        n = torch.searchsorted(end, t, right=True).clamp(max=N - 1)
        nth = t - begin[n]  # index among its request's tokens of this step
        live = t < end[-1]
        self.positions = torch.where(live, self.start[n] + nth, 0)

        # Attention: the entry of the pages that each token has, and those that it sees
        page = torch.where(live, pages[n, self.positions // BLOCK], NULL)
        self.entries = page * BLOCK + self.positions % BLOCK
        first = torch.full((N, pool.keys.shape[2] // BLOCK), BEYOND, device=device)  # position in each page of the pool
        # Unused columns of a table name the page NULL, at positions beyond the request's.
        first.scatter_(1, pages, (torch.arange(pages.shape[1], device=device) * BLOCK).expand_as(pages))
        visible = first[n][:, :, None] + torch.arange(BLOCK, device=device) <= self.positions[:, None, None]
        visible = visible.flatten(1)
        visible.scatter_(1, self.entries[:, None], True)  # padding sees itself: a softmax over nothing is NaN
        self.mask = visible[None, None]  # [1, 1, T, pages * BLOCK]

        # Convolution: rows of each token's W inputs in [inputs before the step of N requests, inputs of the step]; the
        # tokens after which states are kept, and their slots
        before = pool.convs.shape[2]  # W - 1
        w = torch.arange(before + 1, device=device)
        old, new = (n * before + nth)[:, None] + w, (N * before + t - before)[:, None] + w
        self.windows = torch.where(nth[:, None] + w < before, old, new)
        self.read_slots = self.slots.gather(1, self.accepted[:, None] - 1)[:, 0]
        if decoding:
            i = torch.arange(self.slots.shape[1], device=device)
            kept, to = begin[:, None] + i, self.slots  # states after a request's last token are not read
        else:
            block_ends = begin[:, None] + BLOCK * torch.arange(1, C + 1, device=device) - 1
            kept = torch.cat([block_ends, end[:, None] - 1], 1)
            to = torch.cat([self.checkpoints, self.slots[:, :1]], 1)
        self.kept, self.write_slots = kept.flatten().clamp(0, T - 1), to.flatten()

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_):
        """The method of transformers' cache: keeps the step's keys and values, [1, H, T, D], and returns the pool's.

        The mask shows each token those of its request.
        """
        pages = [x[self.pool.layer_index[layer]] for x in (self.pool.keys, self.pool.values)]
        for old, new in zip(pages, (keys, values), strict=True):
            old[:, self.entries] = new[0]
        return tuple(x[None] for x in pages)


def gated_delta_net(layer: torch.nn.Module, x: torch.Tensor, states: torch.Tensor, convs: torch.Tensor, step: Step):
    """transformers' layer on the pool: x [1, T, hidden], states [slots, H_v, V, K], convs [slots, W - 1, channels]."""
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    mixed_qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)

    before = convs[step.read_slots].masked_fill_((step.start == 0)[:, None, None], 0)
    inputs = torch.cat([before.flatten(0, 1), mixed_qkv[0]])[step.windows]  # [T, W, channels]
    convs[step.write_slots] = inputs[step.kept, 1:]
    mixed_qkv = torch.einsum("twc,cw->tc", inputs, layer.conv1d.weight[:, 0])[None]
    mixed_qkv = ACT2FN[layer.activation](mixed_qkv)

    if step.decoding:
        o = decode_gated_delta_rule_packed(
            mixed_qkv,
            a,
            b,
            layer.A_log,
            layer.dt_bias,
            states,
            step.slots,
            null_index=NULL,
            cu_seqlens=step.cu_seqlens,
            num_accepted_tokens=step.accepted,  # reads the state after the last accepted draft,
            write_indices=step.slots,  # because the states after all drafts are kept
        )
    else:
        q, k, v = mixed_qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        o = prefill_gated_delta_rule(
            q.unflatten(-1, (-1, layer.head_k_dim)),
            k.unflatten(-1, (-1, layer.head_k_dim)),
            v.unflatten(-1, (-1, layer.head_v_dim)),
            a,
            b,
            states,
            step.slots[:, 0],
            cu_seqlens=step.cu_seqlens,
            has_initial_state=step.start > 0,
            null_index=NULL,
            use_qk_l2norm_in_kernel=True,
            checkpoint_every=BLOCK,
            checkpoint_indices=step.checkpoints,
            use_gate_in_kernel=True,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
    return layer.out_proj(layer.norm(o, z).flatten(2))


def next_tokens(model: torch.nn.Module, step: Step) -> torch.Tensor:
    """The most likely next token after each token of the step, [T]."""
    x = model.model.embed_tokens(step.tokens)
    rotary = model.model.rotary_emb(x, step.positions[None])
    for layer, index in zip(model.model.layers, step.pool.layer_index, strict=True):
        h = layer.input_layernorm(x)
        if layer.block_type == "linear_attention":
            h = gated_delta_net(layer.linear_attn, h, step.pool.states[:, index], step.pool.convs[:, index], step)
        else:
            h = layer.self_attn(h, rotary, step.mask, step)[0]
        x = x + h
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))[0].argmax(-1)
