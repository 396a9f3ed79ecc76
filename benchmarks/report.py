"""The tables of README.md and docs/, from the results in benchmarks/results.

    python benchmarks/report.py          # write them
    python benchmarks/report.py --check  # only compare; the exit status is 1 if a page differs

A page has a table between two lines, `<!-- report: NAME -->` and `<!-- end report -->`. NAME is a key of TABLES. The
results are h100.json and h200.json of all.py, wide_h100.json of its sections for wide keys, errors_h100.json of the
tests (--errors-json), context_parallelism_h100.json, generation_h100.json and prefill_h100.json, each also with h200,
and tests.json of the tests (--record). Each card that was measured has its columns. A figure that is in no file is "not
measured". In cells with the field `qkv` q, k and v are slices of one tensor, or contiguous in the variants that are
called so; cells without it are older, and had contiguous ones, which the line below their table says. The file is long
because it has a function for each table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from common import ON_CONTIGUOUS, geometric_mean, heads_of, parse_head_dims, parse_heads, parse_lengths

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
CARDS = {"h100": "H100", "h200": "H200"}
BEGIN, END = re.compile(r"^<!-- report: (\S+) -->$", re.MULTILINE), "<!-- end report -->"

LABELS = {
    "fla": "FLA",
    "flash_qla_jit": "FlashQLA",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "attn_gym": "attn-gym",
}
FORWARD_PEERS = ("fla", "flash_qla_jit", "flashinfer")
BACKWARD_PEERS = ("flash_qla_jit", "fla")
ENGINES = ("vllm", "sglang")

# Rows of the two tables of the forward; the summary has all cells.
README_ROWS = (
    "2x8 1x2048",
    "2x8 1x32768",
    "4x16 8192x4",
    "16x32 1x8192",
    "16x32 4096x8",
    "16x64 1x32768",
    "16x64 8192x4",
)
SPEED_ROWS = (
    *("2x8 1x2048", "2x8 1x8192", "2x8 1x32768", "2x8 4096x8", "2x8 1024x8"),
    *("4x16 1x8192", "4x16 1x32768", "4x16 8192x4", "8x32 1x8192", "8x32 4096x8"),
    *("16x32 1x8192", "16x32 1x32768", "16x32 4096x8", "16x32 1024x8"),
    *("16x64 1x2048", "16x64 1x32768", "16x64 8192x4", "16x64 1024x8", "16x48 1x32768", "16x48 28672+4096"),
)


@dataclasses.dataclass
class Card:
    """The results of one card: those of all.py, and the worst errors of the tests on it."""

    name: str
    environment: dict
    sections: dict[str, dict]
    worst_errors: dict | None = None

    def cells(self, section: str) -> list[dict]:
        return self.sections.get(section, {}).get("cells", [])

    def environment_of(self, section: str) -> dict:
        """The environment of a section; a section that was measured alone has its own."""
        return self.environment | self.sections.get(section, {}).get("environment", {})

    @property
    def bandwidth(self) -> float:
        return self.cells("ceilings")[0]["bandwidth"]


@dataclasses.dataclass
class Data:
    cards: list[Card]
    ranks: dict[str, dict]  # card -> results of context_parallelism.py
    tests: list[dict]
    generation: dict[str, dict] = dataclasses.field(default_factory=dict)  # card -> results of generation.py
    prefill: dict[str, dict] = dataclasses.field(default_factory=dict)  # card -> results of prefill.py

    def measured(self, *sections: str) -> list[Card]:
        return [card for card in self.cards if any(card.cells(section) for section in sections)]


def load(folder: Path) -> Data:
    def read(name: str):
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    cards = []
    for name, label in CARDS.items():
        found, errors = read(f"{name}.json"), read(f"errors_{name}.json")
        if found or errors:
            found = found or {"environment": {}, "sections": {}}
            wide = read(f"wide_{name}.json") or {"environment": {}, "sections": {}}
            alone = {x: section | {"environment": wide["environment"]} for x, section in wide["sections"].items()}
            cards.append(Card(label, found["environment"], found["sections"] | alone, errors))

    def of_cards(what: str) -> dict[str, dict]:
        found = {label: read(f"{what}_{name}.json") for name, label in CARDS.items()}
        return {label: x for label, x in found.items() if x}

    of_files = (of_cards(what) for what in ("generation", "prefill"))
    return Data(cards, of_cards("context_parallelism"), read("tests.json") or [], *of_files)


# Tables


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


Column = tuple[str, Callable[[object], str]]  # the header, and key -> text


def table(keys: dict[object, list[str]], key_header: list[str], cards: list[Card], columns: Callable) -> str:
    """One row for each key, with the columns of each card. `columns(card)` returns them, or none without results."""
    header, texts = list(key_header), []
    for card in cards:
        found = columns(card) or [("", lambda _, card=card: f"not measured on {card.name}")]
        header += [
            f"{card.name}{': ' if name and len(cards) > 1 else ''}{name}" if len(cards) > 1 else name
            for name, _ in found
        ]
        texts += [text for _, text in found]
    return markdown(header, [[*key_texts, *(text(key) for text in texts)] for key, key_texts in keys.items()])


def environment_line(cards: list[Card], *sections: str) -> str:
    """The card, driver and versions that the table comes from."""
    lines = []
    for card in cards:
        environment = {}
        versions: dict[str, str] = {}
        for section in sections:
            if card.cells(section):
                environment = environment or card.environment_of(section)
                for cell in card.cells(section):
                    if cell.get("package") in LABELS and "version" in cell:
                        versions[cell["package"]] = cell["version"]
        if not environment:
            continue
        parts = [f"driver {environment['driver']}", f"torch {environment['torch']}"]
        parts += [f"{label} {versions[package]}" for package, label in LABELS.items() if package in versions]
        parts += older_inputs({section: card.cells(section) for section in sections})
        lines.append(f"{card.name}: {', '.join(parts)}.")
    return wrapped(" ".join(lines))


# Sections whose cells have the field `qkv` -> what is timed there
PASSES = {
    **dict.fromkeys(("forward", "mixed", "options", "head_dims", "wide", "prefill", "dispatch"), "the forward"),
    **dict.fromkeys(("backward", "head_dims_step", "wide_step"), "the backward"),
}


def older_inputs(sections: dict[str, list[dict]]) -> list[str]:
    """That q, k and v were contiguous, if they were; and where, if other sections of the table have other inputs."""
    measured = {section for section, cells in sections.items() if cells}
    older = {x for x in measured & PASSES.keys() if any("qkv" not in cell for cell in sections[x])}
    where = "" if older == measured else f" in {' and '.join(ordered(PASSES[x] for x in sections if x in older))}"
    return [f"contiguous q, k and v{where}"] if older else []


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def number(x: float | None, style: str = ".2f") -> str:
    return "-" if x is None else f"{x:{style}}"


def mebibytes(x: int | None) -> str:
    return number(None if x is None else x / 2**20, ".0f")


def mean_of(ratios: list[float]) -> str:
    """The geometric mean, the least, and the number of values."""
    if not ratios:
        return "-"
    return f"{geometric_mean(ratios):.2f} (least {min(ratios):.2f}, n = {len(ratios)})"


def place(cell: dict) -> str:
    return f"{heads_of(cell)} {cell['sequences']}"


def ordered(keys: Iterable) -> list:
    return list(dict.fromkeys(keys))


def heads_and_sequences(cells: Iterable[dict], only: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    cells = sorted(cells, key=lambda cell: (parse_heads(cell["heads"]), cell.get("head_dims", "")))
    found = {place(cell): [heads_of(cell), cell["sequences"]] for cell in cells}
    return found if only is None else {key: found[key] for key in only if key in found}


# The forward

# A variant -> the same call on contiguous tensors
CONTIGUOUS_OF = {on_slices: variant for variant, on_slices in ON_CONTIGUOUS.items()}
FORWARD_MEANS = {
    "default": "low-level forward",
    "contiguous": "low-level forward, contiguous",
    "op": "op",
    "op_contiguous": "op, contiguous",
}


def forward_times(card: Card, section: str = "forward") -> dict[tuple[str, str], dict[str, dict]]:
    """(package, variant) -> place -> cell."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for cell in card.cells(section):
        if "ms" in cell and cell.get("gate", "bench") == "bench" and cell.get("timed", "forward") == "forward":
            found.setdefault((cell["package"], cell["variant"]), {})[place(cell)] = cell
    return found


