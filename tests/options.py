"""The options of a trial, and which of their values go together. tests/fuzz.py draws from them. `rows` are few trials
that have every pair of values of every two options (allpairspy)."""

import functools
import itertools
import random
from typing import NamedTuple

import torch
from accuracy import FLOAT8
from allpairspy import AllPairs
from cases import ALL_GRADIENTS_OF, STRIDES, Case
from trials import BF16, FP16, FP32, FP64, NAN_IN, STYLES, Trial

ANY_FLOAT = (BF16, FP16, FP32, FP64)
BOTH = (False, True)


# Which sequences have a slot; "shared": empty ones name slots of others
SLOTS = ("all", "some", "none", "shared")


class Shape(NamedTuple):
    B: int
    T: int
    lengths: tuple[int, ...] | None


def dense(B: int, T: int) -> Shape:
    return Shape(B, T, None)


def packed(*lengths: int) -> Shape:
    return Shape(1, 0, lengths)


KEYS_AND_BETAS = (
    ("unit", "sigmoid"),
    ("unit", "two"),
    ("unit", "0"),
    ("repeated", "1"),
    ("alike", "two"),
    ("long", "stable"),
    ("zero", "sigmoid"),
)
GATES = ("softplus", "logsigmoid", "near_threshold", "underflow", "zero", "hard_resets", "extreme")
# Dimensions in the kernels' tiles or not, whose keys are wide or not
DIMS = ((128, 128), (64, 64), (96, 40), (8, 8), (136, 64), (256, 136))
DIMS_OF_CPU = ((16, 24), (1, 8), (3, 33), (64, 5))
# Tokens between them, and where they go
CHECKPOINTS = (
    *((0, "rows"), (64, "rows"), (128, "slots"), (50, "slots"), (16, "few"), (40, "rows")),
    (64, "no_slots"),
)
FORWARD_MODES = (
    {},
    {"value_tile": 64, "segment_chunks": 0},
    {"value_tile": 128, "segment_chunks": 0},
    {"value_tile": 128, "segment_chunks": 0, "fused": 1},
    {"value_tile": 64, "segment_chunks": 1},
    {"value_tile": 128, "segment_chunks": 1, "fused": 1},
    {"value_tile": 128, "segment_chunks": 2, "cut_above": 2, "fused": 1},
    {"value_tile": 64, "segment_chunks": 1, "cut_above": 1, "long_tile": 128},
)
BACKWARD_MODES = ({}, {"segment_chunks": 0}, {"segment_chunks": 1}, {"segment_chunks": 2, "cut_above": 2})
# What the fuzzer has besides
MORE = {
    "gate": ("tiny", "resets"),
    "keys_and_beta": (
        ("unit", "2"),
        ("repeated", "sigmoid"),
        ("repeated", "two"),
        ("alike", "sigmoid"),
        ("alike", "1"),
    ),
    "forward": (
        {"value_tile": 128, "segment_chunks": 5},
        {"value_tile": 128, "segment_chunks": 2, "cut_above": 3},
        {"value_tile": 128, "segment_chunks": 16, "cut_above": 36},
        {"value_tile": 128, "segment_chunks": 0, "cut_above": 2, "long_tile": 64},
        {"segment_chunks": 5, "cut_above": 9, "fused": 1},
    ),
    "backward": ({"segment_chunks": 5}, {"segment_chunks": 16, "cut_above": 17}),
    "scale": (0.25,),
    "nan": (None,) * 8,
}


