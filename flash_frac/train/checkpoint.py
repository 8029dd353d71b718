"""Atomic checkpoints: each exists completely or not at all.

A checkpoint is written under `.saving-<process>` and renamed to `checkpoint-<step>` when complete;
an old one is renamed to `.removing-<process>` before it is deleted. Whenever a process dies, the
folders named checkpoint-* are complete. A manifest, written last, shows any later damage.
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
    """Delete half-written or half-deleted checkpoints of dead processes; the caller has the lock.

    The prefix alone matches too, because earlier versions did not add the process.
    """
    for prefix in (SAVING, REMOVING):
        for folder in Path(output_dir).glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(
    output_dir: str | Path, name: str, *, writer: str, main: bool, wait: Callable[[], object]
) -> Iterator[Path]:
    """Yield a folder to write to; it becomes output_dir/name when all processes are done.

    Args:
        writer: name of the process that renames and deletes; the draft is named after it.
        main: whether this process is the writer.
        wait: a barrier: returns when all processes have called it.

    Raises:
        CheckpointError: if files cannot be written; the folder is then deleted.

    Example:
        >>> with whole("a", "final", writer=process_name(), main=True, wait=lambda: None) as draft:
        ...     (draft / "config.json").touch()
    """
    draft = clear_draft(output_dir, name, writer=writer, main=main)
    wait()
    with naming_the_last_good_one(draft):
        draft.mkdir(parents=True, exist_ok=True)
        yield draft
        wait()
        if main:
            complete(draft)
    wait()


def clear_draft(output_dir: str | Path, name: str, *, writer: str, main: bool) -> Path:
    """The folder in which output_dir/name is drafted, without leftovers of an earlier draft.

    Args:
        writer, main: as in `whole`.
    """
    drafts = Path(output_dir) / f"{SAVING}-{writer}"
    if main:
        shutil.rmtree(drafts, ignore_errors=True)
    return drafts / name


def complete(draft: Path) -> Path:
    """Turn a fully written draft into a checkpoint, or into the final model."""
    write_manifest(draft)
    return publish(draft, draft.parent.parent)


@contextmanager
def naming_the_last_good_one(draft: Path) -> Iterator[None]:
    """Raise CheckpointError and delete the draft if one of its files cannot be written."""
    drafts, output_dir = draft.parent, draft.parent.parent
    try:
        yield
    except Exception as error:
        # tokenizers raises a plain Exception if the disk is full.
        if not is_unwritten(error, output_dir):
            raise
        last = last_checkpoint(output_dir)
        # The last checkpoint predicts the size; for the first, only the bytes so far are known.
        why = why_unwritten(draft, error, folder_size(last or drafts), or_more=last is None)
        shutil.rmtree(drafts, ignore_errors=True)
        good = "there is no checkpoint yet, so the same command starts over"
        if last is not None:
            good = f"the same command then resumes from the last good checkpoint, {last}"
        raise CheckpointError(
            f"{draft.name} could not be written to {output_dir}: {why}. Free disk space; {good}"
        ) from error


def publish(draft: Path, folder: Path) -> Path:
    """Move a finished draft to its final name in the folder of the run."""
    for path in folder.iterdir():
        if path.is_file():
            # The log must survive a crash if the checkpoint does.
            sync(path)
    final = folder / draft.name
    before = _set_aside(final) if final.exists() else None
    put_in_place(draft, final)
    draft.parent.rmdir()
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; its name never refers to a half-deleted one."""
    shutil.rmtree(_set_aside(checkpoint), ignore_errors=True)


def _set_aside(checkpoint: Path) -> Path:
    doomed = checkpoint.parent / f"{REMOVING}-{process_name()}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    return doomed


def rotate(output_dir: str | Path, limit: int | None, best: str | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`, but never the best one."""
    if limit is None or limit <= 0:
        return
    kept = {Path(best).name} if best else set()
    others = [path for path in checkpoints(output_dir) if path.name not in kept]
    for path in others[: max(0, len(others) - max(limit - len(kept), 1))]:
        remove(path)


def consolidate(checkpoint: str | Path, output: str | Path) -> Path:
    """Merge the sharded weights of a checkpoint into a new folder for `from_pretrained`.

    The configuration and tokenizer are copied as well.

    Example:
        >>> consolidate("runs/big/checkpoint-1000", "big-1000")
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if not (checkpoint / SHARDS).is_dir():
        raise ValueError(
            f"{checkpoint} has no {SHARDS}, so it is not a sharded checkpoint. If it holds "
            "model.safetensors, from_pretrained loads it directly"
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