def ratio(cells: dict[str, dict], ours: dict[str, dict], key: str, field: str = "ms") -> float | None:
    if key not in cells or key not in ours or not {field} <= cells[key].keys() & ours[key].keys():
        return None
    return cells[key][field] / ours[key][field]


def forward_columns(card: Card, variants: tuple[str, ...]) -> list[Column]:
    """Times of flash_qla's variants; what follows is of the first one: its time on contiguous tensors, the floor, the
    peers' ratios."""
    found = forward_times(card)
    first = found.get(("flash_qla", variants[0]))
    if not first:
        return []
    columns: list[Column] = []
    for variant in variants:
        ours = found.get(("flash_qla", variant), {})
        name = "ms" if len(variants) == 1 else "op, ms" if variant == "op" else "flash_qla, ms"
        columns.append((name, lambda key, ours=ours: number(ours.get(key, {}).get("ms"), ".3f")))
    contiguous = found.get(("flash_qla", CONTIGUOUS_OF[variants[0]]), {})
    columns.append(("contiguous, ms", lambda key: number(contiguous.get(key, {}).get("ms"), ".3f")))
    columns.append(
        ("of the floor", lambda key: f"{first[key]['floor_ms'] / first[key]['ms']:.0%}" if key in first else "-")
    )
    for peer in FORWARD_PEERS:
        if cells := found.get((peer, "default")):
            columns.append((LABELS[peer], lambda key, cells=cells: number(ratio(cells, first, key))))
    return columns


def readme_forward(data: Data) -> str:
    keys = heads_and_sequences([cell for card in data.cards for cell in card.cells("forward")], README_ROWS)
    header = ["q/k x v heads", "sequences"]
    body = table(keys, header, data.measured("forward"), lambda card: forward_columns(card, ("op",)))
    return f"{body}\n\n{environment_line(data.cards, 'forward')}"


