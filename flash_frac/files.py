"""Files that are whole or not there: written under another name, brought to the disk, then renamed.

A full disk gets an error of one line, and nothing is left behind. Outputs are checked before the
work that they are to hold, and texts name their file when they cannot be read.
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

# Of a value of JSON.
Kind = type | UnionType
NO_FIELDS: Mapping[str, Kind] = MappingProxyType({})
# How libraries that are not written in Python say that a file could not be written: safetensors and
# tokenizers by the first, torch by the others, depending on which of its parts meets it.
_UNWRITTEN = r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream"


# Field of a record.
CHECKSUM = "sha256"


class WriteError(OSError):
    """A file could not be written; the message names it, and says how much room it needs."""


def check_folder(folder: Path, option: str) -> Path:
    """ValueError that names the option unless files can be written below a folder.

    It need not exist: it is made when there is something to write.
    """
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder} cannot be written to: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written to: {nearest} is read-only")
    return folder


def check_file(path: Path, option: str) -> Path:
    """The same for a file, which may exist already."""
    check_folder(path.parent, option)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    return path


def decode_text(content: bytes, name: object) -> str:
    """The text of a file; ValueError that names it if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text in UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """What a file of JSON holds; ValueError that names it if it is damaged."""
    try:
        return json.loads(decode_text(path.read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_object(path: Path, fields: Mapping[str, Kind] = NO_FIELDS) -> dict[str, Any]:
    """The object in a file of JSON; ValueError that names the file if there is none.

    Args:
        fields: what the object must have, and of which type.

    Example: `read_object(Path("run/run.json"), {"model": dict, "order": dict})["order"]`
    """
    return check_object(read_json(path), path, fields)


def check_object(
    content: Any, name: object, fields: Mapping[str, Kind] = NO_FIELDS
) -> dict[str, Any]:
    """The content, if it is an object with these fields; ValueError that begins with its name."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be an object of JSON, got {str(content).strip()[:60]}")
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
    """The objects of a file with one a line; ValueError that names file and line if one is damaged.

    Args:
        fields: as for `read_object`.
        cut_off: leave out a last line without its end, where a process may have been killed.

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
    """Columns and rows of a CSV file; ValueError that names file and line if a row is not whole.

    Example: `columns, rows = read_table(Path("benchmarks/results/h200.csv"))`
    """
    text = decode_text(path.read_bytes(), path)
    remedy = "restore the file, or delete that line"
    if (zero := text.find("\0")) >= 0:
        # A power cut leaves them; csv takes them for letters.
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
    # The last value may have lost its end.
    if text and not text.endswith("\n"):
        raise ValueError(f"{path} line {reader.line_num} is cut off, it has no line end: {remedy}")
    return columns, rows


def is_unwritten(error: Exception, folder: Path) -> bool:
    """Whether an error says that a file below a folder could not be written.

    It comes from Python or another library. An error of another file, as one that is read
    meanwhile, or of a connection is none.
    """
    if isinstance(error, WriteError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    if not isinstance(error, OSError):
        return re.search(_UNWRITTEN, str(error)) is not None
    # copytree has a list of what went wrong. Clients of a network raise an OSError without errno.
    if error.errno is None:
        return isinstance(error, shutil.Error)
    folder = folder.absolute()
    # A write names no file. A folder that cannot be made may be one above.
    paths = [Path(os.fsdecode(x)).absolute() for x in (error.filename, error.filename2) if x]
    return all(folder.is_relative_to(x) or x.is_relative_to(folder) for x in paths)


@contextmanager
def drafted(path: Path, size: int, *, durable: bool = True) -> Iterator[Path]:
    """A name for a file or folder to write, which becomes `path` when the block ends well.

    If it cannot be written, neither a draft nor a folder that was made for it stays.

    Args:
        size: bytes that are to be written, for the error.
        durable: as for `put_in_place`.

    Raises:
        WriteError: names the path, the reason, and the room that is needed and there.

    Example: `with drafted(Path("a.txt"), 2) as draft: draft.write_text("hi")`
    """
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    draft = path.with_name(f".{path.name}.{process_name()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if durable:
            # Others come by the thousand, and their folder is cleared as a whole.
            _collect_drafts(path)
        yield draft
        put_in_place(draft, path, durable=durable)
    except Exception as error:
        # Libraries have other classes for a full disk; all other errors pass.
        if isinstance(error, WriteError) or not is_unwritten(error, path.parent):
            raise
        raise WriteError(
            f"{path} could not be written: {why_unwritten(path, error, size)}"
        ) from error
    finally:
        _remove(draft)
        for folder in made:
            # It is not empty if all went well.
            with suppress(OSError):
                folder.rmdir()


def process_name() -> str:
    """This process among all that may write to a shared disk, as a part of a file's name."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _collect_drafts(path: Path) -> None:
    """Delete the drafts of a file that killed processes of this machine have left."""
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
        # Of another user.
        return True
    return True


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    # Its folder may be no folder, which the error says already.
    with suppress(OSError):
        draft.unlink()


def why_unwritten(path: Path, error: Exception, size: int, *, or_more: bool = False) -> str:
    """The reason in one line, the bytes that are needed, and those that are free.

    Args:
        or_more: `size` is what was written until it failed.
    """
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    # copytree gives a list of all that went wrong, (from, to, why).
    first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
    reason = " ".join(str(getattr(first, "strerror", None) or first).split())
    free = shutil.disk_usage(nearest).free
    needed = f"more than {size:,}" if or_more else f"{size:,}"
    return f"{reason}; it needs {needed} bytes, and {free:,} bytes are free on that disk"


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files of a folder, which is made if need be: all of them or, if one fails, none.

    Example: `write_files(Path("memory"), {"index.html": page, "report.json": numbers})`
    """
    size = sum(map(len, contents.values()))
    with ExitStack() as stack:
        for name, content in contents.items():
            stack.enter_context(drafted(folder / name, size)).write_bytes(content)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file at once, making its folder if need be."""
    write_files(path.parent, {path.name: content})
    return path


def write_text(path: Path, text: str) -> Path:
    """The same for a text."""
    return write_bytes(path, text.encode())


def append_text(path: Path, text: str) -> None:
    """Add to a file; WriteError that names it if that fails, after which it may end in a part."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        why = why_unwritten(path, error, len(text.encode()))
        raise WriteError(f"{path} could not be written: {why}") from error


def write_json(path: Path, value: Any) -> Path:
    """Write an object as JSON that people can read; NaN and inf become null."""
    return write_text(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False) + "\n")


def without_nan(value: Any) -> Any:
    """A value for JSON, which has no number for NaN and inf: None in their place."""
    if isinstance(value, Mapping):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_record(path: Path, value: Mapping[str, Any]) -> Path:
    """`write_json` of an object with a checksum, which `read_record` compares: numbers that count.

    Example: `write_record(Path("lm/piqa.json"), {"task": "piqa", "accuracy": 0.5})`
    """
    plain = json.loads(json.dumps(without_nan(value)))
    return write_json(path, {**plain, CHECKSUM: _checksum(plain)})


def read_record(path: Path, fields: Mapping[str, Kind] = NO_FIELDS) -> dict[str, Any]:
    """The object of `write_record`; ValueError that names the file if one of its values changed.

    Files of earlier versions have no checksum, and are taken as they are.
    """
    content = read_object(path, fields)
    if content.pop(CHECKSUM, total := _checksum(content)) != total:
        raise ValueError(f"{path} is damaged: its values do not match its checksum")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    values = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one object a line; NaN and inf become null."""
    lines = (json.dumps(without_nan(row), ensure_ascii=False) + "\n" for row in rows)
    return write_text(path, "".join(lines))


def put_in_place(draft: Path, target: Path, *, durable: bool = True) -> Path:
    """Rename a finished file or folder; after a power cut the old one or the new one is there.

    Its files reach the disk before the rename, and the rename before this returns. They get the
    mode that the user's umask asks for, which safetensors does not heed.

    Args:
        durable: wait for the disk. Else a power cut may damage it, which its reader must notice.
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
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # It can only be read by setting it; meanwhile other threads may make files that are private.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
