"""begin, replay and finish of the two passes: calls of all of them, and inputs whose states are the maps."""

import torch

ops = torch.ops.flash_qla
BEGIN = ("gated_delta_rule_forward_begin", "gated_delta_rule_backward_begin")
REPLAY = "gated_delta_rule_backward_replay"
FINISH = ("gated_delta_rule_forward_finish", "gated_delta_rule_backward_finish")


def by_name(op: str, arguments: dict):
    names = [x.name for x in getattr(ops, op).default._schema.arguments]
    return getattr(ops, op)(**{name: arguments[name] for name in names if name in arguments})


def run_begin_finish(
    arguments: dict, sequences: list[int], of_first: dict | None = None
) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """The outputs of both passes by name, and the maps of the forward and of the backward. `of_first` is what begin is
    given instead."""
    of_first = of_first or {}
    op_arguments = {"output_final_state": True, "map_sequences": sequences} | arguments
    maps, workspace, o = by_name(BEGIN[0], op_arguments | of_first)
    final_state = by_name(FINISH[0], op_arguments | {"workspace": workspace, "o": o})
    outputs = {"o": o, "final_state": final_state}

    op_arguments |= {"g": None, "g_raw": arguments["g"]}
    reverse_maps, workspace, *of_tokens = by_name(BEGIN[1], op_arguments | of_first)
    gradients = dict(zip(("dq", "dk", "dv", "db", "dg"), of_tokens, strict=True))
    by_name(REPLAY, op_arguments | {"workspace": workspace})
    sums = by_name(FINISH[1], op_arguments | gradients | {"workspace": workspace})
    for name, x in zip(("dh0", "dA_log", "ddt_bias"), sums, strict=True):
        if x.numel() or (name == "dh0" and arguments["initial_state"] is not None):
            gradients[name] = x
    return outputs | gradients, maps, reverse_maps


def of_sequences(arguments: dict, sequences: list[int]) -> dict:
    """The arguments of a call of these sequences alone."""
    selected, offsets = dict(arguments), arguments["cu_seqlens"]
    along, rows = 0, torch.tensor(sequences, device=arguments["q"].device)
    if offsets is not None:
        along, rows = 1, torch.cat([torch.arange(*offsets[n : n + 2].tolist()) for n in sequences]).to(rows.device)
        selected["cu_seqlens"] = torch.nn.functional.pad(offsets.diff()[sequences].cumsum(0), (1, 0))
    for name in ("q", "k", "v", "g", "beta", "do"):
        selected[name] = arguments[name].index_select(along, rows)
    for name in ("initial_state", "dht"):
        selected[name] = None if arguments[name] is None else arguments[name][sequences]
    return selected


def with_identities(arguments: dict) -> dict:
    """The arguments with K more value channels, whose states are identities: their final states and the gradients of
    their initial states are the maps of all sequences, V-first [N, H_v, V + K, K]."""
    v, K = arguments["v"], arguments["q"].shape[-1]
    N = v.shape[0] if arguments["cu_seqlens"] is None else len(arguments["cu_seqlens"]) - 1
    H_v, V = v.shape[2:]

    def widened(x):
        return torch.cat([x, x.new_zeros(*x.shape[:-1], K)], -1)

    def with_identity(state):
        identity = torch.eye(K, dtype=torch.float64, device=v.device).expand(N, H_v, K, K)
        if state is None:
            state = identity.new_zeros(N, H_v, V, K)
        elif not arguments["state_v_first"]:
            state = state.mT
        return torch.cat([state.double(), identity], 2)

    states = {name: with_identity(arguments[name]) for name in ("initial_state", "dht")}
    return arguments | {"v": widened(v), "do": widened(arguments["do"]), "state_v_first": True} | states