def speed_forward(data: Data) -> str:
    keys = heads_and_sequences([cell for card in data.cards for cell in card.cells("forward")], SPEED_ROWS)
    header = ["q/k x v heads", "sequences"]
    body = table(keys, header, data.measured("forward"), lambda card: forward_columns(card, ("default", "op")))
    peers = [*(LABELS[peer] for peer in FORWARD_PEERS), "the fastest of them"]
    rows = []
    for card in data.measured("forward"):
        for variant, name in FORWARD_MEANS.items():
            ratios = forward_means(card, variant)
            if variant not in ON_CONTIGUOUS or any(ratios):
                rows.append([f"{card.name}: {name}", *map(mean_of, ratios)])
    means = markdown(["geometric mean", *peers], rows)
    return f"{body}\n\n{means}\n\n{environment_line(data.cards, 'forward')}"


def forward_means(card: Card, variant: str) -> list[list[float]]:
    """The ratios of each peer, then of the fastest one where all were measured. Contiguous tensors are compared with
    contiguous ones."""
    found = forward_times(card)
    ours = found.get(("flash_qla", variant), {})
    peer_variant = "contiguous" if variant in ON_CONTIGUOUS else "default"
    of_peers = [found.get((peer, peer_variant), {}) for peer in FORWARD_PEERS]
    ratios = [{key: ratio(cells, ours, key) for key in ours if key in cells} for cells in of_peers]
    measured = [x for x in ratios if x]
    best = [min(x[key] for x in measured) for key in ours if measured and all(key in x for x in measured)]
    return [*(list(x.values()) for x in ratios), best]


def mixed(data: Data) -> str:
    keys = heads_and_sequences(cell for card in data.cards for cell in card.cells("mixed"))

    def columns(card: Card) -> list[Column]:
        found = forward_times(card, "mixed")
        op, peer = found.get(("flash_qla", "op"), {}), found.get(("flashinfer", "default"), {})
        ms = ("op, ms", lambda key: number(op.get(key, {}).get("ms"), ".3f"))
        return [ms, ("FlashInfer", lambda key: number(ratio(peer, op, key)))] if op else []

    return sections_table(data, keys, ["q/k x v heads", "sequences"], columns, "mixed")


def sections_table(data: Data, keys: dict, header: list[str], columns: Callable, *sections: str) -> str:
    """A table and the line below it; a sentence if there are no results."""
    if not data.measured(*sections):
        cards = " and ".join(card.name for card in data.cards) or "any card"
        return f"Not measured on {cards}."
    return f"{table(keys, header, data.cards, columns)}\n\n{environment_line(data.cards, *sections)}"


OPTIONS = {
    "l2norm": "l2norm inside",
    "fp16": "fp16",
    "v_first": "V-first states",
    "output_h": "`output_h`",
    "nocp": "`auto_cp=False`",
    "unknown": "without `max_seqlen`",
}


def options_table(data: Data) -> str:
    def columns(card: Card) -> list[Column]:
        found = forward_times(card, "options")
        default = found.get(("flash_qla", "default"), {})

        def ratios(variant: str) -> list[float]:
            cells = found.get(("flash_qla", variant), {})
            return [ratio(cells, default, key) for key in cells if key in default]

        if not default:
            return []
        return [
            ("geometric mean", lambda key: number(geometric_mean(ratios(key)) if ratios(key) else None)),
            ("at most", lambda key: number(max(ratios(key), default=None))),
        ]

    keys = {variant: [text] for variant, text in OPTIONS.items()}
    return sections_table(data, keys, ["option"], columns, "options")


# The backward and the step


def by_package(card: Card, *sections: str, variant: str = "default") -> dict[str, dict[str, dict]]:
    """package -> place -> the fields of its cells."""
    found: dict[str, dict[str, dict]] = {}
    cells = [cell for section in sections for cell in card.cells(section)]
    for cell in (cell for cell in cells if cell.get("variant", "default") == variant):
        found.setdefault(cell["package"], {}).setdefault(place(cell), {}).update(cell)
    return found


def time_columns(card: Card, section: str, field: str, floor: str | None) -> list[Column]:
    found = by_package(card, section)
    ours = found.get("flash_qla", {})
    if not any(field in cell for cell in ours.values()):
        return []
    contiguous = by_package(card, section, variant="contiguous").get("flash_qla", {})
    columns: list[Column] = [
        (name, lambda key, x=cells: number(x.get(key, {}).get(field), ".3f"))
        for name, cells in (("ms", ours), ("contiguous, ms", contiguous))
    ]
    if floor:
        columns.append(
            ("of the floor", lambda key: f"{ours[key][floor] / ours[key][field]:.0%}" if key in ours else "-")
        )
    for peer in BACKWARD_PEERS:
        if peer in found:
            cells = found[peer]
            columns.append((LABELS[peer], lambda key, cells=cells: number(ratio(cells, ours, key, field))))
    return columns


def means_of(card: Card, section: str, field: str, peer: str, variant: str = "default") -> list[float]:
    found = by_package(card, section, variant=variant)
    ours, cells = found.get("flash_qla", {}), found.get(peer, {})
    return [x for key in ours if (x := ratio(cells, ours, key, field)) is not None]


