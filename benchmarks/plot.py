"""Plot the rows of a GPU: docs/figures/op_speed.svg and docs/figures/model_speed.svg.

    python benchmarks/plot.py [benchmarks/results/h200.csv] [--out docs/figures]

For each pass, mode, batch and length, the plots show rows of one commit: the newest at which both
ours and peers were measured. If there is none, the line below the figure names the peers' commits.
CUDA graphs and eager calls have separate panels; missing rows are marked.
A figure with nothing to compare is not drawn, nor is our torch backend, whose bars would dwarf the
others. Only the CSV is read; no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flash_frac import drawing
from flash_frac.bench.newest import family, mode_of, model_rows, newest
from flash_frac.bench.rows import read_rows
from flash_frac.bench.table import model_of
from flash_frac.bench.timing import OURS
from flash_frac.drawing import FAINT, FOURTH, GREY, INK, OTHER, TEXT, THIRD
from flash_frac.extras import require

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RESULTS = Path(__file__).parent / "results"
# The first name that occurs in an implementation's name determines its colour.
COLOURS = {
    OURS: drawing.OURS,
    "chunk_gla": "#e09f3e",
    "gated_delta_rule": OTHER,
    "GatedDeltaNet": OTHER,
    "SSD": THIRD,
    "Mamba2": THIRD,
    "D 64": "#ecd09c",
    "MIMO": "#8c5a1e",
    "Mamba3": FOURTH,
    "SDPA": GREY,
    "Qwen3": GREY,
}


def colour(implementation: str) -> str:
    return next((c for name, c in COLOURS.items() if name in implementation), INK)


def short(value: float) -> str:
    """Tokens per second with three digits: 148K, 1.62K, 23.8."""
    for unit, letter in ((1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{float(f'{value / unit:.3g}'):g}{letter}"
    return f"{float(f'{value:.3g}'):g}"


def where(rows: Sequence[dict]) -> str:
    """The line under a figure: machine, versions and commits of the rows."""
    row = rows[0]
    versions = [f"{name} {row[name]}" for name in ("torch", "triton") if row[name]]
    ours = [row for row in rows if row["implementation"].startswith(OURS)]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in ours))
    older = dict.fromkeys(row["commit"] for row in rows if row["commit"] not in commits)
    shape = f"H {row['H']}, M {row['M']}, D {row['D']}, {row['dtype']}"
    peers = f"; peers also of {' and '.join(older)}" if older else ""
    return f"{row['machine']}, {', '.join(versions)}; {OURS} {commits}: {shape}{peers}"


def clean(axes: Any, keep: str) -> None:
    """Remove all spines but the base of the bars, and the scale, which the values replace."""
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


def draw_rates(axes: Any, rows: Sequence[dict], models: Sequence[str], title: str) -> None:
    """Bars of tokens per second: a group for each length, with a slot for each model."""
    groups = sorted({int(row["T"]) for row in rows})
    rates = {
        (family(model_of(row["implementation"])), int(row["T"])): float(row["tokens_per_s"])
        for row in rows
    }
    width = 0.84 / len(models)
    for n, model in enumerate(models):
        for group, time in enumerate(groups):
            place = group + width * (n - (len(models) - 1) / 2)
            rate = rates.get((model, time))
            if rate is None:
                axes.text(place, 0, " no row", rotation=90, ha="center", va="bottom", fontsize=6)
                continue
            bar = axes.bar(place, rate, 0.92 * width, color=colour(model))
            turned = 90 if len(models) > 3 else 0
            axes.bar_label(bar, [short(rate)], padding=2, fontsize=7, rotation=turned)
    axes.set_xticks(range(len(groups)), [f"{num_tokens:,} tokens" for num_tokens in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.margins(y=0.2)
    axes.set_title(title)
    clean(axes, "bottom")


def draw_steps(axes: Any, rows: Sequence[dict], models: Sequence[str], title: str) -> None:
    """Tokens per second over the number of sequences: a line for each model, both axes log."""
    batches = sorted({int(row["B"]) for row in rows})
    for model in models:
        own = [row for row in rows if family(model_of(row["implementation"])) == model]
        rates = {int(row["B"]): float(row["tokens_per_s"]) for row in own}
        points = [(batch, rates[batch]) for batch in batches if batch in rates]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour(model), markersize=4)
        # Lines of peers are close together, so only ours has room for numbers.
        for batch, rate in points if model.startswith(OURS) else ():
            place = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
            axes.annotate(short(rate), (batch, rate), xytext=(0, 5), **place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(0.07, 0.12)
    axes.set_xlabel("sequences")
    axes.set_title(title)
    clean(axes, "bottom")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [10.0**n for n in range(10) if low < 10**n < high]
    axes.set_yticks(ticks, [short(tick) for tick in ticks], fontsize=7)
    axes.grid(axis="y", color=FAINT)
    axes.set_axisbelow(True)


def op_figure(rows: Sequence[dict], pyplot: Any) -> Any:
    """Milliseconds of the scan and its peers: a column for each pass, a row for each shape."""
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
    """Tokens per second of whole models: CUDA graphs above, eager and training below."""
    passes = {passed: model_rows(rows, passed) for passed in ("prefill", "decode", "train")}
    drawn = [row for kept in passes.values() for row in kept]
    models = list(dict.fromkeys(family(model_of(row["implementation"])) for row in drawn))
    lines: dict[str, dict[tuple[int, ...], list[dict]]] = {}
    for row in sorted(drawn, key=order):
        near = [x for x in drawn if mode_of(x) == mode_of(row) and order(x)[:2] == order(row)[:2]]
        panel = order(row)[:2] if is_over_batches(near) else order(row)
        lines.setdefault(mode_of(row), {}).setdefault(panel, []).append(row)
    if not lines:
        return None
    figure = pyplot.figure(figsize=(13, 3.2 * len(lines) + 0.8))
    grid = figure.add_gridspec(len(lines), 1)
    for n, mode in enumerate(sorted(lines, reverse=True)):
        panels = list(lines[mode].values())
        widths = [num_groups(kept) + 0.3 for kept in panels]
        places = grid[n].subgridspec(1, len(panels), width_ratios=widths)
        way = "CUDA graphs" if mode == "graph" else "eager"
        for place, kept in zip(places, panels, strict=True):
            row, several = kept[0], is_over_batches(kept)
            about = f"after {int(row['T']):,} tokens" if several else f"batch {row['B']}"
            draw = draw_steps if several else draw_rates
            title = f"{row['pass']}, {about}\n{way}: tokens/s"
            draw(figure.add_subplot(place), kept, models, title)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour(model)) for model in models]
    names = [named(model, drawn) for model in models]
    figure.legend(patches, names, loc="outside upper left", ncols=2, frameon=False)
    finish(figure, drawn)
    return figure


def order(row: dict) -> tuple[int, ...]:
    """Sort key and panel: prefill first, then decoding by length, then training; by batch size."""
    passed = ("prefill", "decode", "train").index(row["pass"])
    return passed, int(row["T"]) if row["pass"] == "decode" else 0, int(row["B"])


def is_over_batches(rows: Sequence[dict]) -> bool:
    """Whether to draw rows over batch size, in one panel; one or two sizes have bars each."""
    return len({row["B"] for row in rows}) > 2


def num_groups(rows: Sequence[dict]) -> float:
    """Width of a panel: groups of bars, or steps along an axis of batch sizes."""
    if is_over_batches(rows):
        return 0.4 * len({row["B"] for row in rows})
    return len({row["T"] for row in rows})


def named(model: str, rows: Iterable[dict]) -> str:
    """Legend entry of a model: its full name, and the size of its decoding state."""
    known = [r for r in rows if family(model_of(r["implementation"])) == model]
    name = model_of(known[0]["implementation"])
    held = [row for row in known if row["pass"] == "decode" and row["state_bytes"]]
    if not held:
        return f"{name}: state not recorded"
    size = int(held[0]["state_bytes"]) / 2**20
    return f"{name}: state {size:.3g} MiB after {int(held[0]['T']):,} tokens"


def finish(figure: Any, rows: Sequence[dict]) -> None:
    """Space out the panels, and write below them where the numbers come from."""
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.08)
    figure.supxlabel(where(rows), fontsize=8, color="#666666", x=0.01, ha="left")


def fix_layout(figure: Any) -> None:
    """Compute the layout and round it: the solver's last digits vary, and ids depend on them."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(number, 5) for number in axes.get_position().bounds])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="?", default=RESULTS / "h200.csv")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the figures")
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
            fix_layout(figure)
            figure.savefig(options.out / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
        print(options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
