"""Results as the paper shows them: its tables in Markdown, with rows for our models below its own.

A report is what `flash_frac.evals.runner.evaluate` returns and OUT/results.json holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flash_frac.evals.suites import SUITES, Metric, Suite, Task

MISSING = "–"


def columns(suite: Suite) -> list[tuple[Task, Metric]]:
    """Columns of a suite's table, left to right."""
    return [(task, metric) for task in suite.tasks for metric in task.metrics]


def numbers(report: dict[str, Any], suite: Suite, length: int | None = None) -> list[float | None]:
    """A model's row at a length, in the units of the table; None where nothing was measured.

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
    """Mean of the columns that count; None unless all are there."""
    counted = [v for v, (_, metric) in zip(row, columns(suite), strict=True) if metric.averaged]
    known = [value for value in counted if value is not None]
    return sum(known) / len(known) if known and len(known) == len(counted) else None


def lengths(reports: Sequence[dict[str, Any]], suite: Suite) -> list[int]:
    """Lengths at which any of the models was measured."""
    units = [unit for report in reports for unit in report["units"]]
    return sorted({u["length"] for u in units if u["suite"] == suite.name and u["length"]})


def measured(reports: Sequence[dict[str, Any]]) -> list[Suite]:
    """Suites of which there is a result, with the tasks of one's own files that have one."""
    tasks: dict[str, list[str]] = {}
    for report in reports:
        for unit in report["units"]:
            tasks.setdefault(unit["suite"], []).append(unit["task"])
    return [SUITES[name].with_tasks(tasks[name]) for name in SUITES if name in tasks]


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """All tables, and below each what its numbers were measured on.

    Example: `Path("results.md").write_text(markdown([report]))`
    """
    parts = ["# Results"]
    for suite in measured(reports):
        parts.append(f"## {suite.title}")
        parts.append(_by_length(reports, suite) if suite.lengths else _by_task(reports, suite))
        parts.extend(_notes(report, suite) for report in reports)
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def _cell(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if abs(value) < 1e6 else f"{value:.1e}"


def _by_task(reports: Sequence[dict[str, Any]], suite: Suite) -> str:
    arrows = {True: "↑", False: "↓"}
    head = ["Model"]
    for _, metric in columns(suite):
        head.append(f"{metric.column} {metric.unit} {arrows[metric.higher_is_better]}")
    rows = [[f"{name} (paper)", *map(_cell, row)] for name, row in suite.paper.items()]
    for report in reports:
        row = numbers(report, suite)
        rows.append([f"**{report['model']}**", *map(_cell, [*row, average(suite, row)])])
    return _table([*head, "Avg."], rows)


def _by_length(reports: Sequence[dict[str, Any]], suite: Suite) -> str:
    every = lengths(reports, suite)
    tables = []
    for index, (_, metric) in enumerate(columns(suite)):
        head = [f"{metric.column} ({metric.unit})", *(f"{length:,}" for length in every)]
        rows = [
            [f"**{report['model']}**", *(_cell(numbers(report, suite, n)[index]) for n in every)]
            for report in reports
        ]
        tables.append(_table(head, rows))
    return "\n\n".join(tables)


def _notes(report: dict[str, Any], suite: Suite) -> str:
    """What was cut, limited or is not there: no number should look better than it is."""
    units = [unit for unit in report["units"] if unit["suite"] == suite.name]
    notes = []
    limited = sorted({unit["conditions"]["limit"] for unit in units} - {None})
    if limited:
        notes.append(f"only the first {limited[0]} examples of a task")
    cut = [f"{u['results']['num_truncated']} of {u['task']}" for u in units if _cut(u)]
    if cut:
        notes.append(f"requests cut to fit: {', '.join(cut)}")
    absent = {task.name for task in suite.tasks} - {unit["task"] for unit in units}
    if absent:
        notes.append(f"not measured: {', '.join(sorted(absent))}")
    allowed = sorted({unit["conditions"]["max_length"] for unit in units})
    if allowed and not suite.lengths:
        notes.append(f"at most {', '.join(f'{n:,}' for n in allowed)} tokens")
    data = {"hub" if unit["conditions"]["data"] == "hub" else "local files" for unit in units}
    notes.append(f"data: {', '.join(sorted(data))}" if data else "")
    notes.extend(sorted({unit["source"] for unit in units if unit.get("source")}))
    told = "; ".join(note for note in notes if note)
    return f"{report['model']}: {told}." if told else ""


def _cut(unit: dict[str, Any]) -> bool:
    return unit["results"].get("num_truncated", 0) > 0