def backward(data: Data) -> str:
    keys = heads_and_sequences(cell for card in data.cards for cell in card.cells("backward"))
    header, parts = ["q/k x v heads", "sequences"], []
    if not data.measured("backward"):
        return sections_table(data, keys, header, lambda card: [], "backward")
    for title, field, floor in (("backward", "backward_ms", "backward_floor_ms"), ("step", "step_ms", None)):
        parts.append(f"The {title}:" if title == "backward" else "The training step:")
        parts.append(
            table(keys, header, data.cards, lambda card, x=field, y=floor: time_columns(card, "backward", x, y))
        )
    rows = []
    calls, variants = {"backward": "backward_ms", "step": "step_ms"}, {"default": "", "contiguous": ", contiguous"}
    for card, call, variant in itertools.product(data.measured("backward"), calls, variants):
        ratios = [means_of(card, "backward", calls[call], peer, variant) for peer in BACKWARD_PEERS]
        if variant == "default" or any(ratios):
            rows.append([f"{card.name}: {call}{variants[variant]}", *map(mean_of, ratios)])
    parts.append(markdown(["geometric mean", *(LABELS[peer] for peer in BACKWARD_PEERS)], rows))
    return "\n\n".join([*parts, environment_line(data.cards, "backward")])


def head_dims(data: Data) -> str:
    sections = ("head_dims", "head_dims_step")
    keys = heads_and_sequences(cell for card in data.cards for section in sections for cell in card.cells(section))

    def columns(card: Card) -> list[Column]:
        forward, step = by_package(card, "head_dims"), by_package(card, "head_dims_step")
        found: list[Column] = []
        for cells, field, name in (
            (forward, "ms", "forward"),
            (step, "backward_ms", "backward"),
            (step, "step_ms", "step"),
        ):
            ours, fla = cells.get("flash_qla", {}), cells.get("fla", {})
            if ours:
                found.append((f"{name}, ms", lambda key, x=ours, f=field: number(x.get(key, {}).get(f), ".3f")))
                found.append(("FLA", lambda key, x=fla, y=ours, f=field: number(ratio(x, y, key, f))))
        return found

    return sections_table(data, keys, ["heads of K x V", "sequences"], columns, *sections)


# Wide keys: more than 128 channels


def wide(data: Data) -> str:
    """The passes, then decoding, both beside FLA."""
    sections = ("wide", "wide_step", "wide_decode")
    if not data.measured(*sections):
        return sections_table(data, {}, [], lambda card: [], *sections)
    keys = heads_and_sequences(cell for card in data.cards for section in sections[:2] for cell in card.cells(section))
    passes = (
        ("forward", "ms", "floor_ms"),
        ("backward", "backward_ms", "backward_floor_ms"),
        ("step", "step_ms", None),
    )

    def columns(card: Card) -> list[Column]:
        forward = forward_times(card, "wide")
        ours = by_package(card, "wide_step").get("flash_qla", {})
        fla = by_package(card, "wide_step").get("fla", {})
        of_pass = {
            "forward": (forward.get(("flash_qla", "default"), {}), forward.get(("fla", "default"), {})),
            "backward": (ours, fla),
            "step": (ours, fla),
        }
        found: list[Column] = []
        for name, field, floor in passes:
            times, peer = of_pass[name]
            if not times:
                continue
            found.append((f"{name}, ms", lambda key, x=times, f=field: number(x.get(key, {}).get(f), ".3f")))
            if floor:
                found.append(("of the floor", lambda key, x=times, f=field, g=floor: part(x.get(key, {}), g, f)))
            found.append(("FLA", lambda key, x=peer, y=times, f=field: number(ratio(x, y, key, f))))
        return found

    cards = data.measured(*sections)
    batches = {
        (heads_of(cell), cell["batch"]): [heads_of(cell), str(cell["batch"])]
        for card in cards
        for cell in sorted(card.cells("wide_decode"), key=lambda cell: (parse_heads(cell["heads"]), cell["batch"]))
    }

    def of_batch(card: Card) -> list[Column]:
        return us_columns(card, "wide_decode", lambda pair: (*pair, "plain", "fp32"), {"FLA": ("fla",)})

    header = ["heads of K x V", "sequences"]
    parts = [text for card in cards for text in (f"{card.name}:", table(keys, header, [card], columns))]
    parts += ["Decoding:", table(batches, header, cards, of_batch)]
    return "\n\n".join([*parts, environment_line(cards, *sections)])


def part(cell: dict, floor: str, field: str) -> str:
    return f"{cell[floor] / cell[field]:.0%}" if field in cell else "-"


# Memory


