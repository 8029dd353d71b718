"""What the paper measures, as data: suites of tasks, the number that counts, the paper's own rows.

A suite is one table or figure of the paper. Each has a module of its own that defines `SUITE`:

    SUITE = Suite(name="lm", title="LM Harness", tasks=(Task(name="piqa", metrics=(...)), ...))

and an entry in `MODULES`, so that a suite is imported when it is asked for. Local files of a task
are `DIR/<suite>/<task>.jsonl`, see `files`. What is measured at a time is a `Unit`: a task, or a
task at one of the suite's lengths. Tasks of lm-evaluation-harness need nothing more; a suite that
is measured in another way brings a function of a `Request`.
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
    """One number of a task, and the column of the paper's table in which it stands.

    Args:
        key: its name among the results of the task, as lm-eval writes it ("acc_norm,none").
        column: heading in the paper's table.
        unit: what stands below the heading, such as "acc" or "ppl".
        scale: the table shows this many times the number: 100 for shares, 1 for perplexities.
        higher_is_better: which end is good.
        averaged: whether it enters the column "Avg.".
    """

    key: str
    column: str
    unit: str
    scale: float = 100.0
    higher_is_better: bool = True
    averaged: bool = True


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and what of it is reported.

    Args:
        name: as users type it, and as its local files are called.
        metrics: the columns it fills.
        splits: splits it needs; the first is the one that is scored, any other is for examples.
        config: fields laid over lm-eval's configuration of the task.
        folder: where lm-eval keeps it, below its tasks; all are searched by default, for seconds.
        yaml: a configuration of our own, instead of lm-eval's of that name.
    """

    name: str
    metrics: tuple[Metric, ...]
    splits: tuple[str, ...] = ("test",)
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    yaml: Path | None = None

    def files(self, folder: Path) -> dict[str, Path]:
        """Local file of each split: <task>.jsonl for the scored one, <task>.<split>.jsonl else.

        Example: `task.files(Path("data/lm"))["test"] == Path("data/lm/piqa.jsonl")`
        """
        first, *others = self.splits
        named = {split: folder / f"{self.name}.{split}.jsonl" for split in others}
        return {first: folder / f"{self.name}.jsonl"} | named


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is measured and kept at a time: a task, at one length if the suite has lengths."""

    task: Task
    length: int | None = None

    @property
    def name(self) -> str:
        """Name of its result, such as "piqa" or "niah_single_1@4096"."""
        return self.task.name if self.length is None else f"{self.task.name}@{self.length}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """All that a measurement needs to know.

    Args:
        lm: the model as lm-eval wants it; `lm.model`, `lm.tokenizer`, `lm.max_length`, `lm.device`.
        suite: to which the task belongs.
        unit: the task, and the length if there is one.
        data_dir: root of the local files, or None for the datasets of the hub.
        limit: only so many examples; all by default.
        seed: of whatever is drawn.
    """

    lm: Any
    suite: Suite
    unit: Unit
    data_dir: Path | None = None
    limit: int | None = None
    seed: int = 0


# Measures one unit: numbers by key, "num_examples" among them, and whatever else is to be kept.
Measure = Callable[[Request], Mapping[str, Any]]
# Writes the local files of a suite below a root, from the hub; returns what it has written.
Prepare = Callable[[Path], list[Path]]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One table or figure of the paper.

    Args:
        name: as users type it, and as the folder of its local files is called.
        title: as the paper has it.
        tasks: in the order of the columns.
        max_length: tokens of context and answer that the model is given at most; more is an error
            unless truncation is asked for. With `lengths` it is what comes on top of the length.
        prepare: writes its local files from the hub.
        lengths: at which each task is measured; none for tasks of a given length.
        num_fewshot: examples before each question.
        paper: rows of the paper's table, a number for each column in order, the average last.
        measure: how a unit is measured; through lm-eval by default.
        local: the local files that a unit needs; <task>.jsonl by default.
        reads_files: it knows local files alone; without a folder of them, `prepare` fetches them
            to OUT/data.
        own: makes a task of any other local file, DIR/<suite>/<name>.jsonl, from its name; such
            tasks are measured when they are asked for.
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
                    f"paper[{row!r}] must have {columns + 1} numbers, one for each column and the "
                    f"average, got {len(numbers)}"
                )

    def with_tasks(self, names: Iterable[str]) -> Suite:
        """The suite with its own tasks of these names behind the others; ValueError if it has none.

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
        """The suite with these of its tasks, and those columns of the paper's rows.

        The paper's average is of all columns; it becomes NaN where one is gone.

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
        """The units to measure: all, or those of some tasks and lengths.

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
        """How many tokens the model is given at most for this unit."""
        return self.max_length + (unit.length or 0)


class _Suites(Mapping[str, Suite]):
    """Suites by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Suite:
        return importlib.import_module(MODULES[name]).SUITE

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


SUITES: Mapping[str, Suite] = _Suites()


def check_suites(names: Sequence[str]) -> None:
    """Raise unless these are names of suites, and there is one."""
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"suites must be of {', '.join(SUITES)}; got {unknown or 'none'}")
