"""The tables of README.md and docs/, and docs/overview.svg, from the results in benchmarks/results.

    python benchmarks/report.py

A page has a table between two lines, `<!-- report: NAME -->` and `<!-- end report -->`. NAME is a key of TABLES. The
results are h100.json of all.py, wide_h100.json of its sections for wide keys, context_parallelism_h100.json,
generation_h100.json, decode_steps_h100.json and train_h100.json of examples/train.py, each also with h200. A figure
that is in no file is "-". In cells with the field `qkv` q, k and v are slices of one tensor, or contiguous in the
variants that are called so; cells without it are older, and had contiguous ones, which the line below their table says.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import context_parallelism
from common import geometric_mean, heads_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
FIGURE = ROOT / "docs/overview.svg"
CARDS = ("H100", "H200")
FILES = ("", "wide_", "context_parallelism_", "generation_", "decode_steps_")
TABLE = re.compile(r"^<!-- report: (\S+) -->$.*?^<!-- end report -->$", re.MULTILINE | re.DOTALL)
PACKAGES = {
    "fla": "FLA",
    "flash_qla_jit": "FlashQLA",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "attn_gym": "attn-gym",
    "transformers": "transformers",
}


@dataclasses.dataclass
class Call:
    """Cells of a section: flash_qla's are those whose fields are `ours`, and `theirs` has what to compare them with."""

    section: str
    ours: dict
    theirs: dict[str, dict]  # name -> fields; a list has the values that a field may have
    field: str = "ms"
    floor: str = ""


def compared(section: str, packages: str, field="ms", floor="", ours="default", theirs="default") -> Call:
    """flash_qla in one variant, and other packages in another."""
    others = {PACKAGES[name]: {"package": name, "variant": theirs} for name in packages.split()}
    return Call(section, {"package": "flash_qla", "variant": ours}, others, field, floor)


def decoding(section: str, packages: str, **fields) -> Call:
    """'a/b' is the faster of both."""
    names = {"/".join(PACKAGES[x] for x in text.split("/")): text.split("/") for text in packages.split()}
    others = {name: {"package": of_name, **fields} for name, of_name in names.items()}
    return Call(section, {"package": "flash_qla", **fields}, others, "us", "copy_us")


def region(field: str) -> Call:
    ours, theirs = ({"package": package, "part": "region"} for package in ("flash_qla", "fla"))
    return Call("region", ours, {"FLA": theirs}, field)


def prefill(way: str, others: dict[str, str]) -> Call:
    """Ways of prefill.py, all of flash_qla's."""
    ways = {name: {"package": "flash_qla", "way": x} for name, x in others.items()}
    return Call("prefill", {"package": "flash_qla", "way": way}, ways)


def layers(field: str) -> Call:
    ours = {"package": "flash_qla", "function": "region"}
    return Call("layers", ours, {"FLA": {"package": "fla"}}, field)


def text_by(engine: str) -> Call:
    sides = [{"package": package, "engine": engine} for package in ("flash_qla", "own")]
    return Call("generation", sides[0], {"its own kernels": sides[1]})