def memory(data: Data) -> str:
    """The workspace over the bytes of v, and the bytes of a step."""
    keys = heads_and_sequences(cell for card in data.cards for cell in card.cells("backward"))
    sentences = []
    for card in data.cards:
        for section, field, name in (
            ("forward", "workspace_bytes", "forward"),
            ("backward", "backward_workspace_bytes", "backward"),
        ):
            found = []
            for cell in card.cells(section):
                if cell["package"] == "flash_qla" and cell.get("variant", "default") == "default" and field in cell:
                    found.append(cell[field] / bytes_of_v(cell))
            text = f"{min(found):.2f} to {max(found):.2f} times the bytes of v" if found else "not measured"
            sentences.append([f"{card.name}: {name}", text])

    def columns(card: Card) -> list[Column]:
        found = by_package(card, "backward")
        ours = found.get("flash_qla", {})
        if not any("saved_bytes" in cell for cell in ours.values()):
            return []
        columns: list[Column] = []
        for field, name in (("saved_bytes", "saved, MiB"), ("extra_bytes", "peak, MiB")):
            for package, title in (("flash_qla", name), *((peer, LABELS[peer]) for peer in BACKWARD_PEERS)):
                cells = found.get(package, {})
                columns.append((title, lambda key, x=cells, f=field: mebibytes(x.get(key, {}).get(f))))
        return columns

    body = markdown(["pass", "workspace of a call"], sentences)
    return f"{body}\n\n{sections_table(data, keys, ['q/k x v heads', 'sequences'], columns, 'backward')}"


def bytes_of_v(cell: dict) -> int:
    [(_, H_v)] = parse_heads(cell["heads"])
    _, V = parse_head_dims(cell.get("head_dims", "128x128"))
    return 2 * V * H_v * sum(parse_lengths(cell["sequences"]))


# Host time

CALLS = {
    "torch.ops chunk_gated_delta_rule": "op through `torch.ops`",
    "flash_qla.chunk_gated_delta_rule": "Python function",
    "torch.ops chunk_gated_delta_rule_fwd": "`chunk_gated_delta_rule_fwd`",
    "step of flash_qla.chunk_gated_delta_rule, l2norm": "training step",
    "torch.add": "`torch.add` of two small tensors",
    "step of x + 1": "training step of x + 1",
    "import_ms": "importing the package",
    "first_call_ms": "first call of a process",
}


def host(data: Data) -> str:
    def columns(card: Card) -> list[Column]:
        found = {(cell["mode"], cell["call"]): cell for cell in card.cells("host")}

        def text(call: str, *modes: str) -> str:
            cell = next((found[mode, call] for mode in modes if (mode, call) in found), None)
            if cell is None:
                return "-"
            return f"{cell['us']:.1f} us" if "us" in cell else f"{cell['ms']:.1f} ms"

        without = ("CPU time", lambda call: text(call, "no_grad", "step", "process"))
        return [without, ("`inference_mode`", lambda call: text(call, "inference_mode"))] if found else []

    keys = {call: [text] for call, text in CALLS.items()}
    return sections_table(data, keys, ["call"], columns, "host")


# Decoding


def decode_cells(card: Card, section: str) -> dict[tuple, dict[str, dict]]:
    """Key -> package -> its fastest function's cell."""
    found: dict[tuple, dict[str, dict]] = {}
    for cell in card.cells(section):
        key = (heads_of(cell), cell["batch"], cell["keep"], cell["state_dtype"])
        best = found.setdefault(key, {})
        if cell["package"] not in best or cell["us"] < best[cell["package"]]["us"]:
            best[cell["package"]] = cell
    return found


def us_columns(card: Card, section: str, key_of: Callable, peers: dict[str, tuple[str, ...]]) -> list[Column]:
    found = decode_cells(card, section)

    def ours(key) -> dict | None:
        return found.get(key_of(key), {}).get("flash_qla")

    def over(key, packages: tuple[str, ...]) -> float | None:
        of_key = found.get(key_of(key), {})
        times = [of_key[package]["us"] for package in packages if package in of_key]
        return min(times) / ours(key)["us"] if times and ours(key) else None

    def copied(key) -> str:
        cell = ours(key)
        return f"{cell['bytes'] / cell['us'] * 1e6 / card.bandwidth:.0%}" if cell else "-"

    if not found:
        return []
    columns: list[Column] = [
        ("us", lambda key: number(ours(key)["us"] if ours(key) else None, ".1f")),
        ("of the copy", copied),
    ]
    return columns + [(name, lambda key, x=packages: number(over(key, x))) for name, packages in peers.items()]


DECODE_ROWS = (1, 8, 64, 256)  # sequences; the means have all cells
DECODE_PEERS = {"engines": ENGINES, "attn-gym": ("attn_gym",)}
# Caption, section, kept states, their dtype, peers
DECODE_TABLES = (
    ("States in fp32:", "decode", "last", "fp32", DECODE_PEERS),
    ("States in bf16:", "decode", "last", "bf16", DECODE_PEERS),
    ("Without a pool, states in fp32 and ready gates:", "plain", "plain", "fp32", {"FLA": ("fla",)}),
)


