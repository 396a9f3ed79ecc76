"""Figures of the results of all.py: the peers' times over those of flash_qla, and its part of the floor.

    python benchmarks/plot.py

Writes forward_h100.png, backward_h100.png and the figures of other cards that have results, beside the results. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from common import parse_heads, parse_lengths
from forward import PEERS, Row, rows_of
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from report import RESULTS, Card, load

# Colours that colour-blind eyes distinguish, and markers for prints without colour.
STYLES = {"fla": ("#0072B2", "o"), "flash_qla_jit": ("#E69F00", "s"), "flashinfer": ("#009E73", "^")}
COLUMNS = 4


def draw(rows: list[Row], title: str) -> Figure:
    heads = sorted({row.heads for row in rows}, key=parse_heads)
    sequences = sorted({row.sequences for row in rows}, key=lambda text: (len(parse_lengths(text)), text))
    found = {(row.heads, row.sequences): row for row in rows}
    columns = min(COLUMNS, len(heads))
    lines = math.ceil(len(heads) / columns)
    peers = {peer: label for peer, label in PEERS.items() if any(peer in row.ratios for row in rows)}
    figure = Figure(figsize=(3.4 * columns + 0.6, 2.5 * lines + 0.36 * len(heads) + 2.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.5 * lines + 1.0, 0.36 * len(heads) + 1.2])

    panels = upper.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    positions = range(len(sequences))
    for panel, name in zip(panels, heads, strict=False):
        for peer, label in peers.items():
            color, marker = STYLES[peer]
            ratios = [found[name, x].ratios.get(peer) if (name, x) in found else None for x in sequences]
            ratios = [math.nan if ratio is None else ratio for ratio in ratios]
            panel.plot(positions, ratios, color=color, marker=marker, markersize=4, linewidth=1.2, label=label)
        panel.set_title(name, fontsize=9, loc="left")
    for panel in panels[len(heads) :]:
        panel.set_visible(False)
    ratios = [ratio for row in rows for ratio in row.ratios.values()] or [1.0]
    for panel in panels:
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_yscale("log")
        # Ticks of a log axis lie a decade apart; these ratios rarely span one.
        ticks = [tick for tick in (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick <= 1.1 * max(ratios)]
        panel.set_yticks([tick for tick in ticks if tick >= min(0.9, min(ratios) / 1.1)] or [1])
        panel.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}x"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_xticks(positions, sequences, rotation=60, ha="right", rotation_mode="anchor")
        panel.tick_params(labelsize=7)
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    upper.suptitle(title, fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=max(1, len(peers)), fontsize=8, frameon=False)
    upper.supylabel("time over flash_qla's", fontsize=8)

    floor = [[found[name, x].floor if (name, x) in found else math.nan for x in sequences] for name in heads]
    axes = lower.subplots()
    axes.imshow(floor, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, x in ((y, x) for y in range(len(heads)) for x in positions if not math.isnan(floor[y][x])):
        color = "white" if floor[y][x] > 0.6 else "black"
        axes.text(x, y, f"{floor[y][x]:.0%}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(positions, sequences, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(heads)), heads)
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("flash_qla: part of the card's floor", fontsize=9, loc="left")
    return figure


def rows_of_backward(cells: list[dict]) -> list[Row]:
    return rows_of(
        [
            {
                "package": cell["package"],
                "variant": cell.get("variant", "default"),
                "gate": "bench",
                "heads": cell["heads"],
                "sequences": cell["sequences"],
                "ms": cell["backward_ms"],
                "floor_ms": cell.get("backward_floor_ms"),
            }
            for cell in cells
        ],
        "bench",
    )


def figures(card: Card) -> dict[str, Figure]:
    """The name of each figure -> the figure."""
    found = {}
    for section, rows in (
        ("forward", rows_of(card.cells("forward"), "bench")),
        ("backward", rows_of_backward(card.cells("backward"))),
    ):
        if rows:
            versions = dict.fromkeys(
                f"{PEERS[cell['package']]} {cell['version']}"
                for cell in card.cells(section)
                if cell["package"] in PEERS
            )
            title = f"{section.capitalize()} on {card.name}: times over flash_qla's, log scale"
            found[f"{section}_{card.name.lower()}.png"] = draw(rows, f"{title} ({', '.join(versions) or 'no peers'})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    for card in load(options.results).cards:
        for name, figure in figures(card).items():
            figure.savefig(options.results / name, dpi=150)
            print(options.results / name)


if __name__ == "__main__":
    main()
