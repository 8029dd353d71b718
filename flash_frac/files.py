"""Files that are whole or not there: written under another name, then renamed.

A full disk gets an error of one line, and nothing is left behind. Outputs are checked before the
work that they are to hold, and texts name their file when they cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

# How libraries that are not written in Python say that a file could not be written: safetensors and
# tokenizers by the first, torch by the others, depending on which of its parts meets it.
_UNWRITTEN = r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream"


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
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def is_unwritten(error: Exception) -> bool:
    """Whether an error says that a file could not be written, whichever library raised it."""
    return isinstance(error, OSError) or re.search(_UNWRITTEN, str(error)) is not None


@contextmanager
def drafted(path: Path, size: int) -> Iterator[Path]:
    """A name for a file or folder to write, which becomes `path` when the block ends well.

    If it cannot be written, neither a draft nor a folder that was made for it stays.

    Args:
        size: bytes that are to be written, for the error.

    Raises:
        WriteError: names the path, the reason, and the room that is needed and there.

    Example: `with drafted(Path("a.txt"), 2) as draft: draft.write_text("hi")`
    """
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(path)
    except Exception as error:
        if isinstance(error, WriteError) or not is_unwritten(error):
            raise
        raise WriteError(
            f"{path} could not be written: {why_unwritten(path, error, size)}"
        ) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        draft.unlink(missing_ok=True)
        for folder in made:
            # It is not empty if all went well.
            with suppress(OSError):
                folder.rmdir()


def why_unwritten(path: Path, error: Exception, size: int | None) -> str:
    """The reason in one line, the bytes that are needed, if that is known, and those free."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    # copytree gives a list of all that went wrong, (from, to, why).
    first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
    reason = " ".join(str(getattr(first, "strerror", None) or first).split())
    free = shutil.disk_usage(nearest).free
    needed = "" if size is None else f"it needs {size:,} bytes, and "
    return f"{reason}; {needed}{free:,} bytes are free on that disk"


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


def write_json(path: Path, value: Any) -> Path:
    """Write an object as JSON that people can read."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one object a line."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
