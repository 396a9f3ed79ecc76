"""What the dispatch decides for shapes in which every pair of values occurs. choices.csv has it, so that a change of
the cost model shows as the choices that it changes.

    python tests/choices.py     # writes choices.csv, after such a change; then read the difference
"""

import ast
import csv
from pathlib import Path

from allpairspy import AllPairs

from flash_qla import _C

FILE = Path(__file__).with_suffix(".csv")
CARDS = ("H100 SXM", "H100 PCIe", "H200", "H20")
HEADS = ((1, 1), (2, 8), (4, 8), (16, 16), (16, 32), (16, 48), (16, 64))
# T, N and max_seqlen of packed sequences; with 0 the host knows no lengths.
LENGTHS = ((64, 1, 64), (2048, 1, 2048), (32768, 1, 32768), (131072, 1, 131072), (32768, 8, 4096), (32768, 8, 28672))
LENGTHS += ((32768, 8, 0), (8192, 2, 0), (8192, 64, 300), (8192, 64, 0))
BOTH = ({}, {"use_qk_l2norm": True}, {"fp16": True}, {"K": 256, "V": 256}, {"K": 96, "V": 192}, {"portable": True})
BOTH += ({"K": 256, "portable": True}, {"over_ranks": True}, {"auto_cp": False})
OPTIONS = {
    "forward": (
        *BOTH,
        {"low_level": True},
        {"output_h": True},
        {"batch_invariant": True},
        {"checkpoint_every": 256},
        {"checkpoint_every": 100, "resumable": True},
        {"float8": True},
    ),
    "backward": (*BOTH, {"activations": True}, {"activations": True, "use_qk_l2norm": True}),
}


SHAPE = ("H_k", "H_v", "T", "N", "max_seqlen")


def choice(direction: str, card: str, shape: dict[str, int], options: dict) -> dict[str, str]:
    """A row: the shape, and the decision's fields."""
    decision = getattr(_C, f"{direction}_dispatch")(1, **shape, **options, **_C.cards()[card])
    chosen = {name: getattr(decision, name) for name in decision.__match_args__}
    chosen["predicted_us"] = f"{decision.predicted_us:.4g}"
    row = {"pass": direction, "card": card, **shape, "options": options, **chosen}
    return {name: str(x) for name, x in row.items()}


def choice_again(row: dict[str, str]) -> dict[str, str]:
    """What the dispatch decides now for a row's shape."""
    shape = {name: int(row[name]) for name in SHAPE}
    return choice(row["pass"], row["card"], shape, ast.literal_eval(row["options"]))


def recorded() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return [{name: x for name, x in row.items() if x} for row in csv.DictReader(file)]


if __name__ == "__main__":
    rows = [
        choice(direction, card, dict(zip(SHAPE, heads + lengths, strict=True)), more)
        for direction, options in OPTIONS.items()
        for card, heads, lengths, more in AllPairs([CARDS, HEADS, LENGTHS, options])
    ]
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")  # those of the forward are all fields
        writer.writeheader()
        writer.writerows(rows)