CALLS = {
    "forward": compared("forward", "fla flash_qla_jit flashinfer", "ms", "floor_ms", "op"),
    "forward, contiguous": compared(
        "forward", "fla flash_qla_jit flashinfer", ours="op_contiguous", theirs="contiguous"
    ),
    "low-level forward": compared("forward", "fla flash_qla_jit flashinfer", "ms", "floor_ms"),
    "low-level forward, contiguous": compared(
        "forward", "fla flash_qla_jit flashinfer", ours="contiguous", theirs="contiguous"
    ),
    "backward": compared("backward", "fla flash_qla_jit", "backward_ms", "backward_floor_ms"),
    "training step": compared("backward", "fla flash_qla_jit", "step_ms"),
    "step, contiguous": compared("backward", "fla flash_qla_jit", "step_ms", ours="contiguous", theirs="contiguous"),
    "memory of a step": compared("backward", "fla flash_qla_jit", "extra_bytes"),
    "region: forward": region("forward_us"),
    "region: training step": region("step_us"),
    "K = 256: forward": compared("wide", "fla", "ms", "floor_ms"),
    "K = 256: training step": compared("wide_step", "fla", "step_ms"),
    "decoding, fp32 states": decoding("decode", "vllm/sglang attn_gym", state_dtype="fp32"),
    "decoding, bf16 states": decoding("decode", "vllm/sglang attn_gym", state_dtype="bf16"),
    "decoding without a pool": decoding("plain", "fla"),
    "decoding four tokens": decoding("drafts", "vllm/sglang"),
    "decoding a layer's token": Call(
        "decode_region", {"package": "flash_qla", "function": "region"}, {"FLA": {"package": "fla"}}, "us", "floor"
    ),
    "portable kernels: forward": compared("portable", "fla", "ms", "floor_ms", "op"),
    "portable kernels: backward": compared("portable_step", "fla", "backward_ms", "backward_floor_ms"),
    "portable kernels: training step": compared("portable_step", "fla", "step_ms"),
    "portable kernels: decoding": Call(
        "portable_decode",
        {"package": "flash_qla", "kernels": "portable"},
        {"Hopper's": {"package": "flash_qla", "kernels": None}},
        "us",
        "copy_us",
    ),
    "prefill on a pool": prefill("pool", {"the op between copies": "gathered"}),
    "prefill with checkpoints": prefill("checkpoints", {"without them": "pool"}),
    "prefill, `batch_invariant`": prefill("invariant", {"without it": "pool"}),
    "prefill with both": prefill("resumable", {"checkpoints alone": "checkpoints"}),
    "text by vLLM": text_by("vllm"),
    "text by SGLang": text_by("sglang"),
    "text by transformers": text_by("transformers"),
}
CALLS["prefill on a pool"].theirs["FlashInfer"] = {"package": "flashinfer"}
SPEED_CELLS = {
    "region: forward": "2x8 1x32768, 16x32 4096x8",
    "region: training step": "2x8 1x32768, 16x32 4096x8",
    "forward": "2x8 1x32768, 16x32 4096x8",
    "backward": "16x32 4096x8",
    "training step": "16x32 4096x8",
    "decoding, fp32 states": "16x32 1, 16x32 64",
    "decoding a layer's token": "16x32 1, 16x32 64",
}
OF_CALLS = [name for name in CALLS if CALLS[name].section != "generation"]
OVERVIEW = [
    *("region: forward", "region: training step", "forward", "backward", "training step"),
    *("K = 256: forward", "K = 256: training step"),
    *("decoding, fp32 states", "decoding, bf16 states", "prefill on a pool"),
]
# Rows of README's table, and its columns
FIRST = {
    "layer between its projections: forward": "region: forward",
    "layer between its projections: training step": "region: training step",
    "delta rule on slices: forward": "forward",
    "delta rule on slices: training step": "training step",
    "delta rule on contiguous tensors: forward": "forward, contiguous",
    "delta rule on contiguous tensors: training step": "step, contiguous",
}
FIRST_PACKAGES = ("FLA", "FlashQLA", "FlashInfer")
# What a user has -> the call that was measured, and what its cells are, by load
GAINS = {
    "transformers without FLA": (
        Call("train", {"package": "flash_qla"}, {"torch": {"package": "torch"}}, "step_ms"),
        {"": "training step of a small Qwen3-Next"},
    ),
    "transformers with FLA": (layers("step_ms"), {"": "training step of eight layers of a Qwen3.5"}),
    "transformers with FLA, prompts": (layers("prefill_ms"), {"": "prefill of these layers"}),
    "transformers' `generate()`": (
        CALLS["text by transformers"],
        {"batch 1": "one text", "batch 16": "16 texts"},
    ),
    "vLLM 0.33.0": (
        CALLS["text by vLLM"],
        {"prefill": "prompts of 2048 tokens", "decode": "64 requests decoding"},
    ),
    "SGLang 0.5.17": (
        CALLS["text by SGLang"],
        {"prefill": "prompts of 2048 tokens", "decode": "64 requests decoding"},
    ),
}
# Sections of calls whose q, k and v may be slices
TAKE_QKV = {"forward", "backward", "wide", "wide_step", "prefill"}


# Results


