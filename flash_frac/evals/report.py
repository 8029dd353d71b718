"""Results as tables and figures: the paper's rows, with our models below.

A report is the return value of `flash_frac.evals.runner.evaluate`, saved as OUT/results.json.
`markdown` writes the tables. `compare` draws several models: scores against length for suites with
lengths, and bars for the others, with the paper's rows as dashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flash_frac.drawing import (
    GREY,
    INK,
    OTHER,
    OURS,
    PALE,
    THIRD,
    faint_grid,
    figure_at,
    label,
    length_axis,
)
from flash_frac.evals.suites import SUITES, Metric, Suite, Task
from flash_frac.files import check_object, read_record, write_text
from flash_frac.markdown import plain

MISSING = "–"
# The fields of a result that tables and figures need.
UNIT = MappingProxyType(
    {"suite": str, "task": str, "length": int | None, "conditions": dict, "results": dict}
)
# Maximum number of documents that a footnote names.
NAMED = 10
COLOURS = (OURS, OTHER, THIRD, PALE, "#e09f3e", "#5b7553", INK)


def columns(suite: Suite) -> list[tuple[Task, Metric]]:
    """Columns of a suite's table, from left to right."""
    return [(task, metric) for task in suite.tasks for metric in task.metrics]


def numbers(report: dict[str, Any], suite: Suite, length: int | None = None) -> list[float | None]:
    """A model's row at a length, in the units of the table; None for what was not measured.

    Example: `numbers(report, SUITES["lm"])[2]` is the accuracy on LAMBADA in percent.
    """
    found = {
        (unit["task"], unit["length"]): unit["results"]
        for unit in report["units"]
        if unit["suite"] == suite.name
    }
    row: list[float | None] = []
    for task, metric in columns(suite):
        value = found.get((task.name, length), {}).get(metric.key)
        row.append(None if value is None else value * metric.scale)
    return row


def average(suite: Suite, row: Sequence[float | None]) -> float | None:
    """Mean of the averaged columns; None unless all of them were measured."""
    counted = [v for v, (_, metric) in zip(row, columns(suite), strict=True) if metric.averaged]
    known = [value for value in counted if value is not None]
    return sum(known) / len(known) if known and len(known) == len(counted) else None


def lengths(reports: Sequence[dict[str, Any]], suite: Suite) -> list[int]:
    """Lengths at which any of the models was measured."""
    units = [unit for report in reports for unit in report["units"]]
    return sorted({u["length"] for u in units if u["suite"] == suite.name and u["length"]})


def measured(reports: Sequence[dict[str, Any]]) -> list[Suite]:
    """Suites with results, each reduced to the tasks that have one."""
    tasks: dict[str, list[str]] = {}
    for report in reports:
        for unit in report["units"]:
            tasks.setdefault(unit["suite"], []).append(unit["task"])
    known = {name: SUITES[name].with_tasks(tasks[name]) for name in SUITES if name in tasks}
    return [suite.only(tasks[name]) for name, suite in known.items()]


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """All tables, each followed by notes on its data.

    Example: `Path("results.md").write_text(markdown([report]))`
    """
    parts = ["# Results"]
    for suite in measured(reports):
        parts.append(f"## {suite.title}")
        parts.append(_by_length(reports, suite) if suite.lengths else _by_task(reports, suite))
        parts.extend(_notes(report, suite) for report in reports)
    for report in reports:
        if report.get("left_out"):
            names = ", ".join(report["left_out"])
            told = f"{report['model']}: left out because local files are missing: {names}."
            parts.append(plain(told))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def _cell(value: float | None) -> str:
    if value is None or math.isnan(value):
        return MISSING
    return f"{value:.1f}" if abs(value) < 1e6 else f"{value:.1e}"


