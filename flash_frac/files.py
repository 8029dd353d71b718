"""Files that are whole or not there: written beside their place, then moved to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