def load(folder: Path) -> dict[str, dict[str, dict]]:
    """Card -> section -> its environment and its cells, each with one figure in a field."""
    data: dict[str, dict[str, dict]] = {}
    for card in CARDS:
        for file in (f"{name}{card.lower()}.json" for name in FILES):
            if (folder / file).exists():
                results = json.loads((folder / file).read_text())
                sections = data.setdefault(card, {})
                for name, x in results.get("sections", {file.rpartition("_")[0]: results}).items():
                    environment = results["environment"] | x.get("environment", {})
                    sections.setdefault(name, {"environment": environment, "cells": list(flat(x["cells"], sections))})
        if (folder / f"train_{card.lower()}.json").exists():
            results = json.loads((folder / f"train_{card.lower()}.json").read_text())
            data.setdefault(card, {})["train"] = {"environment": results["versions"], "cells": trained(results)}
    return data


def trained(results: dict) -> list[dict]:
    """Cells of train.py: a step of each run."""
    runs = [(name, run) for name, run in results["runs"].items() if "seconds_per_step" in run]
    size = {"heads": "4x8", "sequences": "8x1024"}
    return [{"package": name, **size, "step_ms": 1e3 * run["seconds_per_step"]} for name, run in runs]


def flat(cells: list[dict], sections: dict[str, dict]) -> Iterator[dict]:
    """A cell of prefill.py has a time for each way, one of decode.py no floor."""
    for cell in cells:
        cell = {"variant": "default", **cell}
        if isinstance(cell.get("ms"), dict):
            yield from ({**cell, "way": way, "ms": ms} for way, ms in cell["ms"].items())
        elif "tokens_per_s" in cell:
            yield cell | {"ms": 1e3 / statistics.median(cell["tokens_per_s"])}
        elif "bytes" in cell:
            yield cell | {"copy_us": cell["bytes"] / sections["ceilings"]["cells"][0]["bandwidth"] * 1e6}
        elif cell.get("gate", "bench") == "bench":
            yield cell


def key_of(cell: dict) -> tuple[str, ...]:
    """What two cells that are compared have in common."""
    heads = heads_of(cell) if "heads" in cell else cell["architecture"]
    size = str(cell.get("sequences", cell.get("batch", cell.get("feature"))))
    return heads, size, *(cell.get(name, "") for name in ("state_dtype", "keep", "states", "load"))


def figures(sections: dict[str, dict], call: Call) -> dict[tuple[str, ...], tuple[dict, dict[str, float]]]:
    """Key -> flash_qla's cell, and the others' figures over its own. Of several functions the fastest one counts."""
    cells = [cell for cell in sections[call.section]["cells"] if call.field in cell] if call.section in sections else []

    def fastest(fields: dict) -> dict[tuple[str, ...], dict]:
        best_cells: dict[tuple[str, ...], dict] = {}
        for cell in cells:
            fits = all(cell.get(x) in (y if isinstance(y, list) else [y]) for x, y in fields.items())
            if fits and cell[call.field] < best_cells.get(key_of(cell), {call.field: float("inf")})[call.field]:
                best_cells[key_of(cell)] = cell
        return best_cells

    ours, theirs = fastest(call.ours), {name: fastest(fields) for name, fields in call.theirs.items()}
    return {
        key: (cell, {name: x[key][call.field] / cell[call.field] for name, x in theirs.items() if key in x})
        for key, cell in ours.items()
    }


# Tables


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def of_all_calls(data: dict) -> dict:
    """The cards that have results of all.py."""
    return {card: sections for card, sections in data.items() if "ceilings" in sections}