def shapes(op: str, device: str) -> dict[str, Shape]:
    """Shapes by name. "many" has more tiles than a GPU has CTAs, and several of a CTA's tiles have checkpoints: three
    heads are 1.1 tiles per SM, four 1.5, and V may have several tiles. It has no more sequences than that, and for both
    passes no longer ones than a chunk, because the fp64 reference takes up to 0.1 GB for each."""
    few = device == "cpu" or not torch.cuda.is_available()
    sms = 4 if few else torch.cuda.get_device_properties(0).multi_processor_count
    if op.startswith("decode"):
        lengths = {"dense": dense(2, 4), "packed": packed(1, 0, 9, 2, 0, 12)}
        lengths["many"] = packed(*[0, 1, 2, 1] * (sms // 2))
    else:
        lengths = {"dense": dense(2, 65), "packed": packed(63, 0, 64, 1, 129), "long": packed(200, 5)}
        of_two_chunks = 66 if op == "prefill" else 50
        lengths["many"] = packed(*[64, 3, 0, of_two_chunks, 17, 64, 1] * max(1, sms // 16))
    empty = {"no_tokens": dense(2, 0), "no_sequences": packed(), "empty": packed(0, 0, 0)}
    return empty | {"one": dense(3, 1)} | lengths


FEW_TOKENS = ("no_tokens", "no_sequences", "empty", "one")


def options(op: str, device: str) -> dict[str, tuple]:
    """The values of each option of a call."""
    gpu, decodes = device == "cuda", op.startswith("decode")
    values = {
        "shape": tuple(shapes(op, device).values()),
        "dims": DIMS if gpu else DIMS_OF_CPU,
        "keys_and_beta": KEYS_AND_BETAS,
        "gate": GATES,
        "dtype": (BF16, FP16) if gpu else ANY_FLOAT,
        "heads": ((2, 4), (1, 3), (1, 1)),
        "padding": (0, 1, 65),
        "g_dtype": ANY_FLOAT,
        "beta_dtype": ANY_FLOAT,
        "gate_inside": (None, (FP32, FP32), (BF16, None), (FP16, FP64), (FP64, BF16)),  # dtypes of A_log and dt_bias
        "beta_inside": ("", "sigmoid", "2 sigmoid"),
        "l2norm": BOTH,
        "scale": (None, 1.0, -2.0, 0.0),
        "cu_dtype": (torch.int32, torch.int64),
        "strides": STRIDES,
        "offsets": BOTH,
        "strided": BOTH,
        "nan": (None, *NAN_IN),
        "state_dtype": ANY_FLOAT,
    }
    if not decodes:
        values["max_seqlen"] = (None, "right", "longer", "shorter", "0")
        if gpu:
            values["forward"] = FORWARD_MODES
    if op == "chunk":
        values |= {
            "initial_state": (None, *ANY_FLOAT),
            "state_scale": (0.5, 30),
            "state_v_first": BOTH,
            "auto_cp": BOTH,
            "do_strides": (*(x for x in STRIDES if x not in ("slices", "reversed_dims")), "expanded", "unused"),
            "dht": (None, *ANY_FLOAT),
            "requires_grad": (tuple(ALL_GRADIENTS_OF), ("initial_state",), ("q", "beta"), ("g",), ("A_log",)),
            "with_sums": BOTH,
            "map_sequences": (None, "none", "last", "both"),
        }
        return values | ({"backward": BACKWARD_MODES} if gpu else {})
    values |= {
        "state_scale": (0.5, 30),
        "index_dtype": (torch.int32, torch.int64, None),
        "null_index": (-1, 0, 3),
        "gap": (0, 16, 112) if gpu else (0, 7),
        "slots": SLOTS,
        "out": (None, "contiguous", "misaligned", "heads_last"),
    }
    pools = ((BF16, FP16, FP32) if gpu else ANY_FLOAT) + (FLOAT8 if op != "decode_buffered" else ())
    values["state_dtype"] = pools
    if op == "prefill":
        return values | {
            "checkpoints": CHECKPOINTS,
            "other_slots": BOTH,
            "new_requests": BOTH,
            "with_h": BOTH,
            "batch_invariant": BOTH,
        }
    values |= {"slots": (*SLOTS, "plain"), "beta_inside": (*values["beta_inside"], "default", "2 default")}
    if op == "decode_buffered":
        return values | {
            "dims": tuple(x for x in values["dims"] if x[0] <= 128) if gpu else values["dims"],
            "steps": (1, 2, 3, 17, 32),
            "rounds_d": BOTH,
            "rounds_k": BOTH,
            "flush": (None, 1, 2, -1, 256),
        }
    values |= {"style": STYLES, "state_v_first": BOTH}
    return values | ({"flat": BOTH} if op == "decode_packed" else {})


def possible(op: str, device: str, row: dict) -> bool:
    """Whether there are calls with these values of some of the options."""

    def has(**values) -> bool:
        """All of these options are in the row, with a value that is such a one."""
        return all(name in row and is_such(row[name]) for name, is_such in values.items())

    def among(*values):
        return lambda x: x in values

    impossible = [
        has(shape=lambda x: x.lengths is None, padding=bool),
        has(dims=lambda x: x[0] == 1, l2norm=bool),  # leaves the sign: gradients are what rounding leaves of zero
        has(keys_and_beta=among(("long", "stable")), l2norm=bool),
        has(keys_and_beta=among(("long", "stable")), beta_inside=bool),
        has(keys_and_beta=lambda x: x[1] in ("two", "2"), beta_inside=among("sigmoid")),
        has(keys_and_beta=lambda x: x[1] in ("two", "2"), beta_inside=among("default"), gate_inside=bool),
        has(initial_state=among(None), requires_grad=among(("initial_state",))),
        has(gate_inside=among(None), requires_grad=among(("A_log",))),
        has(dht=among(None), do_strides=among("unused")),
        has(checkpoints=lambda x: x[0] % 64 != 0, with_h=bool),
        has(slots=among("plain"), style=among("slots", "accepted", "no_slots")),
        has(flat=bool, shape=lambda x: x.lengths is not None or x.T != 1),
        has(beta_inside=among("2 default"), gate_inside=among(None)),
    ]
    if op == "decode_buffered" and {"dtype", "state_dtype", "steps"} <= row.keys():  # see Buffered
        exact = FP64 if row["dtype"] == FP64 else FP32
        longest = max((row["shape"].T, *(row["shape"].lengths or ())))
        impossible.append(row["state_dtype"] != exact and row["steps"] < longest)
    if device == "cuda":
        of_8_bits = {"state_dtype": lambda x: x in FLOAT8}
        impossible += [
            has(**of_8_bits, dims=lambda x: x[0] % 16 != 0),
            has(**of_8_bits, state_v_first=lambda x: not x),
            has(
                dims=lambda x: x[0] > 128,
                forward=lambda x: x.get("fused") or 64 in (x.get("value_tile"), x.get("long_tile")),
            ),
            has(**of_8_bits, forward=lambda x: x.get("fused")),
        ]
        if op.startswith("decode"):  # would take 11 GB and more
            many = {"shape": lambda x: len(x.lengths or ()) > 100}
            impossible.append(has(**many, dims=lambda x: x[0] > 128, heads=lambda x: x[1] > 1))
    return not any(impossible)


def trial_of(op: str, row: dict, seed: int) -> Trial:
    """The trial of a row, which has a value of each option."""
    row = dict(row)
    shape, (H_k, H_v), (K, V), (keys, beta) = (row.pop(x) for x in ("shape", "heads", "dims", "keys_and_beta"))
    l2norm, gate_inside, beta_inside = (row.pop(x) for x in ("l2norm", "gate_inside", "beta_inside"))
    longest = max(shape.T, *shape.lengths, 0) if shape.lengths else shape.T
    max_seqlens = {"right": longest, "longer": longest + 100, "shorter": longest // 4, "0": 0}
    of_case = {
        "use_gate_in_kernel": gate_inside is not None,
        "use_beta_sigmoid_in_kernel": gate_inside is not None if "default" in beta_inside else beta_inside != "",
        "allow_neg_eigval": beta_inside.startswith("2"),
        "max_seqlen": max_seqlens.get(row.pop("max_seqlen", None)),
        "state_v_first": op in ("prefill", "decode_buffered"),
    }
    if gate_inside is not None:
        of_case |= zip(("A_log", "dt_bias"), gate_inside, strict=True)
    of_trial = {"default_sigmoid": "default" in beta_inside}
    if "checkpoints" in row:
        of_trial |= zip(("every", "kept"), row.pop("checkpoints"), strict=True)
    for name in ("d", "k"):
        if row.pop(f"rounds_{name}", False):
            of_trial[f"{name}_dtype"] = row["dtype"]
    for name, value in row.items():
        (of_case if name in Case.__dataclass_fields__ else of_trial)[name] = value
    case = Case(
        **shape._asdict(),
        **{"H_k": H_k, "H_v": H_v, "K": K, "V": V, "beta": beta, "seed": seed},
        keys="raw" if l2norm and keys == "unit" else keys,
        use_qk_l2norm_in_kernel=l2norm,
        **of_case,
    )
    return Trial(op, case, **of_trial)


@functools.cache
def rows(op: str, device: str) -> tuple[dict, ...]:
    """Rows that have, together, every possible pair of values of every two options; on the CPU half as many again,
    drawn at random among those with tokens."""
    values = options(op, device)
    names = sorted(values, key=lambda name: -len(values[name]))  # gives the fewest rows

    def is_possible(some) -> bool:
        return possible(op, device, dict(zip(names, some, strict=False)))

    table = [
        dict(zip(names, row, strict=True))
        for row in AllPairs([list(values[x]) for x in names], filter_func=is_possible)
    ]
    r = random.Random(0)
    for pair in pairs(values):  # which allpairspy leaves out if options exclude each other
        if not any(pair.items() <= row.items() for row in table):
            drawn = (draw(r, op, device, pair) for _ in range(20))
            table += [row for row in drawn if row is not None][:1]
    if device == "cpu":  # where a row takes little time
        some = [shape for name, shape in shapes(op, device).items() if name not in FEW_TOKENS]
        drawn = (draw(r, op, device, {"shape": r.choice(some)}) for _ in table[::2])
        table += [row for row in drawn if row is not None]
    return tuple(table)


def pairs(values: dict[str, tuple]):
    for (a, xs), (b, ys) in itertools.combinations(values.items(), 2):
        for x, y in itertools.product(xs, ys):
            yield {a: x, b: y}


def draw(r: random.Random, op: str, device: str, chosen: dict, more: dict | None = None) -> dict | None:
    """A row with these values of some options, and others at random; None if they exclude each other."""
    row = dict(chosen)
    for name, values in options(op, device).items():
        if name not in chosen:
            some = [x for x in (*values, *(more or {}).get(name, ())) if possible(op, device, row | {name: x})]
            if not some:
                return None
            row[name] = r.choice(some)
    return row if possible(op, device, row) else None