def decode(data: Data) -> str:
    if not data.measured("decode", "drafts"):
        return sections_table(data, {}, [], lambda card: [], "decode")
    parts = []
    for caption, section, keep, dtype, peers in DECODE_TABLES:
        cells = [cell for card in data.cards for cell in card.cells(section)]
        keys = {(cell["heads"], cell["batch"]) for cell in cells if cell["batch"] in DECODE_ROWS}
        texts = {key: [key[0], str(key[1])] for key in sorted(keys, key=lambda key: (parse_heads(key[0]), key[1]))}

        def columns(card: Card, section=section, kind=(keep, dtype), peers=peers) -> list[Column]:
            return us_columns(card, section, lambda pair: (*pair, *kind), peers)

        if texts:
            parts += [caption, table(texts, ["q/k x v heads", "sequences"], data.cards, columns)]
    rows = [
        [
            f"{card.name}: {dtype}",
            *(mean_of(decode_ratios(card, dtype, packages)) for packages in DECODE_PEERS.values()),
        ]
        for card in data.measured("decode")
        for dtype in ("fp32", "bf16")
    ]
    parts.append(markdown(["geometric mean", *DECODE_PEERS], rows))
    drafts = ordered(
        (cell["heads"], cell["batch"], cell["keep"], cell["state_dtype"])
        for card in data.cards
        for cell in card.cells("drafts")
        if cell["package"] == "flash_qla"
    )
    texts = {key: [key[2], key[3], str(key[1])] for key in drafts}
    header = ["states kept", "in", "sequences"]
    peers = {"SGLang": ("sglang",), "vLLM": ("vllm",)}
    parts += [
        "Four tokens a sequence, 16x32 heads:",
        table(texts, header, data.cards, lambda card: us_columns(card, "drafts", lambda key: key, peers)),
    ]
    return "\n\n".join([*parts, environment_line(data.cards, "decode", "plain", "drafts")])


def decode_ratios(card: Card, dtype: str, packages: tuple[str, ...]) -> list[float]:
    found = [
        of_key for key, of_key in decode_cells(card, "decode").items() if key[3] == dtype and "flash_qla" in of_key
    ]
    times = [(of_key["flash_qla"]["us"], [of_key[x]["us"] for x in packages if x in of_key]) for of_key in found]
    return [min(peers) / us for us, peers in times if peers]


# Prefill

WAYS = {
    "gathered": "gathered",
    "pool": "in the pool",
    "checkpoints": "with checkpoints",
    "invariant": "batch_invariant",
}


def prefill(data: Data) -> str:
    def key_of(cell: dict) -> tuple[str, str]:
        return place(cell), cell["state_dtype"]

    def of_package(card: Card, package: str) -> dict[tuple[str, str], dict]:
        cells = card.cells("prefill")
        return {key_of(cell): cell["ms"] for cell in cells if cell.get("package", "flash_qla") == package}

    keys = {
        key_of(cell): [heads_of(cell), cell["sequences"], cell["state_dtype"]]
        for card in data.cards
        for cell in card.cells("prefill")
    }

    def columns(card: Card) -> list[Column]:
        found, peer = of_package(card, "flash_qla"), of_package(card, "flashinfer")

        def over(key, way: str) -> float | None:
            ms = found.get(key, {})
            return ms[way] / ms["op"] if way in ms else None

        if not found:
            return []
        op = ("op, ms", lambda key: number(found.get(key, {}).get("op"), ".3f"))
        ways = [(name, lambda key, way=way: number(over(key, way))) for way, name in WAYS.items()]

        def faster_peer(key) -> float | None:
            """FlashInfer's faster way over the pool."""
            return min(peer[key].values()) / found[key]["pool"] if key in peer and key in found else None

        return [op, *ways, *([("FlashInfer", lambda key: number(faster_peer(key)))] if peer else [])]

    return sections_table(data, keys, ["q/k x v heads", "sequences", "states"], columns, "prefill")


def checkpoints(data: Data) -> str:
    """The price of checkpoints at other places, and of the same bits in any batch."""
    header = ["card", "q/k x v heads", "sequences", "states", "pool, ms"]
    ways = {"checkpoints": "every 256", "blocks": "every 528", "invariant": "batch_invariant", "resumable": "both"}
    header += [*ways.values(), "both over every 256"]
    rows, lines = [], []
    for card, results in data.prefill.items():
        for cell in results["cells"]:
            ms = cell["ms"]
            row = [card, heads_of(cell), cell["sequences"], cell["state_dtype"], number(ms["pool"], ".3f")]
            row += [number(ms[way] / ms["pool"]) for way in ways]
            rows.append([*row, number(ms["resumable"] / ms["checkpoints"])])
        environment = results["environment"]
        inputs = older_inputs({"prefill": results["cells"]})
        parts = [f"driver {environment['driver']}", f"torch {environment['torch']}", *inputs]
        lines.append(f"{card}: {', '.join(parts)}.")
    return "\n\n".join([markdown(header, rows), wrapped(" ".join(lines))]) if rows else "Not measured on any card."


# Context parallelism


def context_parallelism(data: Data) -> str:
    """One GPU and several of one host."""
    if not data.ranks:
        return "Not measured on any card."
    header = ["card", "q/k x v heads", "tokens", "GPUs"]
    for what in ("forward", "step"):
        header += [f"{what}, ms: one GPU", "several", "times one", "growing"]
    rows, lines = [], []
    for card, results in data.ranks.items():
        cells = [cell for cell in results["cells"] if "ranks" in cell and cell["package"] == "flash_qla"]
        one = {(heads_of(cell), cell["sequences"]): cell for cell in cells if cell["ranks"] == 1}
        weak = {(heads_of(cell), cell["sequences"], cell["ranks"]): cell for cell in cells if cell["scaling"] == "weak"}
        for cell in (cell for cell in cells if cell["ranks"] > 1 and cell["scaling"] == "strong"):
            key = heads_of(cell), cell["sequences"]
            row = [card, heads_of(cell), str(cell["tokens"]), str(cell["ranks"])]
            for field in ("forward_ms", "step_ms"):
                alone = one.get(key, {}).get(field)
                grown = weak.get((*key, cell["ranks"]), {}).get(field)
                row += [number(alone), number(cell[field]), number(alone / cell[field] if alone else None)]
                row.append(number(alone * cell["ranks"] / grown if alone and grown else None))
            rows.append(row)
        environment = results["environment"]
        lines.append(f"{card}: driver {environment['driver']}, torch {environment['torch']}.")
    note = '"growing": as many tokens on each GPU as one GPU has alone.'
    return f"{markdown(header, rows)}\n\n{wrapped(' '.join([note, *lines]))}"


