"""Options shared by several `frac` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub id of a Frac model.")
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Folder, hub id, bytes or dna; default: the checkpoint's own."
    ),
]


def check_given(path: Path, option: str) -> Path:
    """Raise a ValueError naming the option unless it names a file that exists."""
    if not path.is_file():
        raise ValueError(
            f"{option} {path} " + ("is a folder" if path.is_dir() else "does not exist")
        )
    return path


def named_tokenizer(name: str | None) -> Any:
    """The tokenizer that the option names, or None for the checkpoint's own."""
    if name is None:
        return None
    from flash_frac.data import load_tokenizer

    return load_tokenizer(name, needs_eos=False)
