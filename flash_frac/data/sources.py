"""Documents from files: .txt, .jsonl, .parquet, .fa and .fasta; the text ones also .gz and .zst.

A document without any text (empty, or only white space) is skipped; a file without one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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
# Rows of parquet that are in memory at a time.
BATCH_ROWS = 256


def find_files(paths: Sequence[str], *, argument: str = "data_files") -> list[Path]:
    """The files behind a list of files and folders.

    Folders are searched to the bottom, in sorted order; hidden files and other suffixes in them
    are passed over.

    Args:
        paths: files and folders.
        argument: what the caller calls them, for errors.

    Example: `find_files(["books", "more.jsonl.gz"])`
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            found = _search(path)
            if not found:
                raise ValueError(
                    f"{argument}: the folder {path} holds no file to read; "
                    f"expected one of {', '.join(SUFFIXES)}"
                )
            files += found
        elif not path.exists():
            raise ValueError(
                f"{argument}: {path} does not exist (looked in {Path.cwd()}); check the spelling, "
                "or give the whole path"
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
            raise ValueError(f"{argument}: {path} is given twice; leave one of them out")
        seen.add(path.resolve())
    return files


def suffix_of(path: Path) -> str | None:
    """The known suffix a file's name ends with, or None. Example: ".jsonl.gz" of `a.jsonl.gz`."""
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)


def read_documents(
    path: str | Path,
    *,
    text_field: str = "text",
    progress: Callable[[int], object] | None = None,
) -> Iterator[str]:
    """The documents of a file, one at a time, in order.

    A .txt file is one document, with its line ends as they are; a line of .jsonl and a row of
    .parquet is one, in the field `text_field`; a record of FASTA is one, without its header and
    line ends. A byte order mark at the start of a file is dropped.

    Args:
        path: the file.
        text_field: the field of .jsonl and .parquet.
        progress: called with the number of bytes of the file that were read since the last call.

    Raises:
        ValueError: with the file and the line or row, when it cannot be read.

    Example: `texts = list(read_documents("books.jsonl.zst"))`
    """
    path = Path(path)
    suffix = suffix_of(path)
    report = progress or (lambda _: None)
    if suffix is None:
        raise ValueError(f"{path} has an unknown suffix; expected one of {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        documents = _parquet(path, text_field, report)
    else:
        documents = _text_documents(path, suffix, text_field, report)
    empty = True
    for text in documents:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise _no_text(path)


def _search(folder: Path) -> list[Path]:
    files = (p for p in folder.rglob("*") if suffix_of(p) and p.is_file())
    hidden = (p for p in files if not any(x.startswith(".") for x in p.relative_to(folder).parts))
    return sorted(hidden)


def _no_text(path: Path) -> ValueError:
    return ValueError(f"{path} holds no text; fill it, or leave it out")


def _text_documents(
    path: Path, suffix: str, text_field: str, report: Callable[[int], object]
) -> Iterator[str]:
    kind = suffix.removesuffix(".gz").removesuffix(".zst")
    try:
        with open_bytes(path, report) as file:
            if kind == ".txt":
                yield _decode(path, file.read().removeprefix(BYTE_ORDER_MARK))
            elif kind == ".jsonl":
                yield from _jsonl(path, file, text_field)
            else:
                yield from _fasta(path, file)
    except broken_errors(path) as error:
        raise ValueError(
            f"{path} is cut short or damaged ({error}): copy or download it again"
        ) from error


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, 1):
        yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _decode(path: Path, content: bytes, *, line: int = 1) -> str:
    """Text of UTF-8 bytes that begin in line `line` of the file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise ValueError(
            f"{path}, line {line}: not UTF-8 (byte 0x{content[error.start]:02x}); convert the "
            "file, for instance with iconv -f latin1 -t utf8"
        ) from error


def _jsonl(path: Path, file: IO[bytes], text_field: str) -> Iterator[str]:
    for number, line in _lines(file):
        content = _decode(path, line.strip(), line=number)
        if not content:
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: malformed JSON ({error}); expected one object on each line, such as "
                f'{{"{text_field}": "..."}}: correct or drop the line'
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: expected a JSON object with the field {text_field!r}, "
                f"got {type(row).__name__}; wrap the text in an object"
            )
        if text_field not in row:
            raise _missing_field(where, text_field, row)
        text = check_text(row[text_field], where, text_field)
        # Half of a letter can be written only as an escape, and no UTF-8 can hold it.
        if ("\\ud" in content or "\\uD" in content) and _has_surrogates(text):
            raise ValueError(
                f"{where}: the field {text_field!r} holds half of a surrogate pair (\\ud...), "
                "which is no letter: correct or drop the line"
            )
        yield text


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _missing_field(where: str, text_field: str, fields: Iterable[str]) -> ValueError:
    names = ", ".join(map(str, fields)) or "none"
    return ValueError(
        f"{where}: no field {text_field!r} (there: {names}); set text_field to the one with the "
        "text"
    )


def check_text(value: object, where: str, text_field: str) -> str:
    """`value`, if it is text; ValueError that says where it is not."""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: the field {text_field!r} must be text, got {type(value).__name__}; set "
            "text_field to another one, or drop what has no text"
        )
    return value


def _fasta(path: Path, file: IO[bytes]) -> Iterator[str]:
    parts: list[str] | None = None
    for number, line in _lines(file):
        content = line.strip()
        if content.startswith(b">"):
            if parts is not None:
                yield "".join(parts)
            parts = []
        elif content and parts is None:
            raise ValueError(
                f"{path}, line {number}: a FASTA file begins with a header, '>' and a name; "
                "add one, or name the file .txt"
            )
        elif parts is not None:
            parts.append(_decode(path, content, line=number))
    if parts is not None:
        yield "".join(parts)


def _parquet(path: Path, text_field: str, report: Callable[[int], object]) -> Iterator[str]:
    arrow = require("pyarrow", "train", "reading .parquet files")
    parquet = require("pyarrow.parquet", "train", "reading .parquet files")
    size, row, done = path.stat().st_size, 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise _missing_field(str(path), text_field, file.schema_arrow.names)
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    yield check_text(_as_python(path, row, value), f"{path}, row {row}", text_field)
                report(size * row // total - done)
                done = size * row // total
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as error:
        raise ValueError(
            f"{path}, row {row + 1}: cannot be read as parquet ({error}); write or download it "
            "again"
        ) from error


def _as_python(path: Path, row: int, value: Any) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, row {row}: not UTF-8; write the column again from decoded text"
        ) from error
