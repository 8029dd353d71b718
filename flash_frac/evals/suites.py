"""The paper's evaluations as data: suites of tasks, their metrics, and the paper's own rows.

A suite is one table or figure of the paper. Each has a module that defines `SUITE`:

    SUITE = Suite(name="lm", title="LM Harness", tasks=(Task(name="piqa", metrics=(...)), ...))

and an entry in `MODULES`, so that a suite is imported on demand. Local files of a task are
`DIR/<suite>/<task>.jsonl`, see `files`. A `Unit` is measured at a time: a task, or a task at one of
the suite's lengths. Tasks of lm-evaluation-harness need nothing more; a suite that is measured in
another way has a function of a `Request`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MODULES = {
    "lm": "flash_frac.evals.lm",
    "niah": "flash_frac.evals.niah",
    "longbench": "flash_frac.evals.longbench",
    "recall": "flash_frac.evals.recall",
    "longppl": "flash_frac.evals.long_perplexity",
}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a task, and its column in the paper's table.

    Args:
        key: its name in the results of the task, as in lm-eval ("acc_norm,none").
        column: heading in the paper's table.
        unit: the text below the heading, such as "acc" or "ppl".
        scale: factor for the table: 100 for fractions, 1 for perplexities.
        higher_is_better: whether higher values are better.
        averaged: whether it counts for the column "Avg.".
    """

    key: str
    column: str
    unit: str
    scale: float = 100.0
    higher_is_better: bool = True
    averaged: bool = True


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task and the metrics to report.

    Args:
        name: its name on the command line, and of its local files.
        metrics: the columns it fills.
        splits: splits it needs; the first is scored, the others provide few-shot examples.
        config: fields that override lm-eval's configuration of the task.
        folder: its folder among lm-eval's tasks; by default all are searched, which takes seconds.
        yaml: our own configuration, instead of lm-eval's of that name.
    """

    name: str
    metrics: tuple[Metric, ...]
    splits: tuple[str, ...] = ("test",)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    yaml: Path | None = None

    def files(self, folder: Path) -> dict[str, Path]:
        """Local file of each split: <task>.jsonl if it is scored, else <task>.<split>.jsonl.

        Example: `task.files(Path("data/lm"))["test"] == Path("data/lm/piqa.jsonl")`
        """
        first, *others = self.splits
        named = {split: folder / f"{self.name}.{split}.jsonl" for split in others}
        return {first: folder / f"{self.name}.jsonl"} | named


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The unit of measurement: a task, at one length if the suite has lengths."""

    task: Task
    length: int | None = None

    @property
    def name(self) -> str:
        """Name of its result, such as "piqa" or "niah_single_1@4096"."""
        return self.task.name if self.length is None else f"{self.task.name}@{self.length}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The inputs of a measurement.

    Args:
        lm: the model as an lm-eval object: `lm.model`, `lm.tokenizer`, `lm.max_length`,
            `lm.device`.
        suite: the suite of the task.
        unit: the task, and the length if there is one.
        data_dir: root of the local files, or None for hub datasets.
        limit: use only the first N examples; all by default.
        seed: random seed.
    """

    lm: Any
    suite: Suite
    unit: Unit
    data_dir: Path | None = None
    limit: int | None = None
    seed: int = 0


# Measures one unit: returns numbers by key, including "num_examples", and other values to save.
Measure = Callable[[Request], Mapping[str, Any]]
# Downloads the local files of a suite to a root folder; returns the new files.
Prepare = Callable[[Path], list[Path]]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One table or figure of the paper.

    Args:
        name: its name on the command line, and of the folder of its local files.
        title: its title in the paper.
        tasks: the tasks in the order of the columns.
        max_length: maximum number of tokens of context and answer; more is an error unless
            truncation is on. With `lengths`, it is added to the length.
        prepare: downloads its local files from the hub.
        lengths: lengths at which each task is measured; none for tasks of fixed length.
        num_fewshot: examples before each question.
        paper: rows of the paper's table: one number per column in order, then the average.
        measure: measures a unit; with lm-eval by default.
        local: the local files that a task needs; <task>.jsonl by default.
        reads_files: it reads local files only; without a folder of them, `prepare` downloads them
            to OUT/data.
        own: makes a task from the name of any other local file, DIR/<suite>/<name>.jsonl; such
            tasks are only measured on request.
    """

    name: str
    title: str
    tasks: tuple[Task, ...]
    max_length: int
    prepare: Prepare
    lengths: tuple[int, ...] = ()
    num_fewshot: int = 0
    paper: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    measure: Measure | None = None
    local: Callable[[Path, Task], list[Path]] | None = None
    reads_files: bool = False
    own: Callable[[str], Task] | None = None

    def __post_init__(self) -> None:
        columns = sum(len(task.metrics) for task in self.tasks)
        for row, numbers in self.paper.items():
            if len(numbers) != columns + 1:
                raise ValueError(
                    f"paper[{row!r}] must have {columns + 1} numbers, one per column and the "
                    f"average, got {len(numbers)}"
                )

    def with_tasks(self, names: Iterable[str]) -> Suite:
        """The suite plus tasks for unknown names; raises ValueError if it does not accept any.

        Example: `SUITES["longppl"].with_tasks(["pg19", "rfc"]).tasks[-1].name == "rfc"`
        """
        known = {task.name for task in self.tasks}
        others = [name for name in dict.fromkeys(names) if name not in known]
        if not others:
            return self
        if self.own is None:
            raise ValueError(
                f"tasks of suite {self.name} are {', '.join(sorted(known))}; got {others}"
            )
        return replace(self, tasks=(*self.tasks, *map(self.own, others)))

    def only(self, names: Iterable[str]) -> Suite:
        """The suite with only these tasks, and their columns of the paper's rows.

        The paper's average is over all columns; it becomes NaN if one is removed.

        Example: `SUITES["lm"].only(["piqa"]).tasks[0].name == "piqa"`
        """
        names = set(names)
        columns = [task.name for task in self.tasks for _ in task.metrics]
        if names >= set(columns):
            return self
        kept = [n for n, name in enumerate(columns) if name in names]
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if task.name in names),
            paper={row: (*(x[n] for n in kept), math.nan) for row, x in self.paper.items()},
        )

    def units(self, names: tuple[str, ...] = (), lengths: tuple[int, ...] = ()) -> tuple[Unit, ...]:
        """The units to measure: all, or only those of these tasks and lengths.

        Example: `SUITES["niah"].units(lengths=(1024,))[0].name == "niah_single_1@1024"`
        """
        every_task = self.with_tasks(names).tasks
        if lengths and not self.lengths:
            raise ValueError(f"lengths {lengths} were given, but suite {self.name} has no lengths")
        chosen = [task for task in every_task if not names or task.name in names]
        every = tuple(sorted(set(lengths or self.lengths))) or (None,)
        return tuple(Unit(task=task, length=length) for task in chosen for length in every)

    def files(self, data_dir: Path, task: Task) -> list[Path]:
        """Local files that a task needs."""
        if self.local is not None:
            return self.local(data_dir / self.name, task)
        return list(task.files(data_dir / self.name).values())

    def tokens(self, unit: Unit) -> int:
        """Maximum number of tokens for this unit."""
        return self.max_length + (unit.length or 0)


class _Suites(Mapping[str, Suite]):
    """Suites by name, each imported on demand."""

    def __getitem__(self, name: str) -> Suite:
        return importlib.import_module(MODULES[name]).SUITE

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


SUITES: Mapping[str, Suite] = _Suites()


def check_suites(names: Sequence[str]) -> None:
    """Raise ValueError unless there is at least one name and all are names of suites."""
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"suites must be among {', '.join(SUITES)}; got {unknown or 'none'}")
