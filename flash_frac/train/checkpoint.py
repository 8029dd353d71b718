"""Checkpoints that are there whole or not at all.

One is written under `.saving-<process>` and renamed to `checkpoint-<step>` when complete; an old
one is renamed to `.removing-<process>` before it is deleted. Whatever moment a process dies, the
folders named checkpoint-* are complete. A manifest, written last, tells what became of one since.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flash_frac.extras import require
from flash_frac.files import (
    drafted,
    folder_size,
    is_unwritten,
    process_name,
    put_in_place,
    sync,
    why_unwritten,
)
from flash_frac.manifest import MANIFEST, check_manifest, write_manifest

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
    """Delete what processes that died left half-written or half-deleted; the caller has the lock.

    Earlier versions did not name the process.
    """
    for prefix in (SAVING, REMOVING):
        for folder in Path(output_dir).glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(
    output_dir: str | Path, name: str, *, writer: str, main: bool, wait: Callable[[], object]
) -> Iterator[Path]:
    """A folder to write into, which becomes output_dir/name when all processes are done.

    Args:
        writer: name of the process that renames and deletes, and of the draft.
        main: whether this process is that one.
        wait: returns when all processes have called it.

    Raises:
        CheckpointError: if files cannot be written; the folder is then deleted.

    Example:
        >>> with whole("a", "final", writer=process_name(), main=True, wait=lambda: None) as draft:
        ...     (draft / "config.json").touch()
    """
    drafts = Path(output_dir) / f"{SAVING}-{writer}"
    draft = drafts / name
    if main:
        shutil.rmtree(drafts, ignore_errors=True)
    wait()
    try:
        draft.mkdir(parents=True, exist_ok=True)
        yield draft
        wait()
        if main:
            write_manifest(draft)
            publish(draft, Path(output_dir))
    except Exception as error:
        # tokenizers has no class of its own for a disk that is full.
        if not is_unwritten(error, Path(output_dir)):
            raise
        last = last_checkpoint(output_dir)
        # The best guess is another one; of the first, only what was written until now is known.
        why = why_unwritten(draft, error, folder_size(last or drafts), or_more=last is None)
        shutil.rmtree(drafts, ignore_errors=True)
        good = "there is no checkpoint yet, so the same command begins again"
        if last is not None:
            good = f"the last good checkpoint is {last}, from which the same command resumes"
        raise CheckpointError(
            f"{name} could not be written to {output_dir}: {why}. Make room; {good}"
        ) from error
    wait()


def publish(draft: Path, folder: Path) -> Path:
    """Make a finished draft a checkpoint, or the final model, of the run in a folder."""
    for path in folder.iterdir():
        if path.is_file():
            # The log up to a checkpoint is as safe as the checkpoint.
            sync(path)
    final = folder / draft.name
    before = _set_aside(final) if final.exists() else None
    put_in_place(draft, final)
    draft.parent.rmdir()
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; at no moment is there half of one under its name."""
    shutil.rmtree(_set_aside(checkpoint), ignore_errors=True)


def _set_aside(checkpoint: Path) -> Path:
    doomed = checkpoint.parent / f"{REMOVING}-{process_name()}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    return doomed


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
    if (checkpoint / MANIFEST).exists():
        check_manifest(checkpoint)
    merge = require("accelerate.utils", "train", "consolidate").merge_fsdp_weights
    with drafted(output, folder_size(checkpoint / SHARDS)) as draft:
        draft.mkdir()
        merge(str(checkpoint / SHARDS), str(draft), safe_serialization=True)
        for name in _ALSO:
            if (checkpoint / name).exists():
                shutil.copy2(checkpoint / name, draft / name)
        write_manifest(draft)
    return output