# Accuracy

TENSORS = {
    "o": "o",
    "final_state": "final state",
    "h": "h",
    "A": "A",
    **{name: name for name in ("dq", "dk", "dv", "db", "dg", "dh0")},
}


def accuracy(data: Data) -> str:
    """The largest errors of the tests, then the largest errors of the comparison with FLA."""
    rows, lines = [], []
    for card in data.cards:
        if card.worst_errors is None:
            rows.append([f"{card.name}: not measured", *["-"] * len(TENSORS)])
            continue
        worst: dict[tuple[str, str], float] = {}
        for row in card.worst_errors["worst"]:
            if row["device"] == "cuda":
                key = row.get("q_dtype", row["dtype"]), row["tensor"]
                worst[key] = max(row["error"], worst.get(key, 0.0))
        for dtype in ("bfloat16", "float16"):
            errors = [number(worst.get((dtype, tensor)), ".1e") for tensor in TENSORS]
            rows.append([f"{card.name}: {dtype}", *errors])
        environment = card.worst_errors
        lines.append(f"{card.name}: {environment['gpu'].split(', ')[0]}, torch {environment['torch']}.")
    parts = [markdown(["GPU tests", *TENSORS.values()], rows), wrapped(" ".join(lines))]
    tensors = [tensor for tensor in TENSORS if tensor not in ("h", "A")]
    rows = []
    for card in data.cards:
        found: dict[str, dict[str, dict]] = {}
        for cell in card.cells("accuracy"):
            if "errors" in cell:
                found.setdefault(cell["package"], {})[cell["case"]] = cell["errors"]
        if "flash_qla" not in found:
            rows.append([f"not measured on {card.name}", *["-"] * len(tensors)])
        for package, cases in found.items():
            asked = set(cases) & set(found.get("fla", cases)) & set(found.get("flash_qla", cases))
            largest = [
                max((cases[case][tensor] for case in asked if tensor != "dg" or "underflow" not in case), default=None)
                for tensor in tensors
            ]
            rows.append([f"{card.name}: {LABELS.get(package, package)}", *(number(x, ".1e") for x in largest)])
    parts.append(markdown(["the same inputs", *(TENSORS[tensor] for tensor in tensors)], rows))
    return "\n\n".join([*parts, environment_line(data.cards, "accuracy")]).strip()


# Summary of the README


def summary(data: Data) -> str:
    """Geometric means of the peers' times over flash_qla's."""
    columns = [*FORWARD_PEERS, "engines", "attn_gym"]
    rows = []
    for card in data.cards:
        forward = dict(zip(FORWARD_PEERS, forward_means(card, "op"), strict=False))
        passes = {
            name: {peer: means_of(card, "backward", field, peer) for peer in BACKWARD_PEERS}
            for name, field in (("backward", "backward_ms"), ("training step", "step_ms"))
        }
        decoding = {
            f"decoding, {dtype} states": {
                "engines": decode_ratios(card, dtype, ENGINES),
                "attn_gym": decode_ratios(card, dtype, ("attn_gym",)),
            }
            for dtype in ("fp32", "bf16")
        }
        for name, found in ({"forward": forward} | passes | decoding).items():
            texts = [f"{geometric_mean(found[x]):.2f}" if found.get(x) else "-" for x in columns]
            rows.append([f"{card.name}: {name}", *texts])
    labels = LABELS | {"engines": "the faster of vLLM and SGLang"}
    header = ["their time over flash_qla's, geometric mean", *(labels[x] for x in columns)]
    return f"{markdown(header, rows)}\n\n{environment_line(data.cards, 'forward', 'backward', 'decode')}"


def dispatch(data: Data) -> str:
    """How far the chosen mode is from the fastest."""
    import dispatch as modes

    def columns(card: Card) -> list[Column]:
        found: dict[str, list[dict]] = {}
        for cell in card.cells("dispatch"):
            found.setdefault(place(cell), []).append(cell)

        def over(key) -> float | None:
            chosen = [cell for cell in found.get(key, []) if cell["chosen"]]
            if not chosen:
                return None
            times = {}
            for cell in found[key]:
                times[modes.name(cell)] = min(cell["ms"], times.get(modes.name(cell), cell["ms"]))
            return times[modes.name(chosen[0])] / min(times.values())

        return [("chosen over fastest", lambda key: number(over(key), ".3f"))] if found else []

    keys = heads_and_sequences(cell for card in data.cards for cell in card.cells("dispatch"))
    return sections_table(data, keys, ["q/k x v heads", "sequences"], columns, "dispatch")


