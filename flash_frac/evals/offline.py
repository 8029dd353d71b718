"""Evaluation without a network: local files for every task, and nothing fetched behind one's back.

DIR/<suite>/<task>.jsonl            one JSON object a line, with the fields of the dataset
DIR/<suite>/<task>.<split>.jsonl    other splits, where a task needs more than one
DIR/niah/*.txt                      essays in which needles are hidden
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flash_frac.evals.suites import Suite, Task
from flash_frac.extras import require

SOURCE = "SOURCE.txt"


@contextmanager
def no_downloads() -> Iterator[None]:
    """Whatever would fetch something from the hub raises an error instead."""
    constants = require("huggingface_hub.constants", "eval", "--data-dir")
    config = require("datasets.config", "eval", "--data-dir")
    # The variable is read once, when these packages are imported; children read it again.
    with (
        patch.dict(os.environ, HF_HUB_OFFLINE="1", HF_EVALUATE_OFFLINE="1"),
        patch.object(constants, "HF_HUB_OFFLINE", True),
        patch.object(config, "HF_HUB_OFFLINE", True),
        patch.object(config, "HF_DATASETS_OFFLINE", True),
    ):
        yield


def missing_files(data_dir: Path, suite: Suite, tasks: Iterable[Task]) -> list[Path]:
    """Files that these tasks need and that are not there."""
    needed = [path for task in tasks for path in suite.files(data_dir, task)]
    return [path for path in dict.fromkeys(needed) if not path.is_file()]


def how_to_get(data_dir: Path, suite: str) -> str:
    """The command that writes the files of a suite."""
    return f"frac eval prepare {data_dir} --suite {suite}, on a machine with a network"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines.

    Example: `read_rows(Path("data/lm/piqa.jsonl"))[0]["goal"]`
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} must be an object, got {line.strip()[:60]}")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no line; one JSON object a line is expected")
    return rows


def source_of(folder: Path) -> str | None:
    """What the folder of a suite says of where its files are from."""
    path = folder / SOURCE
    return path.read_text("utf-8").strip().rstrip(".") if path.is_file() else None


def fingerprints(paths: Iterable[Path]) -> dict[str, str]:
    """A short hash of each file by its name, to tell whether a result is of the same data."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}
