"""The rows of all benchmarks: how they are made, printed, kept in a CSV file and read back.

Every row has the columns below. ms_* are times of one call, in a decode row of one step;
tokens_per_s follows from ms_p50. peak_mib is memory at its highest: of an operator what a call
adds, of a model all that is allocated on the GPU, weights included. error is against float64: of
an operator that of the scan, of a model that of a small model on the same kernels. What is not
known is empty. Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

import argparse
import csv
import io
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from flash_frac.bench.timing import Times
from flash_frac.files import append_text, read_table
from flash_frac.provenance import provenance

MADE_WITH = ("command", "commit", "machine", "threads", "python", "torch", "triton", "transformers")
COLUMNS = (
    *("implementation", "pass", "B", "T", "H", "M", "D", "dtype"),
    *("ms_p20", "ms_p50", "ms_p80", "tokens_per_s", "peak_mib", "error"),
    *MADE_WITH,
)


def make_row(
    implementation: str,
    passed: str,
    shape: Mapping[str, int | None],
    dtype: torch.dtype,
    times: Times,
    *,
    tokens: int | None,
    peak: int | None,
    error: float | None,
) -> dict:
    """The columns that a measurement fills.

    Args:
        passed: what was run.
        tokens: those of a call; None where its time does not depend on them.
    """
    return {
        "implementation": implementation,
        "pass": passed,
        **shape,
        "dtype": str(dtype).removeprefix("torch."),
        **{f"ms_{name}": round(value, 3) for name, value in times._asdict().items()},
        "tokens_per_s": None if tokens is None else round(1e3 * tokens / times.p50, 1),
        "peak_mib": peak,
        "error": None if error is None else f"{error:.1e}",
    }


def print_rows(rows: Iterable[Mapping]) -> None:
    for row in rows:
        speed = row["tokens_per_s"]
        speed = "" if speed is None else f"{speed:13,.1f} tokens/s"
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:7d} MiB"
        error = "" if row["error"] is None else f"  error {row['error']}"
        print(
            f"{row['implementation']:46} {row['pass']:17} {row['B']:3d} x {row['T']:5d} "
            f"{row['ms_p50']:10.3f} ms {speed} {peak}{error}",
            flush=True,
        )


def describe_machine(script: str, arguments: Iterable[str], commit: str | None) -> dict:
    """Where and with what: the columns that make a row repeatable."""
    made_with = provenance()
    return {
        **{name: made_with[name] for name in MADE_WITH if name in made_with},
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *_measured(arguments)]),
        "commit": commit or made_with["commit"] or "unknown",
        "threads": torch.get_num_threads(),
    }


def _measured(arguments: Iterable[str]) -> list[str]:
    """The arguments without those that name the file of the rows and their commit."""
    given = list(arguments)
    for name in ("--out", "--commit"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
    return given


def default_path(results: Path) -> Path:
    """The file of this machine's rows in a folder: one for each kind of GPU, one for all CPUs."""
    if not torch.cuda.is_available():
        return results / "cpu.csv"
    return results / f"{torch.cuda.get_device_name().split()[-1].lower()}.csv"


def check_header(path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """ValueError if the file exists with other columns, or damaged."""
    if not path.exists():
        return
    header, _ = read_table(path)
    if header != list(columns):
        differ = sorted(set(header) ^ set(columns)) or ["their order"]
        raise ValueError(
            f"{path} must have the columns of flash_frac/bench, but these differ: "
            f"{', '.join(differ)}; migrate its rows or choose another file with --out"
        )


def read_rows(path: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """The rows of a file, oldest first; what is not known is empty.

    Example: `read_rows(Path("benchmarks/results/h200.csv"))[-1]["tokens_per_s"]`
    """
    check_header(path, columns)
    return read_table(path)[1]


def append_rows(rows: Iterable[Mapping], path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Add rows to a file, which is made if missing; columns that a row lacks stay empty."""
    check_header(path, columns)
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if new:
        writer.writeheader()
    writer.writerows(rows)
    append_text(path, text.getvalue())


def row_keeper(
    script: str, typed: Iterable[str], options: argparse.Namespace
) -> Callable[[Sequence[Mapping]], None]:
    """A function that prints rows and appends them at once, so that they outlast a later failure.

    Args:
        script: path of the benchmark; rows go to the folder `results` next to it.
        typed: its command line, and `options` what it means, with those of `add_options`.
    """
    path = options.out or default_path(Path(script).parent / "results")
    check_header(path)
    # Before the first row is written: from then on the tree differs from its commit.
    machine = describe_machine(script, typed, options.commit)

    def keep(rows: Sequence[Mapping]) -> None:
        print_rows(rows)
        append_rows([{**row, **machine} for row in rows], path)

    return keep


def add_options(parser: argparse.ArgumentParser, *, peers: Iterable[str] = ()) -> None:
    """The options that all benchmarks have, and those of benchmarks with peers."""
    if names := [*peers]:
        parser.add_argument("--peers", nargs="+", choices=names, default=names)
        parser.add_argument("--no-peers", action="store_true", help="time our code alone")
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--out", type=Path, help="CSV to append to; benchmarks/results/<gpu>.csv")
