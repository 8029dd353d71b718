"""Draw the rows of a GPU: docs/figures/op_speed.svg and docs/figures/model_speed.svg.

    python benchmarks/plot.py [benchmarks/results/h200.csv] [--out docs/figures]

Of our rows those of the newest commit are drawn, for each kind of pass; of a peer's the newest,
whichever version it has. A figure that compares nothing is not drawn, nor is our torch backend,
whose bars would hide the others. Nothing but the CSV is read, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flash_frac import drawing
from flash_frac.bench.rows import read_rows
from flash_frac.bench.timing import OURS
from flash_frac.drawing import FAINT, GREY, INK, OTHER, PALE, TEXT, THIRD
from flash_frac.extras import require

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RESULTS = Path(__file__).parent / "results"
# The first name that an implementation contains decides; ours by way of transformers are paler.
COLOURS = {
    "(eager)": PALE,
    "(generate)": PALE,
    "(transformers' loop)": PALE,
    OURS: drawing.OURS,
    "chunk_gla": "#e09f3e",
    "gated_delta_rule": OTHER,
    "GatedDeltaNet": OTHER,
    "SSD": THIRD,
    "Mamba2": THIRD,
    "SDPA": GREY,
    "Qwen3": GREY,
}


def newest(rows: Iterable[dict], script: str, passed: str) -> list[dict]:
    """The rows of one pass to draw: ours of the newest commit first, then the newest of each peer.

    Rows are appended, so the newest are the last.
    """
    rows = [r for r in rows if r["pass"] == passed and f"/{script}" in r["command"]]
    ours = [row for row in rows if row["implementation"].startswith(OURS)]
    ours = [row for row in ours if row["commit"] == ours[-1]["commit"]]
    theirs = [row for row in rows if not row["implementation"].startswith(OURS)]
    last = {(family(row["implementation"]), row["B"], row["T"]): row for row in [*ours, *theirs]}
    return list(last.values())


def family(implementation: str) -> str:
    """A name without versions and sizes, such as 0.6.0 or 1.37B."""
    return re.sub(r" v?\d+\.\d\S*?(?=[ )]|$)", "", implementation)


def colour(implementation: str) -> str:
    return next((c for name, c in COLOURS.items() if name in implementation), INK)


def short(value: float) -> str:
    """A number of tokens a second, in three digits: 148K, 1.62K, 23.8."""
    for unit, letter in ((1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{float(f'{value / unit:.3g}'):g}{letter}"
    return f"{float(f'{value:.3g}'):g}"


def where(rows: Sequence[dict]) -> str:
    """The line under a figure: on what, and at which commit, our rows were measured."""
    row = rows[0]
    versions = [f"{name} {row[name]}" for name in ("torch", "triton") if row[name]]
    ours = [row for row in rows if row["implementation"].startswith(OURS)]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in ours))
    shape = f"H {row['H']}, M {row['M']}, D {row['D']}, {row['dtype']}"
    return f"{row['machine']}, {', '.join(versions)}; {OURS} {commits}: {shape}"


def clean(axes: Any, keep: str) -> None:
    """Take away all lines but the base of the bars, and the scale, which the values replace."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == keep)
        spine.set_color(FAINT)
    axes.tick_params(length=0)
    (axes.set_yticks if keep == "bottom" else axes.set_xticks)([])


def draw_times(axes: Any, rows: Sequence[dict], title: str, num_bars: int) -> None:
    """Horizontal bars of milliseconds, the fastest on top; room for `num_bars`."""
    rows = sorted(rows, key=lambda row: float(row["ms_p50"]))
    times = [float(row["ms_p50"]) for row in rows]
    names = [row["implementation"] for row in rows]
    bars = axes.barh(range(len(rows)), times, 0.7, color=[colour(name) for name in names])
    axes.bar_label(bars, [f"{time:.3g} ms" for time in times], padding=3)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(num_bars - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * max(times))
    axes.set_title(title)
    clean(axes, "left")
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")


