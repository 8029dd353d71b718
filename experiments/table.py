"""Results of an experiment: a CSV file whose rows are found by their key, whole at every moment."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_frac.files import write_text

Key = tuple[str, ...]


class Table:
    """Rows of `columns` in the file `path`; the first `num_key` columns name a row.

    Values are kept as text. The file is written anew, aside, and then takes the old one's place, so
    that an interruption loses nothing. One process may write at a time.

    Example:
        >>> table = Table("results.csv", ("model", "seed", "accuracy"), num_key=2)
        >>> if ("frac", "0") not in table:
        ...     table.append([{"model": "frac", "seed": 0, "accuracy": 0.99}])
    """

    def __init__(self, path: str | Path, columns: Sequence[str], *, num_key: int) -> None:
        self.path, self.columns, self.num_key = Path(path), tuple(columns), num_key
        self.rows: dict[Key, dict[str, str]] = {}
        if self.path.exists():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != self.columns:
                    raise ValueError(
                        f"{self.path} must have the columns {', '.join(self.columns)}, got "
                        f"{', '.join(reader.fieldnames or ())}; move it away or name another file"
                    )
                self.rows = {self._key(row): row for row in reader}

    def _key(self, row: Mapping[str, object]) -> Key:
        return tuple(str(row[name]) for name in self.columns[: self.num_key])

    def __contains__(self, key: Sequence[object]) -> bool:
        return tuple(map(str, key)) in self.rows

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows, or replace those of the same key, and save."""
        for row in rows:
            text = {name: "" if row[name] is None else str(row[name]) for name in self.columns}
            self.rows[self._key(text)] = text
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows.values())
        write_text(self.path, text.getvalue())