def with_environment(table: str, data: dict, calls: Iterable[str]) -> str:
    """The table, and the card, driver and versions that it comes from."""
    parts_of = {}
    for card, sections in data.items():
        used = {CALLS[name].section if name in CALLS else name for name in calls} & sections.keys()
        used_sections = [sections[name] for name in sections if name in used]
        machines = [x["environment"] for x in used_sections]
        drivers = dict.fromkeys(f"driver {x['driver']}, torch {x['torch']}" for x in machines)
        versions: dict[str, dict[str, str]] = {}
        for cell in (cell for x in used_sections for cell in x["cells"]):
            name = cell.get("engine", cell.get("package"))
            if name in PACKAGES and cell.get("version"):
                versions.setdefault(PACKAGES[name], {}).setdefault(cell["version"].split()[0], cell["version"])
        parts = [*drivers, *(f"{name} {' and '.join(x.values())}" for name, x in sorted(versions.items()))]
        older = [name for name in used & TAKE_QKV if any("qkv" not in cell for cell in sections[name]["cells"])]
        if older:
            where = "" if set(older) == used & TAKE_QKV else f" in the sections {', '.join(sorted(older))}"
            parts.append(f"contiguous q, k and v{where}")
        if used_sections:
            parts_of[card] = parts
    if not parts_of:
        return "Not measured on any card."
    first, *others = parts_of.values()
    common = [part for part in first if all(part in parts for parts in others)]
    lines = [f"{' and '.join(parts_of)}: {', '.join(common)}."] if common else []
    for card, parts in parts_of.items():
        if rest := [part for part in parts if part not in common]:
            lines.append(f"{card}{' also' if common else ''}: {', '.join(rest)}.")
    line = textwrap.fill(" ".join(lines), 120, break_long_words=False, break_on_hyphens=False)
    return f"{table}\n\n{line}"


def means(data: dict, calls: Iterable[str]) -> str:
    """For each card, geometric means of the others' figures over flash_qla's, the least one, and how many of the cells
    are below 1: a table of other packages, and one of flash_qla's calls compared with others of its own."""
    tables = []
    for card, sections in data.items():
        texts = {name: texts_of_others(figures(sections, CALLS[name])) for name in calls}
        packages = [x for x in (*PACKAGES.values(), "vLLM/SGLang") if any(x in row for row in texts.values())]
        rows = [[name, *(row.get(x, "-") for x in packages)] for name, row in texts.items() if {*packages} & {*row}]
        own = [[name, x, row[x]] for name, row in texts.items() for x in row if x not in packages]
        tables += [markdown(*x) for x in (([card, *packages], rows), ([card, "compared with", ""], own)) if x[1]]
    return "\n\n".join(tables)


def texts_of_others(compared: dict) -> dict[str, str]:
    names = dict.fromkeys(x for _, others in compared.values() for x in others)
    return {x: mean_of(ratios_of(compared, x)) for x in names}


def first(data: dict) -> str:
    """README's table, of the cards on which the region was measured."""
    tables = []
    for card, sections in ((card, sections) for card, sections in data.items() if "region" in sections):
        rows = []
        for label, name in FIRST.items():
            ratios = [ratios_of(figures(sections, CALLS[name]), other) for other in FIRST_PACKAGES]
            rows.append([label, *(f"{geometric_mean(x):.2f} ({min(x):.2f})" if x else "-" for x in ratios)])
        tables.append(with_environment(markdown([card, *FIRST_PACKAGES], rows), {card: sections}, FIRST.values()))
    return "\n\n".join(tables)


def ratios_of(compared: dict, other: str) -> list[float]:
    return [of_others[other] for _, of_others in compared.values() if other in of_others]


def mean_of(ratios: list[float]) -> str:
    below = sum(ratio < 1 for ratio in ratios)
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}; {below}/{len(ratios)})"


def gain(data: dict) -> str:
    """What users of other packages gain: the geometric mean, and the range."""
    rows = []
    for name, (call, loads) in GAINS.items():
        for card, sections in data.items():
            compared = figures(sections, call)
            for load, measured in loads.items():
                ratios = [x for key, (_, others) in compared.items() if key[-1] == load for x in others.values()]
                if ratios:
                    span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
                    rows.append([name, measured, card, f"{geometric_mean(ratios):.2f}{span}"])
    return markdown(["you have", "measured", "card", "times faster"], rows)


def cells(data: dict, rows: dict[str, str]) -> str:
    """A table for each card: flash_qla's figures, and the others' over its own, in the cells of each call:
    'HEADS SEQUENCES, ...'."""
    tables = []
    for card, sections in data.items():
        compared = {name: figures(sections, CALLS[name]) for name in rows}
        keys = [(name, *cell.split(" ")) for name, text in rows.items() for cell in text.split(", ")]
        lines = [[*key, *texts_of(CALLS[key[0]], compared[key[0]], key[1:])] for key in keys]
        lines = [line for line in lines if line[3] != "-"]
        tables.append(markdown(["call", "heads", "sequences", card, "of the floor", "others"], lines))
    return "\n\n".join(tables)


