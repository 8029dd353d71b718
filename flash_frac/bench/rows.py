"""Rows of all benchmarks: create, print, store in a CSV file and read back.

Every row has the columns below. ms_* are times of one call, in a decode row of one step;
tokens_per_s follows from ms_p50. peak_mib is peak memory: for an operator what a call adds, for a
model everything allocated on the GPU, including weights. error is against float64: for an operator
that of the scan, for a model that of a small model on the same kernels. Unknown values are empty.
mode is "eager" if kernels were launched one by one, or "graph" for CUDA graphs. state_bytes is the
size of a model's state for one sequence of T tokens.
Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
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
from flash_frac.files import read_table, write_bytes
from flash_frac.provenance import provenance

MADE_WITH = ("command", "commit", "machine", "threads", "python", "torch", "triton", "transformers")
COLUMNS = (
    *("implementation", "pass", "B", "T", "H", "M", "D", "dtype"),
    *("ms_p20", "ms_p50", "ms_p80", "tokens_per_s", "peak_mib", "error"),
    *MADE_WITH,
)
# Columns that older files may lack.
ADDED = ("mode", "state_bytes")
COLUMNS += ADDED


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
    mode: str | None = None,
    state_bytes: int | None = None,
) -> dict:
    """The columns of a measurement.

    Args:
        passed: the pass that was run.
        tokens: tokens per call; None if the time does not depend on them.
        mode: "eager" or "graph", for a model.
        state_bytes: for one sequence.
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
        "mode": mode,
        "state_bytes": state_bytes,
    }


def print_rows(rows: Iterable[Mapping]) -> None:
    for row in rows:
        speed = row["tokens_per_s"]
        speed = "" if speed is None else f"{speed:13,.1f} tokens/s"
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:7d} MiB"
        error = "" if row["error"] is None else f"  error {row['error']}"
        mode = f" {row['mode'] or '':5}"
        print(
            f"{row['implementation']:46} {row['pass']:17} {row['B']:3d} x {row['T']:5d} "
            f"{row['ms_p50']:10.3f} ms {speed} {peak}{mode}{error}",
            flush=True,
        )


def describe_machine(script: str, arguments: Iterable[str], commit: str | None) -> dict:
    """Machine, versions and command: the columns that make a row reproducible."""
    made_with = provenance()
    return {
        **{name: made_with[name] for name in MADE_WITH if name in made_with},
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *_measured(arguments)]),
        "commit": commit or made_with["commit"] or "unknown",
        "threads": torch.get_num_threads(),
    }


def _measured(arguments: Iterable[str]) -> list[str]:
    """The arguments without output files and the commit."""
    given = list(arguments)
    for name in ("--out", "--logs", "--commit"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
        given = [word for word in given if not word.startswith(f"{name}=")]
    return given


def default_path(results: Path) -> Path:
    """The file for this machine's rows: one per kind of GPU, and one for all CPUs."""
    if not torch.cuda.is_available():
        return results / "cpu.csv"
    return results / f"{torch.cuda.get_device_name().split()[-1].lower()}.csv"


def check_header(path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Raise a ValueError if the file is damaged or has wrong columns; it may lack ADDED ones."""
    if not path.exists():
        return
    header, _ = read_table(path)
    if header not in (list(columns), [name for name in columns if name not in ADDED]):
        differ = sorted(set(header) ^ set(columns)) or ["their order"]
        raise ValueError(
            f"{path} must have the columns of flash_frac/bench, but these differ: "
            f"{', '.join(differ)}; migrate its rows or choose another file with --out"
        )


def read_rows(path: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """The rows of a file, oldest first; unknown values are empty.

    Example: `read_rows(Path("benchmarks/results/h200.csv"))[-1]["tokens_per_s"]`
    """
    check_header(path, columns)
    return [dict.fromkeys(columns, "") | row for row in read_table(path)[1]]


def append_rows(rows: Iterable[Mapping], path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Append rows to a file, created if missing; missing columns stay empty.

    The whole file is replaced, so neither a kill nor a full disk leaves half a row.
    """
    before = read_rows(path, columns) if path.exists() else []
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*before, *rows])
    write_bytes(path, table.getvalue().encode())


def print_plain(rows: Iterable[Mapping]) -> None:
    print(*rows, sep="\n", flush=True)


def row_keeper(
    script: str,
    typed: Iterable[str],
    options: argparse.Namespace,
    *,
    kind: str = "",
    columns: Sequence[str] = COLUMNS,
    show: Callable[[Sequence[Mapping]], None] = print_rows,
) -> Callable[[Sequence[Mapping]], Sequence[Mapping]]:
    """A function that shows rows and appends them at once, so that they survive a later failure.

    It returns the rows.

    Args:
        script: path of the benchmark; rows go to the folder `results` next to it.
        typed: its command line; `options`: the same parsed, with those of `add_options`.
        kind: folder in `results` for rows with other columns than these.
    """
    path = options.out or default_path(Path(script).parent / "results" / kind)
    check_header(path, columns)
    # Read this before the first row is written: afterwards the tree differs from its commit.
    machine = describe_machine(script, typed, options.commit)

    def keep(rows: Sequence[Mapping]) -> Sequence[Mapping]:
        show(rows)
        append_rows([{**row, **machine} for row in rows], path, columns)
        return rows

    return keep


def add_options(parser: argparse.ArgumentParser, *, peers: Iterable[str] = ()) -> None:
    """Add the options of all benchmarks, and those of benchmarks with peers."""
    if names := [*peers]:
        parser.add_argument("--peers", nargs="+", choices=names, default=names)
        parser.add_argument("--no-peers", action="store_true", help="time only our code")
    parser.add_argument("--commit", help="commit to record if there is no git")
    parser.add_argument("--out", type=Path, help="CSV to append to; benchmarks/results/<gpu>.csv")
