"""Files that are whole or not there: written under another name, brought to the disk, then renamed.

Outputs are checked before the work that they are to hold, and texts name their file when they
cannot be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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


def write_text(path: Path, text: str) -> Path:
    """Write a file at once, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        return put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> Path:
    """Write an object as JSON that people can read."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one object a line."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


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