def texts_of(call: Call, compared: dict, heads_and_sequences: tuple[str, ...]) -> list[str]:
    cell, others = next((x for key, x in compared.items() if key[:2] == heads_and_sequences), ({}, {}))
    if not cell:
        return ["-", "-", "-"]
    figure = f"{cell[call.field]:.1f} us" if call.field.endswith("us") else f"{cell[call.field]:.3f} ms"
    floor = f"{cell[call.floor] / cell[call.field]:.0%}" if call.floor else "-"
    return [figure, floor, ", ".join(f"{name} {x:.2f}" for name, x in others.items()) or "-"]


def ranks(data: dict) -> str:
    """A table for each card: speedups over one GPU with the same tokens, with as many tokens per GPU ("longer"), and
    predicted, of the contiguous layout."""
    tables = []
    columns = ["2 GPUs", "4", "4, longer", "8, predicted", "64, predicted"]
    for card, sections in data.items():
        rows, all_cells = [], sections.get("context_parallelism", {"cells": []})["cells"]
        all_cells = [x for x in all_cells if x["package"] == "flash_qla" and x["layout"] in (None, "contiguous")]
        of_ranks = [x for x in all_cells if not x.get("parts")]
        of_ranks += [x | {"scaling": "predicted"} for x in context_parallelism.predictions(all_cells)]
        known = {(heads_of(x), x["sequences"], x["scaling"], x["ranks"]): x for x in of_ranks}
        for one in (x for (_, _, scaling, W), x in known.items() if (scaling, W) == ("strong", 1)):
            for field in ("forward_ms", "step_ms"):
                row = [field.removesuffix("_ms"), heads_of(one), one["sequences"], f"{one[field]:.2f} ms"]
                for scaling, W in (("strong", 2), ("strong", 4), ("weak", 4), ("predicted", 8), ("predicted", 64)):
                    cell = known.get((heads_of(one), one["sequences"], scaling, W))
                    tokens = W if scaling == "weak" else 1
                    row.append(f"{tokens * one[field] / cell[field]:.2f}" if cell else "-")
                rows.append(row)
        if rows:
            tables.append(markdown(["call", "heads", "sequences", f"one {card}", *columns], rows))
    return "\n\n".join(tables)


def decode_steps(data: dict) -> str:
    """GPU time of the layers in a decode step of an engine, and of the whole step, and its time by the clock."""
    rows = []
    for card, sections in data.items():
        steps = {(x["package"], x["requests"]): x for x in sections.get("decode_steps", {"cells": []})["cells"]}
        for requests in sorted({x for _, x in steps}):
            own, ours = steps["own", requests], steps["flash_qla", requests]
            layers = [f"{own['gdn_us']:.0f} us", f"{ours['gdn_us']:.0f} us", f"{own['gdn_us'] / ours['gdn_us']:.2f}"]
            steps_us = [f"{x['gpu_us']:.0f} us" for x in (own, ours)]
            clock = [
                f"{statistics.median(x['ms']):.1f} ms ({min(x['ms']):.1f} to {max(x['ms']):.1f})" for x in (own, ours)
            ]
            rows.append([card, str(requests), *layers, *steps_us, *clock])
    columns = ["layers: vLLM", "flash_qla", "ratio", "step: vLLM", "flash_qla", "by the clock: vLLM", "flash_qla"]
    return markdown(["card", "requests", *columns], rows)


def accuracy(data: dict) -> str:
    """The largest errors of each package, in the cases that all have run."""
    tensors, rows = ("o", "final_state", "dq", "dk", "dv", "db", "dg", "dh0"), []
    for card, sections in data.items():
        errors_of_package: dict[str, dict[str, dict]] = {}
        for cell in sections.get("accuracy", {"cells": []})["cells"]:
            if "errors" in cell:
                errors_of_package.setdefault(cell["package"], {})[cell["case"]] = cell["errors"]
        both = set.intersection(*map(set, errors_of_package.values())) if errors_of_package else ()
        for package, errors in errors_of_package.items():
            # Gates of -50 leave a gradient of about e^-50, whose relative error means nothing.
            worst = [max(errors[case][x] for case in both if x != "dg" or "underflow" not in case) for x in tensors]
            rows.append([f"{card}: {PACKAGES.get(package, package)}", *(f"{x:.1e}" for x in worst)])
    return markdown(["largest error", *tensors], rows)


