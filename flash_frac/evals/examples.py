"""The examples of tasks: read local files, or download them from the hub.

DIR/<suite>/<task>.jsonl            one JSON object per line, with the fields of the dataset
DIR/<suite>/<task>.<split>.jsonl    other splits, if a task needs more than one
DIR/niah/*.txt                      essays in which needles are hidden
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flash_frac.evals.suites import SUITES, Request, Suite, Task, check_suites
from flash_frac.extras import require
from flash_frac.files import read_objects, write_rows

SOURCE = "SOURCE.txt"


@contextmanager
def no_downloads() -> Iterator[None]:
    """A block in which any download from the hub raises an error."""
    constants = require("huggingface_hub.constants", "eval", "--data-dir")
    config = require("datasets.config", "eval", "--data-dir")
    # The packages read the variable once, at import; child processes read it again.
    with (
        patch.dict(os.environ, HF_HUB_OFFLINE="1", HF_EVALUATE_OFFLINE="1"),
        patch.object(constants, "HF_HUB_OFFLINE", True),
        patch.object(config, "HF_HUB_OFFLINE", True),
        patch.object(config, "HF_DATASETS_OFFLINE", True),
    ):
        yield


def missing_files(data_dir: Path, suite: Suite, tasks: Iterable[Task]) -> list[Path]:
    """Missing files of these tasks."""
    needed = [path for task in tasks for path in suite.files(data_dir, task)]
    return [path for path in dict.fromkeys(needed) if not path.is_file()]


def how_to_get(data_dir: Path, suite: str) -> str:
    """The command that downloads the files of a suite."""
    return f"frac eval prepare {data_dir} --suite {suite}, on a machine with a network"


def prepare(data_dir: Path, suites: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Download the missing local files of suites from the hub.

    Args:
        data_dir: root of the files, DIR/<suite>/<task>.jsonl.
        suites: names of suites.

    Returns:
        The files written, and those that are still missing.

    Example: `prepare(Path("data"), ["lm", "niah"])`
    """
    check_suites(suites)
    written: list[Path] = []
    for name in suites:
        if still_missing(data_dir, [name]):
            written += SUITES[name].prepare(data_dir)
    return written, still_missing(data_dir, suites)


def still_missing(data_dir: Path, suites: Sequence[str]) -> list[Path]:
    """Missing files of all tasks of these suites."""
    every = [SUITES[name] for name in suites]
    return [path for suite in every for path in missing_files(data_dir, suite, suite.tasks)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file.

    Example: `read_rows(Path("data/lm/piqa.jsonl"))[0]["goal"]`
    """
    rows = read_objects(path)
    if not rows:
        raise ValueError(f"{path} is empty; expected one JSON object per line")
    return rows


def source_of(folder: Path) -> str | None:
    """The origin of a suite's files, from SOURCE.txt in their folder, or None."""
    path = folder / SOURCE
    return path.read_text("utf-8").strip().rstrip(".") if path.is_file() else None


def fingerprints(paths: Iterable[Path]) -> dict[str, str]:
    """A short hash of each file, by name, to check that a result is for the same data."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


@dataclass(frozen=True, kw_only=True)
class Source:
    """The dataset of a task on the Hugging Face hub.

    Args:
        dataset: its id.
        config: name of its configuration.
        split: name of its split.
        text: keep only this field, renamed to "text"; by default all fields are kept.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    text: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Download the examples.

        Example: `next(Source(dataset="hazyresearch/based-fda", split="validation").rows())["key"]`
        """
        load = require("datasets", "eval", "frac eval").load_dataset
        try:
            rows = load(self.dataset, self.config, split=self.split)
        except ConnectionError as error:
            raise ValueError(
                f"{self.dataset} cannot be downloaded ({error}); run `frac eval prepare` on a "
                "machine with a network, and pass its files with --data-dir"
            ) from error
        for row in rows:
            yield dict(row) if self.text is None else {"text": row[self.text]}


def read_records(request: Request, source: Source | None) -> list[dict[str, Any]]:
    """The examples of the request's task: all, or the first `limit`.

    They are read from local files in `request.data_dir`; if it is None, they are downloaded.

    Example: `read_records(request, SOURCES["pg19"])[0]["text"]`
    """
    suite, task = request.suite.name, request.unit.task
    if request.data_dir is None:
        if source is None:
            raise ValueError(f"task {task.name} is a local file: pass its folder with --data-dir")
        return list(islice(source.rows(), request.limit))
    path = task.files(request.data_dir / suite)[task.splits[0]]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: download it with {how_to_get(request.data_dir, suite)}"
        )
    return read_rows(path)[: request.limit]


def prepare_from_hub(folder: Path, sources: Mapping[str, Source]) -> list[Path]:
    """Write `folder/<task>.jsonl` for each task whose file is missing, and return the new files.

    Example: `prepare_from_hub(Path("data/recall"), {"fda": Source(dataset="...")})`
    """
    paths = {task: folder / f"{task}.jsonl" for task in sources}
    lacking = [task for task, path in paths.items() if not path.is_file()]
    return [write_rows(paths[task], sources[task].rows()) for task in lacking]