def _by_task(reports: Sequence[dict[str, Any]], suite: Suite) -> str:
    arrows = {True: "↑", False: "↓"}
    head = ["Model"]
    for _, metric in columns(suite):
        column = plain(f"{metric.column} {metric.unit}")
        head.append(f"{column} {arrows[metric.higher_is_better]}")
    rows = [[f"{name} (paper)", *map(_cell, row)] for name, row in suite.paper.items()]
    for report in reports:
        row = numbers(report, suite)
        rows.append([f"**{plain(report['model'])}**", *map(_cell, [*row, average(suite, row)])])
    # An average over some columns is not comparable with the paper's.
    if len(suite.tasks) < len(SUITES[suite.name].tasks):
        return _table(head, [row[:-1] for row in rows])
    return _table([*head, "Avg."], rows)


def _by_length(reports: Sequence[dict[str, Any]], suite: Suite) -> str:
    every = lengths(reports, suite)
    tables = []
    for index, (_, metric) in enumerate(columns(suite)):
        head = [plain(f"{metric.column} ({metric.unit})"), *(f"{length:,}" for length in every)]
        rows = [
            [
                f"**{plain(report['model'])}**",
                *(_cell(numbers(report, suite, n)[index]) for n in every),
            ]
            for report in reports
        ]
        tables.append(_table(head, rows))
    return "\n\n".join(tables)


def _notes(report: dict[str, Any], suite: Suite) -> str:
    """Notes on what was cut, limited or is missing: no number should look better than it is."""
    units = [unit for unit in report["units"] if unit["suite"] == suite.name]
    notes = []
    limited = sorted({unit["conditions"]["limit"] for unit in units} - {None})
    if limited:
        notes.append(f"only the first {limited[0]} examples of a task")
    cut = [f"{u['results']['num_truncated']} of {u['task']}" for u in units if _cut(u)]
    if cut:
        notes.append(f"requests cut to fit: {', '.join(cut)}")
    dropped = {u["task"]: u["results"]["left_out"] for u in units if u["results"].get("left_out")}
    for task, names in dropped.items():
        more = f" and {len(names) - NAMED} more, in results.json" if len(names) > NAMED else ""
        notes.append(f"left out of {task}: {', '.join(names[:NAMED])}{more}")
    for unit in units:
        if strange := unit["results"].get("not_finite"):
            notes.append(f"NaN or inf in {unit['task']}: {', '.join(strange)}")
    absent = {task.name for task in suite.tasks} - {unit["task"] for unit in units}
    if absent:
        notes.append(f"not measured: {', '.join(sorted(absent))}")
    allowed = sorted({unit["conditions"]["max_length"] for unit in units})
    if allowed and not suite.lengths:
        notes.append(f"at most {', '.join(f'{n:,}' for n in allowed)} tokens")
    data = {"hub" if unit["conditions"]["data"] == "hub" else "local files" for unit in units}
    notes.append(f"data: {', '.join(sorted(data))}" if data else "")
    notes.extend(sorted({unit["source"] for unit in units if unit.get("source")}))
    text = "; ".join(note for note in notes if note)
    return plain(f"{report['model']}: {text}.") if text else ""


def _cut(unit: dict[str, Any]) -> bool:
    return unit["results"].get("num_truncated", 0) > 0


def compare(folders: Sequence[Path], out: Path) -> list[Path]:
    """Tabulate and draw the results of several models; return the files written.

    Args:
        folders: result folders, each with the results.json of `frac eval`.
        out: folder for compare.md and one figure per suite.

    Example: `compare([Path("evals/frac"), Path("evals/mamba2")], Path("compare"))`
    """
    reports = [_load(folder) for folder in folders]
    if len(reports) > len(COLOURS):
        raise ValueError(f"at most {len(COLOURS)} models can be compared, got {len(reports)}")
    reports = _named_apart(reports, folders)
    out.mkdir(parents=True, exist_ok=True)
    written = [write_text(out / "compare.md", markdown(reports))]
    for suite in measured(reports):
        path = out / f"{suite.name}.svg"
        if suite.lengths:
            draw_lengths(path, reports, suite)
        else:
            draw_bars(path, reports, suite)
        written.append(path)
    return written


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no results.json; name an --out folder of `frac eval`")
    try:
        report = read_record(path, {"model": str, "units": list})
        for number, unit in enumerate(report["units"], 1):
            check_object(unit, f"{path} unit {number}", UNIT)
    except ValueError as error:
        raise ValueError(f"{error}; run the same `frac eval` to write it again") from error
    return report


