"""Atomic file writes: a file is written under another name, synced to disk, then renamed.

A full disk gives a one-line error and leaves nothing behind. Output paths are checked before the
work starts, and an unreadable file gives an error that names it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

# The type of a JSON value.
Kind = type | UnionType
NO_FIELDS: Mapping[str, Kind] = MappingProxyType({})
# Messages of write errors in native libraries: the first is of safetensors and tokenizers, the
# others are of different parts of torch.
_UNWRITTEN = r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream"


# The field of a record that holds its checksum.
CHECKSUM = "sha256"


class WriteError(OSError):
    """A file could not be written; the message names it and the disk space that it needs."""


def check_folder(folder: Path, option: str) -> Path:
    """Raise ValueError naming the option unless files can be written to a folder.

    The folder need not exist; it is created when there is something to write.
    """
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder} cannot be written to: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written to: {nearest} is read-only")
    return folder


def check_file(path: Path, option: str) -> Path:
    """Like `check_folder`, for a file, which may already exist."""
    check_folder(path.parent, option)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    return path


def decode_text(content: bytes, name: object) -> str:
    """Decode the content of a file; raise ValueError naming it if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises ValueError naming it if it is damaged."""
    try:
        return json.loads(decode_text(path.read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_object(path: Path, fields: Mapping[str, Kind] = NO_FIELDS) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError naming the file if it holds no object.

    Args:
        fields: required fields of the object, with their types.

    Example: `read_object(Path("run/run.json"), {"model": dict, "order": dict})["order"]`
    """
    return check_object(read_json(path), path, fields)


def check_object(
    content: Any, name: object, fields: Mapping[str, Kind] = NO_FIELDS
) -> dict[str, Any]:
    """Return the content if it is an object with these fields, else raise ValueError naming it."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a JSON object, got {str(content).strip()[:60]}")
    for field, kind in fields.items():
        if not isinstance(content.get(field), kind):
            raise ValueError(
                f"{name} is damaged: {field!r} must be of type {getattr(kind, '__name__', kind)}, "
                f"got {str(content.get(field))[:60]}"
            )
    return content


def read_objects(
    path: Path, fields: Mapping[str, Kind] = NO_FIELDS, *, cut_off: bool = False
) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; raises ValueError naming file and line if one is damaged.

    Args:
        fields: as in `read_object`.
        cut_off: ignore a last line without its end, which a killed process may have left.

    Example: `read_objects(Path("data/lm/piqa.jsonl"))[0]["goal"]`
    """
    rows = []
    with path.open("rb") as lines:
        for number, content in enumerate(lines, 1):
            name = f"{path} line {number}"
            if cut_off and not content.endswith(b"\n"):
                break
            try:
                row = json.loads(decode_text(content, name))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{name} is not JSON: {error}") from error
            rows.append(check_object(row, name, fields))
    return rows


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file; raises ValueError naming the line if a row is incomplete.

    Example: `columns, rows = read_table(Path("benchmarks/results/h200.csv"))`
    """
    text = decode_text(path.read_bytes(), path)
    remedy = "restore the file, or delete that line"
    if (zero := text.find("\0")) >= 0:
        # A power failure can leave zero bytes, which csv would accept.
        line = text.count("\n", 0, zero) + 1
        raise ValueError(f"{path} line {line} is damaged (it holds zero bytes): {remedy}")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[dict[str, str]] = []
    try:
        columns = next(reader, [])
        for cells in reader:
            if len(cells) != len(columns):
                raise ValueError(
                    f"{path} line {reader.line_num} has {len(cells)} values for {len(columns)} "
                    f"columns: {remedy}"
                )
            rows.append(dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} is damaged ({error}): {remedy}") from error
    # Without a line end, the last value may be cut off.
    if text and not text.endswith("\n"):
        raise ValueError(f"{path} line {reader.line_num} is cut off, it has no line end: {remedy}")
    return columns, rows


def is_unwritten(error: Exception, folder: Path) -> bool:
    """Whether an error means that a file in a folder could not be written.

    The error may come from Python or a native library. Errors about other files, such as one being
    read, and about connections do not count.
    """
    if isinstance(error, WriteError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    if not isinstance(error, OSError):
        return re.search(_UNWRITTEN, str(error)) is not None
    # copytree raises shutil.Error, with a list. Network clients raise an OSError without errno.
    if error.errno is None:
        return isinstance(error, shutil.Error)
    folder = folder.absolute()
    # A failed write names no file. A folder that cannot be created may be a parent.
    paths = [Path(os.fsdecode(x)).absolute() for x in (error.filename, error.filename2) if x]
    return all(folder.is_relative_to(x) or x.is_relative_to(folder) for x in paths)


@contextmanager
def drafted(path: Path, size: int, *, durable: bool = True) -> Iterator[Path]:
    """Yield a draft path for a file or folder; it becomes `path` when the block succeeds.

    If it cannot be written, neither the draft nor a folder created for it remains.

    Args:
        size: bytes to be written, for the error message.
        durable: as in `put_in_place`.

    Raises:
        WriteError: names the path, the reason, and the disk space needed and available.

    Example: `with drafted(Path("a.txt"), 2) as draft: draft.write_text("hi")`
    """
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    draft = path.with_name(f".{path.name}.{process_name()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            # Files that are not durable come by the thousand, and their folder is cleared at once.
            _collect_drafts(path)
        yield draft
        put_in_place(draft, path, durable=durable)
    except Exception as error:
        # Libraries raise other classes for a full disk; all other errors pass through.
        if isinstance(error, WriteError) or not is_unwritten(error, path.parent):
            raise
        raise WriteError(
            f"{path} could not be written: {why_unwritten(path, error, size)}"
        ) from error
    finally:
        _remove(draft)
        for folder in made:
            # On success the folder is not empty, and rmdir fails.
            with suppress(OSError):
                folder.rmdir()


def process_name() -> str:
    """A name for this process, unique among all that share a disk, for use in file names."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _collect_drafts(path: Path) -> None:
    """Delete drafts of a file that dead processes of this machine left behind."""
    begin, end = f".{path.name}.{socket.gethostname()}-", ".part"
    for name in os.listdir(path.parent):
        number = name.removeprefix(begin).removesuffix(end)
        if name == f"{begin}{number}{end}" and number.isdecimal() and not _runs(int(number)):
            _remove(path.with_name(name))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process belongs to another user.
        return True
    return True


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    # If its parent is not a folder, the main error already says so.
    with suppress(OSError):
        draft.unlink()


