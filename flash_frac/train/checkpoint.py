"""Checkpoints that are there whole or not at all.

One is written under `.saving` and renamed to `checkpoint-<step>` when complete; an old one is
renamed to `.removing` before it is deleted. Whatever moment a process dies, the folders named
checkpoint-* are complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flash_frac.extras import require
from flash_frac.files import drafted, folder_size, is_unwritten, why_unwritten

SAVING, REMOVING = ".saving", ".removing"
SHARDS = "pytorch_model_fsdp_0"
_ALSO = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says which is the last good one."""


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folder = Path(output_dir)
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return (checkpoints(output_dir) or [None])[-1]


def clear_leftovers(output_dir: str | Path) -> None:
    """Delete what a process that died left half-written or half-deleted."""
    for name in (SAVING, REMOVING):
        shutil.rmtree(Path(output_dir) / name, ignore_errors=True)


@contextmanager
def whole(
    output_dir: str | Path, name: str, *, main: bool, wait: Callable[[], object]
) -> Iterator[Path]:
    """A folder to write into, which becomes output_dir/name when all processes are done.

    Args:
        main: whether this process is the one that renames and deletes.
        wait: returns when all processes have called it.

    Raises:
        CheckpointError: if files cannot be written; the folder is then deleted.

    Example: `with whole("runs/a", "final", main=True, wait=lambda: None) as draft: ...`
    """
    if main:
        clear_leftovers(output_dir)
    wait()
    draft = Path(output_dir) / SAVING / name
    try:
        draft.mkdir(parents=True, exist_ok=True)
        yield draft
        wait()
        if main:
            publish(output_dir, name)
    except Exception as error:
        # tokenizers has no class of its own for a disk that is full.
        if not is_unwritten(error):
            raise
        last = last_checkpoint(output_dir)
        # The best guess is another one; the first is not known before it is written.
        why = why_unwritten(draft, error, None if last is None else folder_size(last))
        clear_leftovers(output_dir)
        raise CheckpointError(
            f"{name} could not be written to {output_dir}: {why}. Make room; the last good "
            f"checkpoint is {last or 'none'}, from which the same command resumes"
        ) from error
    wait()


def sync_folder(folder: Path) -> None:
    """Bring the files of a folder, and its listing, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(output_dir: str | Path, name: str) -> Path:
    """Make the finished checkpoint `name` under .saving a checkpoint of the run."""
    folder = Path(output_dir)
    draft, final = folder / SAVING / name, folder / name
    sync_folder(draft)
    if final.exists():
        remove(final)
    os.replace(draft, final)
    sync_folder(folder / SAVING)
    (folder / SAVING).rmdir()
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; at no moment is there half of one under its name."""
    doomed = checkpoint.parent / REMOVING
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def rotate(output_dir: str | Path, limit: int | None, best: str | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`; the best one stays."""
    if limit is None or limit <= 0:
        return
    kept = {Path(best).name} if best else set()
    others = [path for path in checkpoints(output_dir) if path.name not in kept]
    for path in others[: max(0, len(others) - max(limit - len(kept), 1))]:
        remove(path)


def consolidate(checkpoint: str | Path, output: str | Path) -> Path:
    """Join the sharded weights of a checkpoint in a new folder for `from_pretrained`.

    Configuration and tokenizer are copied into it.

    Example:
        >>> consolidate("runs/big/checkpoint-1000", "big-1000")
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if not (checkpoint / SHARDS).is_dir():
        raise ValueError(
            f"{checkpoint} has no {SHARDS}: it is no checkpoint with sharded states. If it holds "
            "model.safetensors, from_pretrained takes it as it is"
        )
    if output.exists():
        raise ValueError(f"output {output} exists already; name a new folder")
    merge = require("accelerate.utils", "train", "consolidate").merge_fsdp_weights
    with drafted(output, folder_size(checkpoint / SHARDS)) as draft:
        draft.mkdir()
        merge(str(checkpoint / SHARDS), str(draft), safe_serialization=True)
        for name in _ALSO:
            if (checkpoint / name).exists():
                shutil.copy2(checkpoint / name, draft / name)
    return output
