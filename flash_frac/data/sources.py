"""Read documents from .txt, .jsonl, .fa and .fasta (also as .gz and .zst), and .parquet files.

Documents without text (empty, or only white space) are skipped; a file with no other is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from flash_frac.data.compression import broken_errors, open_bytes
from flash_frac.extras import require

TEXT_SUFFIXES = (".txt", ".jsonl", ".fa", ".fasta")
SUFFIXES = (
    *(kind + packed for kind in TEXT_SUFFIXES for packed in ("", ".gz", ".zst")),
    ".parquet",
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Parquet rows in memory at a time.
BATCH_ROWS = 256
# A part [start, stop) of a file: bytes of .jsonl, row groups of .parquet.
Span = tuple[int, int]


def find_files(paths: Sequence[str], *, argument: str = "data_files") -> list[Path]:
    """Expand a list of files and folders into files.

    Folders are searched recursively, in sorted order; hidden files and unknown suffixes are
    skipped.

    Args:
        paths: files and folders.
        argument: name of the argument for error messages.

    Example: `find_files(["books", "more.jsonl.gz"])`
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            found = _search(path)
            if not found:
                raise ValueError(
                    f"{argument}: the folder {path} holds no readable file; "
                    f"expected one of {', '.join(SUFFIXES)}"
                )
            files += found
        elif not path.exists():
            remedy = "or give the full path"
            if argument != "SOURCE":
                # Installed recipes name example folders, which are not in the wheel.
                remedy = f"or pass your own with --{argument}"
            raise ValueError(
                f"{argument}: {path} does not exist (looked in {Path.cwd()}); check the spelling, "
                f"{remedy}"
            )
        elif suffix_of(path) is None:
            raise ValueError(
                f"{argument}: {path} has an unknown suffix; expected one of {', '.join(SUFFIXES)}: "
                "rename or convert it"
            )
        else:
            files.append(path)
    seen: set[Path] = set()
    for path in files:
        if path.stat().st_size == 0:
            raise _no_text(path)
        if path.resolve() in seen:
            raise ValueError(f"{argument}: {path} is given twice; remove one of them")
        seen.add(path.resolve())
    return files


def suffix_of(path: Path) -> str | None:
    """The known suffix of a file name, or None. Example: ".jsonl.gz" for `a.jsonl.gz`."""
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)


