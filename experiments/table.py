"""Results of an experiment: a CSV file with rows found by key, replaced atomically.

Also shared by all runs: command-line options, and the columns for versions, machine and commit.
"""

from __future__ import annotations

import argparse
import csv
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_frac.files import read_table, write_text
from flash_frac.provenance import provenance, version_of

Key = tuple[str, ...]


class Table:
    """Rows of `columns` in the file `path`; the first `num_key` columns identify a row.

    Values are kept as text. Saving writes a new file and then replaces the old one, so an
    interruption loses nothing. Only one process may write at a time.

    Example:
        >>> table = Table("results.csv", ("model", "seed", "accuracy"), num_key=2)
        >>> if ("frac", "0") not in table:
        ...     table.append([{"model": "frac", "seed": 0, "accuracy": 0.99}])
    """

    def __init__(self, path: str | Path, columns: Sequence[str], *, num_key: int) -> None:
        self.path, self.columns, self.num_key = Path(path), tuple(columns), num_key
        self.rows: dict[Key, dict[str, str]] = {}
        if self.path.exists():
            columns, rows = read_table(self.path)
            if tuple(columns) != self.columns:
                raise ValueError(
                    f"{self.path} must have the columns {', '.join(self.columns)}, got "
                    f"{', '.join(columns)}; move it away or name another file"
                )
            self.rows = {self._key(row): row for row in rows}

    def _key(self, row: Mapping[str, object]) -> Key:
        return tuple(str(row[name]) for name in self.columns[: self.num_key])

    def __contains__(self, key: Sequence[object]) -> bool:
        return tuple(map(str, key)) in self.rows

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows, or replace rows with the same key, and save."""
        for row in rows:
            text = {name: "" if row[name] is None else str(row[name]) for name in self.columns}
            self.rows[self._key(text)] = text
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows.values())
        write_text(self.path, text.getvalue())


def add_run_options(
    parser: argparse.ArgumentParser, *, smoke: str = "tiny runs, in seconds on a CPU"
) -> None:
    """Add the options of every run: output folder, commit, and a smoke test on a CPU.

    Args:
        smoke: help of --smoke.
    """
    parser.add_argument("--out", type=Path, help="folder of results.csv; default: the experiment's")
    parser.add_argument("--commit", help="commit to record if git is not available")
    parser.add_argument("--smoke", action="store_true", help=smoke)


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, smoke: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse a command line; with --smoke, options that it does not name get the values `smoke`."""
    if parser.parse_args(arguments).smoke:
        parser.set_defaults(**smoke)
    return parser.parse_args(arguments)


def out_folder(options: argparse.Namespace, here: Path) -> Path:
    """The folder of --out; by default the experiment's, or a temporary one for a smoke test."""
    return options.out or (Path(tempfile.mkdtemp()) if options.smoke else here)


def made_with(
    commit: str | None, names: Sequence[str] = ("commit", "machine", "torch")
) -> dict[str, Any]:
    """Provenance columns by name: versions, machine and commit.

    Call it before the first row is written, because that makes the work tree dirty.

    Args:
        commit: value of --commit; this repository's if None.
    """
    known = provenance()
    known["commit"] = commit or known["commit"] or "unknown"
    return {name: known[name] if name in known else version_of(name) for name in names}