# Text generation


def engines(data: Data) -> str:
    """Prompt and new tokens a second of engines."""
    return generation(data, ("prefill", "decode"), new_tokens_only=False)


def transformers(data: Data) -> str:
    """New tokens a second of generate()."""
    return generation(data, ("batch 1", "batch 16"), new_tokens_only=True)


def generation(data: Data, loads: tuple[str, ...], new_tokens_only: bool) -> str:
    about = {"engine": "engine", "architecture": "model", "states": "states", "feature": "feature"}
    if new_tokens_only:
        del about["states"]  # their dtype is the model's
    header = ["card", *about.values(), "same tokens", "margins up to", "one at a time"]
    header += [text for load in loads for text in (f"{load}: own, tokens/s", "flash_qla", "times")]
    rows, lines, spreads = [], [], []
    for card, results in data.generation.items():
        cells = [cell for cell in results["cells"] if loads[0] in cell]
        for cell in cells:
            agreement, alone = cell["agreement"], cell["yardstick"]["margins"]
            row = [card, *(cell[name] for name in about)]
            row += [f"{agreement['same']} of {agreement['of']}"]
            row += [f"{margins[-1]:.3g}" if margins else "-" for margins in (agreement["margins"], alone)]
            for load in loads:
                sizes = cell[load]["load"]
                part = 1.0
                if new_tokens_only:
                    part = sizes["new_tokens"] / (sizes["new_tokens"] + sizes["prompt_tokens"])
                own, ours = (statistics.median(cell[load][x]["tokens_per_s"]) * part for x in ("own", "flash_qla"))
                row += [f"{own:,.0f}", f"{ours:,.0f}", f"{ours / own:.2f}"]
            rows.append(row)
        environments = [cell.get("environment", results["environment"]) for cell in cells]
        lines += dict.fromkeys(f"{card}: driver {x['driver']}, torch {x['torch']}." for x in environments)
        spreads += [spread(cell[load]) for cell in cells for load in loads]
    if spreads:
        lines.append(f"Rates are medians; a process's fastest sample is up to {max(spreads):.2f} times its slowest.")
    return "\n\n".join([markdown(header, rows), wrapped(" ".join(lines))]) if rows else "Not measured on any card."


def spread(both: dict) -> float:
    """The fastest sample of a process over its slowest, of the process where they differ most."""
    return max(both[x]["tokens_per_s"][-1] / both[x]["tokens_per_s"][0] for x in ("own", "flash_qla"))


# Tests


def tested(data: Data) -> str:
    """Each campaign's latest record."""
    latest = {(record["what"], record["gpu"] or "CPU"): record for record in data.tests}
    header = ["tests", "card", "driver", "torch", "Python", "result"]
    rows, failures = [], []
    for record in latest.values():
        counts = [f"{record[name]:,} {name}" for name in ("passed", "skipped", "failed") if record.get(name)]
        card = card_text(record)
        names = (record["what"], card, record.get("driver") or "-", record["torch"], record["python"])
        rows.append([*names, ", ".join(counts) or "none ran"])
        failures += [f"- Failed on {card}: `{name}`" for name in record.get("failures", [])]
    return "\n\n".join(filter(None, [markdown(header, rows), "\n".join(failures)]))


def card_text(record: dict) -> str:
    if not record["gpu"]:
        return "CPU"
    name = next((label for key, label in CARDS.items() if key in record["gpu"].lower()), record["gpu"])
    return name if record.get("gpus", 1) < 2 else f"{record['gpus']} x {name}"


TABLES: dict[str, Callable[[Data], str]] = {
    "forward": speed_forward,
    "summary": summary,
    "options": options_table,
    "mixed": mixed,
    "host": host,
    "backward": backward,
    "head_dims": head_dims,
    "wide": wide,
    "decode": decode,
    "prefill": prefill,
    "checkpoints": checkpoints,
    "context_parallelism": context_parallelism,
    "memory": memory,
    "dispatch": dispatch,
    "accuracy": accuracy,
    "engines": engines,
    "transformers": transformers,
    "tested": tested,
}
README_TABLES = TABLES | {"forward": readme_forward}


# Pages


def filled(text: str, tables: dict[str, Callable], data: Data) -> str:
    """The page with its tables. A name that is not in `tables`, or a beginning without an end, is an error."""
    parts, position = [], 0
    for begin in BEGIN.finditer(text):
        if begin[1] not in tables:
            raise ValueError(f"report is {begin[1]!r}, expected one of {', '.join(tables)}")
        end = text.find(END, begin.end())
        if end < 0 or BEGIN.search(text, begin.end(), end):
            raise ValueError(f"{begin[0]} has no {END}")
        parts += [text[position : begin.end()], f"\n\n{tables[begin[1]](data)}\n\n"]
        position = end
    return "".join([*parts, text[position:]])


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check, data, differ = parser.parse_args().check, load(RESULTS), []
    for page in pages():
        text = page.read_text()
        new = filled(text, README_TABLES if page.name == "README.md" else TABLES, data)
        if new != text:
            differ.append(page)
            if not check:
                page.write_text(new)
    for page in differ:
        print(f"{page.relative_to(ROOT)} {'differs from the results' if check else 'written'}")
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
