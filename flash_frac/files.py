"""Files that are whole or not there: written under another name, then renamed.

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


def read_object(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; ValueError that names it unless that is an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object of JSON, got {str(content)[:60]}")
    return content


def write_text(path: Path, text: str) -> Path:
    """Write a file at once, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write an object as JSON that people can read."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one object a line."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