def _named_apart(
    reports: Sequence[dict[str, Any]], folders: Sequence[Path]
) -> list[dict[str, Any]]:
    """Reports with distinct names: the models' or, if these repeat, the folders'."""
    names = [report["model"] for report in reports]
    if len(set(names)) == len(names):
        return list(reports)
    return [
        {**report, "model": folder.name} for report, folder in zip(reports, folders, strict=True)
    ]


def draw_lengths(path: Path, reports: Sequence[dict[str, Any]], suite: Suite) -> None:
    """Draw one panel per column of a suite: the score against the length, one line per model."""
    every, heads = lengths(reports, suite), [metric for _, metric in columns(suite)]
    width = 1.2 + 2.7 * len(heads)
    with figure_at(path, (width, 2.9), [1] * len(heads)) as (_, panels):
        for index, (axes, metric) in enumerate(zip(panels, heads, strict=True)):
            for report, colour in zip(reports, COLOURS, strict=False):
                points = [(n, numbers(report, suite, n)[index]) for n in every]
                known = [(n, value) for n, value in points if value is not None]
                if known:
                    axes.plot(*zip(*known, strict=True), "o-", color=colour, ms=4, clip_on=False)
            length_axis(axes, every)
            axes.set_xlim(every[0] / 1.25, every[-1] * 1.25)
            axes.set(title=label(_title(metric, heads)), xlabel="length, tokens")
            _value_axis(axes, metric)
        panels[0].set_ylabel(_unit(heads[0]))
        _legend(panels[-1], [report["model"] for report in reports])


def _title(metric: Metric, heads: Sequence[Metric]) -> str:
    shared = sum(other.column == metric.column for other in heads) > 1
    return f"{metric.column}, {metric.unit}" if shared else metric.column


def _value_axis(axes: Any, metric: Metric) -> None:
    if metric.scale == 100:
        axes.set_ylim(0, 103)
    faint_grid(axes)


def _unit(metric: Metric) -> str:
    names = {"acc": "accuracy, %", "ppl": "perplexity"}
    return names.get(metric.unit, metric.unit)


def _legend(axes: Any, names: Sequence[str], paper: bool = False) -> None:
    """Add a legend beside the axes with every model, even one without a number in this panel."""
    for name, colour in zip(names, COLOURS, strict=False):
        axes.plot([], [], color=colour, lw=3, label=label(name))
    if paper:
        axes.plot([], [], "_", color=INK, ms=9, mew=2, label="FRAC, paper")
        axes.plot([], [], "_", color=GREY, ms=9, mew=1, label="others, paper")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_bars(path: Path, reports: Sequence[dict[str, Any]], suite: Suite) -> None:
    """Draw bars for each column in percent, one colour per model; dashes are the paper's rows."""
    shown = [n for n, (_, metric) in enumerate(columns(suite)) if metric.scale == 100]
    heads = [columns(suite)[n][1] for n in shown]
    rows = {report["model"]: numbers(report, suite) for report in reports}
    size = 0.66 / max(len(rows), 1)
    with figure_at(path, (1.8 + 0.8 * len(shown), 3.2)) as (_, (axes,)):
        for place, column in enumerate(shown):
            for numbered, row in enumerate(rows.values()):
                if row[column] is not None:
                    x = place - 0.4 + (numbered + 0.5) * size
                    axes.bar(x, row[column], 0.92 * size, color=COLOURS[numbered])
            # Dashes go beside the bars, which would hide them; FRAC's is last, on top.
            for name, row in sorted(suite.paper.items(), key=lambda item: item[0] == "FRAC"):
                colour, weight = (INK, 2) if name == "FRAC" else (GREY, 1)
                axes.plot(place + 0.36, row[column], "_", color=colour, ms=9, mew=weight)
        axes.set_xticks(range(len(shown)), [f"{m.column}\n{m.unit}" for m in heads])
        axes.tick_params(axis="x", length=0)
        axes.set(ylabel="%", title=suite.title, xlim=(-0.6, len(shown) - 0.4))
        faint_grid(axes)
        axes.set_ylim(bottom=0)
        _legend(axes, list(rows), bool(suite.paper))
