"""The rows of the benchmarks and the file they go to.

Every row of every benchmark has the columns below. ms_* are times of one call, in a decode row of
one step; tokens_per_s follows from ms_p50. peak_mib is memory at its highest: in a row of `ops.py`
what a call adds, in one of `model.py` all that is allocated on the GPU, weights included. error is
against float64: in a row of `ops.py` that of the scan, in one of `model.py` that of a small model
on the same kernels. What is not known is empty.
Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from flash_frac.bench.timing import print_rows
from flash_frac.provenance import git_commit, version_of

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("implementation", "pass", "B", "T", "H", "M", "D", "dtype"),
    *("ms_p20", "ms_p50", "ms_p80", "tokens_per_s", "peak_mib", "error"),
    *("command", "commit", "machine", "threads", "python", "torch", "triton", "transformers"),
)


def describe_machine(script: str, arguments: Iterable[str], commit: str | None) -> dict:
    """Where and with what: the columns that make a row repeatable."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *_measured(arguments)]),
        "commit": commit or git_commit() or "unknown",
        "machine": gpu or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "triton", "transformers")},
    }


def _measured(arguments: Iterable[str]) -> list[str]:
    """The arguments without those that say where rows go and what they are of."""
    given = list(arguments)
    for name in ("--out", "--commit"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
    return given


def default_path() -> Path:
    """The file of this machine's rows: one for each kind of GPU, one for all CPUs."""
    if not torch.cuda.is_available():
        return RESULTS / "cpu.csv"
    return RESULTS / f"{torch.cuda.get_device_name().split()[-1].lower()}.csv"


def check_header(path: Path) -> None:
    """ValueError if the file is there and its columns are not ours."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        header = next(csv.reader(file), [])
    if header != list(COLUMNS):
        differ = sorted(set(header) ^ set(COLUMNS)) or ["their order"]
        raise ValueError(
            f"{path} must have the columns of benchmarks/measure.py, but these differ: "
            f"{', '.join(differ)}; migrate its rows or choose another file with --out"
        )


def append(rows: Iterable[Mapping], path: Path) -> None:
    """Add rows to a file, which is made if missing; columns that a row lacks stay empty."""
    check_header(path)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def row_keeper(
    script: str, typed: Iterable[str], options: argparse.Namespace
) -> Callable[[list[dict]], None]:
    """What prints rows and appends them at once, so that they outlast a later failure."""
    path = options.out or default_path()
    check_header(path)
    # Before the first row is written: from then on the tree differs from its commit.
    machine = describe_machine(script, typed, options.commit)

    def keep(rows: list[dict]) -> None:
        print_rows(rows)
        append([row | machine for row in rows], path)

    return keep


def add_options(parser: argparse.ArgumentParser, *, peers: bool = True) -> None:
    """The options that all benchmarks have, and that of those with peers."""
    if peers:
        parser.add_argument("--no-peers", action="store_true", help="time our code alone")
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--out", type=Path, help="CSV to append to; benchmarks/results/<gpu>.csv")