def read_documents(
    path: str | Path,
    *,
    text_field: str = "text",
    progress: Callable[[int], object] | None = None,
    span: Span | None = None,
) -> Iterator[str]:
    """Yield the documents of a file in order.

    A .txt file is one document, with its line ends unchanged. Each .jsonl line and .parquet row is
    one, in the field `text_field`. Each FASTA record is one, without its header and line ends. A
    byte order mark at the start of a file is dropped.

    Args:
        path: the file.
        text_field: the field of .jsonl and .parquet.
        progress: called with the number of bytes read since the last call.
        span: read only this part of the file, see `divide_file`; it may hold no document.

    Raises:
        ValueError: with the file and the line or row, if it cannot be read.

    Example: `texts = list(read_documents("books.jsonl.zst"))`
    """
    path = Path(path)
    suffix = suffix_of(path)
    report = progress or (lambda _: None)
    if suffix is None:
        raise ValueError(f"{path} has an unknown suffix; expected one of {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        documents = _parquet(path, text_field, report, span)
    else:
        documents = _text_documents(path, suffix, text_field, report, span)
    empty = True
    for text in documents:
        if text and not text.isspace():
            empty = False
            yield text
    if empty and span is None:
        raise _no_text(path)


def divide_file(path: Path, size: int) -> list[Span] | None:
    """Divide a file into spans of about `size` bytes that can be read independently.

    Together they hold each document once, in order. Returns None if the file must be read as a
    whole: if it is neither .jsonl nor .parquet, or not larger than `size`.

    Example: `divide_file(Path("books.jsonl"), 1 << 28)`
    """
    units = path.stat().st_size
    count = math.ceil(units / size)
    suffix = suffix_of(path)
    if count <= 1 or suffix not in (".jsonl", ".parquet"):
        return None
    if suffix == ".parquet":
        try:
            with _open_parquet(path) as file:
                units = file.metadata.num_row_groups
        except _parquet_errors() as error:
            raise _unreadable(str(path), error) from error
    count = min(count, units)
    bounds = [units * number // count for number in range(count + 1)]
    return list(pairwise(bounds)) if count > 1 else None


def _search(folder: Path) -> list[Path]:
    files = (p for p in folder.rglob("*") if suffix_of(p) and p.is_file())
    hidden = (p for p in files if not any(x.startswith(".") for x in p.relative_to(folder).parts))
    return sorted(hidden)


def _no_text(path: Path) -> ValueError:
    return ValueError(f"{path} holds no text; add some, or leave the file out")


def _text_documents(
    path: Path, suffix: str, text_field: str, report: Callable[[int], object], span: Span | None
) -> Iterator[str]:
    kind = suffix.removesuffix(".gz").removesuffix(".zst")
    try:
        with open_bytes(path, report) as file:
            if kind == ".txt":
                yield _decode(_Line(path), file.read().removeprefix(BYTE_ORDER_MARK))
            elif kind == ".jsonl":
                yield from _jsonl(path, file, text_field, span)
            else:
                yield from _fasta(path, file)
    except broken_errors(path) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({error}): copy or download it again"
        ) from error


@dataclass(frozen=True)
class _Line:
    """A line of a file, for error messages; `number` counts from byte `start` on."""

    path: Path
    number: int = 1
    start: int = 0

    def __str__(self) -> str:
        before, left = 0, self.start
        with open(self.path, "rb") as file:
            while block := file.read(min(left, 1 << 20)):
                before, left = before + block.count(b"\n"), left - len(block)
        return f"{self.path}, line {before + self.number}"


def _lines(path: Path, file: IO[bytes], span: Span | None = None) -> Iterator[tuple[_Line, bytes]]:
    """The lines of a file, or those that start within a span of bytes."""
    start, stop = span or (0, math.inf)
    if start:
        # Skip the rest of the line that started before the span.
        file.seek(start - 1)
        start += len(file.readline()) - 1
    position = start
    for number, line in enumerate(file, 1):
        if position >= stop:
            return
        yield (
            _Line(path, number, start),
            line.removeprefix(BYTE_ORDER_MARK if not position else b""),
        )
        position += len(line)


def _decode(line: _Line, content: bytes) -> str:
    """Decode UTF-8 bytes that start in `line`, which errors name."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = replace(line, number=line.number + content.count(b"\n", 0, error.start))
        raise ValueError(
            f"{line}: not UTF-8 (byte 0x{content[error.start]:02x}); convert the file, for "
            "example with iconv -f latin1 -t utf8"
        ) from error


def _jsonl(path: Path, file: IO[bytes], text_field: str, span: Span | None) -> Iterator[str]:
    for where, line in _lines(path, file, span):
        content = _decode(where, line.strip())
        if not content:
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: malformed JSON ({error}); expected one object per line, such as "
                f'{{"{text_field}": "..."}}: fix or remove the line'
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: expected a JSON object with the field {text_field!r}, "
                f"got {type(row).__name__}; wrap the text in an object"
            )
        if text_field not in row:
            raise _missing_field(where, text_field, row)
        text = check_text(row[text_field], where, text_field)
        # An unpaired surrogate can only come from an escape, and UTF-8 cannot encode it.
        if ("\\ud" in content or "\\uD" in content) and _has_surrogates(text):
            raise ValueError(
                f"{where}: the field {text_field!r} holds half of a surrogate pair (\\ud...), "
                "which is not a character: fix or remove the line"
            )
        yield text


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _missing_field(where: object, text_field: str, fields: Iterable[str]) -> ValueError:
    names = ", ".join(map(str, fields)) or "none"
    return ValueError(
        f"{where}: no field {text_field!r}, only {names}; set text_field to the one with the text"
    )


def check_text(value: object, where: object, text_field: str) -> str:
    """Return `value` if it is text; otherwise raise ValueError with its location."""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: the field {text_field!r} must be text, got {type(value).__name__}; set "
            "text_field to another field, or remove rows without text"
        )
    return value


def _fasta(path: Path, file: IO[bytes]) -> Iterator[str]:
    parts: list[str] | None = None
    for where, line in _lines(path, file):
        content = line.strip()
        if content.startswith(b">"):
            if parts is not None:
                yield "".join(parts)
            parts = []
        elif content and parts is None:
            raise ValueError(
                f"{where}: a FASTA file must start with a header, '>' and a name; "
                "add one, or rename the file to .txt"
            )
        elif parts is not None:
            parts.append(_decode(where, content))
    if parts is not None:
        yield "".join(parts)


def _open_parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", "train", "reading .parquet files")
    return parquet.ParquetFile(path)


def _parquet_errors() -> tuple[type[Exception], ...]:
    arrow = require("pyarrow", "train", "reading .parquet files")
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError


def _unreadable(where: str, error: Exception) -> ValueError:
    return ValueError(f"{where}: cannot be read as parquet ({error}); write or download it again")


def _parquet(
    path: Path, text_field: str, report: Callable[[int], object], span: Span | None
) -> Iterator[str]:
    size, row, done = path.stat().st_size, 0, 0
    try:
        with _open_parquet(path) as file:
            if text_field not in file.schema_arrow.names:
                raise _missing_field(path, text_field, file.schema_arrow.names)
            facts = file.metadata
            groups = range(*(span or (0, facts.num_row_groups)))
            before = row = sum(facts.row_group(k).num_rows for k in range(groups.start))
            wanted = {"columns": [text_field], "row_groups": list(groups)}
            for batch in file.iter_batches(batch_size=BATCH_ROWS, **wanted):
                for value in batch.column(0):
                    row += 1
                    yield check_text(_as_python(path, row, value), f"{path}, row {row}", text_field)
                now = size * (row - before) // facts.num_rows
                report(now - done)
                done = now
    except _parquet_errors() as error:
        raise _unreadable(f"{path}, row {row + 1}", error) from error


def _as_python(path: Path, row: int, value: Any) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, row {row}: not UTF-8; write the column again from decoded text"
        ) from error