def draw_rates(axes: Any, rows: Sequence[dict], title: str) -> None:
    """Bars of tokens a second: a group for each length, ours first in each."""
    groups = sorted({int(row["T"]) for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    width = 0.84 / len(names)
    for n, name in enumerate(names):
        rates = {
            groups.index(int(row["T"])): float(row["tokens_per_s"])
            for row in rows
            if row["implementation"] == name
        }
        places = [group + width * (n - (len(names) - 1) / 2) for group in rates]
        bars = axes.bar(places, rates.values(), 0.92 * width, color=colour(name))
        axes.bar_label(bars, [short(rate) for rate in rates.values()], padding=2, fontsize=8)
    axes.set_xticks(range(len(groups)), [f"{num_tokens:,} tokens" for num_tokens in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.margins(y=0.14)
    axes.set_title(title)
    clean(axes, "bottom")


def op_figure(rows: Sequence[dict], pyplot: Any) -> Any:
    """Milliseconds of the scan and its peers: a column for each pass, a line for each shape."""
    passes = ("forward", "forward+backward")
    panels: dict[tuple[int, int], dict[str, list[dict]]] = {}
    for passed in passes:
        for row in newest(rows, "ops.py", passed):
            if row["implementation"] != f"{OURS} torch":
                shape = panels.setdefault((int(row["B"]), int(row["T"])), {})
                shape.setdefault(passed, []).append(row)
    num_bars = max((len(kept) for shape in panels.values() for kept in shape.values()), default=0)
    if num_bars < 2:
        return None
    size = (11, 0.3 + len(panels) * (0.5 + 0.3 * num_bars))
    figure, grid = pyplot.subplots(len(panels), 2, figsize=size, squeeze=False)
    for (batch, time), line in zip(panels, grid, strict=True):
        for passed, axes in zip(passes, line, strict=True):
            kept = panels[batch, time].get(passed, [])
            if kept:
                draw_times(axes, kept, f"{passed}, {batch} x {time:,}", num_bars)
            axes.set_visible(bool(kept))
    finish(figure, [row for shape in panels.values() for kept in shape.values() for row in kept])
    return figure


def model_figure(rows: Sequence[dict], pyplot: Any) -> Any:
    """Tokens a second of whole models: prefill above, decoding and training below."""
    prefill, decode, train = (newest(rows, "model.py", p) for p in ("prefill", "decode", "train"))
    below = {
        f"decode, batch {batch}": [row for row in decode if int(row["B"]) == batch]
        for batch in sorted({int(row["B"]) for row in decode})
    }
    if train:
        below[f"train, batch {train[0]['B']}"] = train
    if not (prefill or below):
        return None
    figure = pyplot.figure(figsize=(11, 6))
    grid = figure.add_gridspec(bool(prefill) + bool(below), max(1, len(below)))
    for place, (title, kept) in enumerate(below.items()):
        draw_rates(figure.add_subplot(grid[-1, place]), kept, f"{title}: tokens/s")
    if prefill:
        draw_rates(figure.add_subplot(grid[0, :]), prefill, "prefill, batch 1: tokens/s")
    add_legend(figure, [*prefill, *decode, *train], pyplot)
    finish(figure, [*prefill, *decode, *train])
    return figure


def add_legend(figure: Any, rows: Iterable[dict], pyplot: Any) -> None:
    """One for all panels, above them; the ways of a model that share a colour share an entry."""
    notes: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        name, _, note = row["implementation"].rstrip(")").partition(" (")
        entry = notes.setdefault((name, colour(row["implementation"])), {})
        entry.update({note: None} if note else {})
    names = [name + (f" ({', '.join(ways)})" if ways else "") for (name, _), ways in notes.items()]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=shade) for _, shade in notes]
    figure.legend(patches, names, loc="outside upper left", ncols=3, frameon=False)


def finish(figure: Any, rows: Sequence[dict]) -> None:
    """Room between the panels, and below them where the numbers come from."""
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    figure.supxlabel(where(rows), fontsize=8, color="#666666", x=0.01, ha="left")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="?", default=RESULTS / "h200.csv")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures")
    options = parser.parse_args(arguments)
    require("matplotlib", "plot", "benchmarks/plot.py").use("Agg")
    pyplot = require("matplotlib.pyplot", "plot", "benchmarks/plot.py")
    rows = read_rows(options.csv)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("op_speed", op_figure), ("model_speed", model_figure)):
        with pyplot.rc_context(TEXT | {"figure.constrained_layout.use": True}):
            figure = draw(rows, pyplot)
            if figure is None:
                print(f"{name}.svg not drawn: {options.csv} has no rows for it")
                continue
            figure.savefig(options.out / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
        print(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