TABLES = {
    "first": first,
    "gain": gain,
    "cells": lambda data: cells(of_all_calls(data), SPEED_CELLS),
    "means": lambda data: with_environment(means(of_all_calls(data), OF_CALLS), of_all_calls(data), OF_CALLS),
    "ranks": lambda data: with_environment(ranks(data), data, ["context_parallelism"]),
    "decode_steps": lambda data: with_environment(decode_steps(data), data, ["decode_steps"]),
    "accuracy": lambda data: with_environment(accuracy(data), data, ["accuracy"]),
}


# The figure


def overview(data: dict) -> str:
    """An SVG of the geometric means, a dot for each card: the call on which a card gains most is on top."""
    data, rows = of_all_calls(data), []
    for name in OVERVIEW:
        for other in CALLS[name].theirs:
            compared = {card: figures(sections, CALLS[name]) for card, sections in data.items()}
            ratios_of_cards = {card: ratios_of(x, other) for card, x in compared.items()}
            # Of half of the shapes or more: a mean of a few says little.
            dots = {
                card: geometric_mean(x)
                for card, x in ratios_of_cards.items()
                if x and 2 * len(x) >= len(compared[card])
            }
            if dots and other in (*PACKAGES.values(), "vLLM/SGLang"):
                rows.append((f"{name}: {other}" if ": " not in name else f"{name}, {other}", dots))
    rows.sort(key=lambda row: -max(row[1].values()))
    left, right, top, step = 222, 410, 46, 24
    most = max(max(dots.values()) for _, dots in rows)

    def x_of(ratio: float) -> str:
        return f"{left + 8 + (right - left - 50) * (ratio - 0.9) / (most - 0.9):.1f}"

    def text(x, y, content: str, more="") -> str:
        return f'<text x="{x}" y="{y}"{more}>{html.escape(content)}</text>'

    colors = dict(zip(data, ("#0b6e99", "#d9822b"), strict=False))
    bottom = top + step * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 {bottom + 6}" width="560" role="img"',
        '  font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="420" height="{bottom + 6}" fill="#fff"/>',
        text(8, 18, "Time of others over flash_qla's", ' font-weight="bold"'),
        *(
            f'<circle cx="{248 + 72 * i}" cy="14" r="5" fill="{color}"/>' + text(258 + 72 * i, 18, card)
            for i, (card, color) in enumerate(colors.items())
        ),
        f'<path d="M{x_of(1)} {top - 10}V{bottom - 4}" stroke="#999" stroke-dasharray="3 3"/>',
        text(x_of(1), top - 14, "1", ' text-anchor="middle" fill="#666"'),
    ]
    for i, (name, dots) in enumerate(rows):
        y = top + step * i + 8
        lines.append(text(left, y + 4, name, ' text-anchor="end"'))
        lines.append(f'<path d="M{x_of(1)} {y}H{x_of(max(dots.values()))}" stroke="#ccc" stroke-width="3"/>')
        lines += [f'<circle cx="{x_of(x)}" cy="{y}" r="5" fill="{colors[card]}"/>' for card, x in dots.items()]
        x = float(x_of(max(dots.values()))) + 8
        lines.append(text(f"{x:.1f}", y + 4, f"{max(dots.values()):.1f}"))
    return "\n".join([*lines, "</svg>", ""])


# Pages


def filled(text: str, data: dict) -> str:
    """The page with its tables."""
    if text.count("<!-- report: ") != text.count("<!-- end report -->"):
        raise ValueError("a table has no <!-- end report -->")
    return TABLE.sub(lambda x: f"<!-- report: {x[1]} -->\n\n{TABLES[x[1]](data)}\n\n<!-- end report -->", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    results = load(RESULTS)
    FIGURE.write_text(overview(results))
    for page in pages():
        page.write_text(filled(page.read_text(), results))