def why_unwritten(path: Path, error: Exception, size: int, *, or_more: bool = False) -> str:
    """One line with the reason, the bytes needed and the bytes free.

    Args:
        or_more: `size` is only what was written before the failure.
    """
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    # copytree raises a list of failures, each (from, to, why).
    first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
    reason = " ".join(str(getattr(first, "strerror", None) or first).split())
    free = shutil.disk_usage(nearest).free
    needed = f"more than {size:,}" if or_more else f"{size:,}"
    return f"{reason}; it needs {needed} bytes, and {free:,} bytes are free on that disk"


def folder_size(folder: Path) -> int:
    """Total bytes of all files in a folder and its subfolders."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files to a folder, created if needed: all of them or, if one fails, none.

    Example: `write_files(Path("memory"), {"index.html": page, "report.json": numbers})`
    """
    size = sum(map(len, contents.values()))
    with ExitStack() as stack:
        for name, content in contents.items():
            stack.enter_context(drafted(folder / name, size)).write_bytes(content)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file atomically, creating its folder if needed."""
    write_files(path.parent, {path.name: content})
    return path


def write_text(path: Path, text: str) -> Path:
    """Like `write_bytes`, for text."""
    return write_bytes(path, text.encode())


def append_text(path: Path, text: str) -> None:
    """Append to a file; raise WriteError naming it on failure, which may leave a partial line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        why = why_unwritten(path, error, len(text.encode()))
        raise WriteError(f"{path} could not be written: {why}") from error


def write_json(path: Path, value: Any) -> Path:
    """Write an object as indented JSON; NaN and inf become null."""
    return write_text(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False) + "\n")


def without_nan(value: Any) -> Any:
    """A copy of a value with NaN and inf replaced by None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_record(path: Path, value: Mapping[str, Any]) -> Path:
    """Write an object as JSON with a checksum, which `read_record` verifies.

    Example: `write_record(Path("lm/piqa.json"), {"task": "piqa", "accuracy": 0.5})`
    """
    plain = json.loads(json.dumps(without_nan(value)))
    return write_json(path, {**plain, CHECKSUM: _checksum(plain)})


def read_record(path: Path, fields: Mapping[str, Kind] = NO_FIELDS) -> dict[str, Any]:
    """The object of `write_record`; raises ValueError naming the file if a value has changed.

    Files of earlier versions have no checksum and are not verified.
    """
    content = read_object(path, fields)
    if content.pop(CHECKSUM, total := _checksum(content)) != total:
        raise ValueError(f"{path} is damaged: its values do not match its checksum")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    values = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one JSON object per line; NaN and inf become null."""
    lines = (json.dumps(without_nan(row), ensure_ascii=False) + "\n" for row in rows)
    return write_text(path, "".join(lines))


def put_in_place(draft: Path, target: Path, *, durable: bool = True) -> Path:
    """Rename a finished file or folder; after a power failure either the old or the new one exists.

    Its files reach the disk before the rename, and the rename before this returns. They get the
    mode of the user's umask, which safetensors ignores.

    Args:
        durable: wait for the disk. If False, a power failure may damage the file, and its reader
            must detect that.
    """
    inner = list(draft.rglob("*")) if draft.is_dir() else []
    for path in (*inner, draft):
        if path.is_file():
            path.chmod(0o666 & ~_umask())
        if durable:
            sync(path)
    os.replace(draft, target)
    for folder in {draft.parent, target.parent} if durable else ():
        sync(folder)
    return target


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # It can only be read by setting it; files that other threads create meanwhile are private.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
