"""Select the checkpoint that a run resumes from: the newest whose files match its manifest.

Resuming without the optimizer state, or from changed bytes, would continue a different run. Such a
checkpoint is set aside and the one before it is used, with a message.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from pickle import UnpicklingError

from transformers import TrainerState

from flash_frac.files import read_json, read_object, sync
from flash_frac.manifest import MANIFEST, ManifestError, NoManifestError, check_manifest
from flash_frac.models.loading import damaged_file
from flash_frac.train import shards
from flash_frac.train.checkpoint import SHARDS, checkpoints

# Trainer resumes silently if one of these is missing. FSDP saves the optimizer as a folder, and
# with several processes each saves its own rng_state.
_STATE = ("optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json")

_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, EOFError, FileNotFoundError)
_DAMAGE += (zipfile.BadZipFile, UnpicklingError)


def newest_whole(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that matches its manifest, or None if there is no checkpoint at all.

    Newer ones that do not match are renamed to damaged-checkpoint-<step>: nothing is lost, and the
    run will write them again.

    Raises:
        ValueError: if there are checkpoints, but none matches.
    """
    refused: dict[Path, ManifestError] = {}
    for folder in reversed(checkpoints(output_dir)):
        try:
            check_manifest(folder)
        except ManifestError as error:
            refused[folder] = error
            continue
        for damaged, error in refused.items():
            aside = _put_aside(damaged)
            print(f"{error}: using {folder.name} instead; moved to {aside}", flush=True)
        return folder
    if refused:
        reasons = "; ".join(map(str, refused.values()))
        unlisted = [path for path, error in refused.items() if isinstance(error, NoManifestError)]
        also = (f", or resume unverified with --resume_from_checkpoint {x}" for x in unlisted)
        raise ValueError(
            f"output_dir {output_dir} holds no checkpoint that can be resumed: {reasons}. Delete "
            f"them to start over{next(also, '')}"
        )
    return None


def _put_aside(checkpoint: Path) -> Path:
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    sync(aside.parent)
    return aside


def check_asked(folder: Path) -> Path:
    """Check a checkpoint that the user names; raise ValueError naming its first bad file.

    One without a manifest, from an earlier version, is accepted if it looks complete.
    """
    if not (folder / "trainer_state.json").exists():
        raise ValueError(
            f"resume_from_checkpoint {folder} is not a complete checkpoint: it has no "
            "trainer_state.json"
        )
    try:
        check_manifest(folder)
    except NoManifestError:
        damage = damaged_file(folder) or _lacking(folder) or _damaged_state(folder)
        if damage is not None:
            raise ValueError(f"resume_from_checkpoint {folder} is refused: {damage}") from None
        print(f"{folder} has no {MANIFEST}: its files cannot be verified", flush=True)
    except ManifestError as error:
        raise ValueError(f"resume_from_checkpoint {folder} is refused: {error}") from error
    return folder


def _lacking(folder: Path) -> str | None:
    for pattern in _STATE:
        if next(folder.glob(pattern), None) is None:
            return f"{folder / pattern} is missing"
    return None


def _damaged_state(folder: Path) -> str | None:
    """A message about the first unreadable file other than the weights, or None."""
    path = folder / "trainer_state.json"
    try:
        TrainerState.load_from_json(str(path))
        read_object(path, dict.fromkeys(("global_step", "max_steps", "train_batch_size"), int))
        for path in folder.glob("config.json"):
            read_json(path)
        for path in sorted((*folder.glob("*.pt"), *folder.glob("*.pth"))):
            _check_archive(path)
        for path in (folder / shards.OPTIMIZER, folder / SHARDS):
            if path.is_dir():
                shards.check(path)
    # Invalid JSON or encoding, missing or unexpected fields, and damaged archives.
    except _DAMAGE as error:
        return str(error) if str(path) in str(error) else f"{path} is damaged: {error}"
    return None


def _check_archive(path: Path) -> None:
    """Raise ValueError or BadZipFile unless a torch.save file matches its own checksums."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"its part {name} does not match its checksum")


def describe_fresh_parts(folder: Path) -> str | None:
    """A message about state that starts fresh because save_only_model left it out, or None."""
    lacking = _lacking(folder)
    return lacking and f"{lacking}: optimizer and learning rate start fresh (save_only_model)"


def check_best(folder: Path) -> None:
    """Raise ValueError unless the best checkpoint, the source of `final`, is complete."""
    problem = None if folder.is_dir() else f"{folder} is missing"
    try:
        if folder.is_dir():
            check_manifest(folder)
    except NoManifestError:
        problem = damaged_file(folder)
    except ManifestError as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(
            f"{problem}: it is the best checkpoint so far, which load_best_model_at_end makes the "
            "final model. Restore it, resume from an earlier one with --resume_from_checkpoint, or "
            "set load_best_model_at_end to false"
        )


def best_of(checkpoint: Path) -> Path | None:
    """The best checkpoint that a checkpoint records, even if their folder has moved."""
    best = read_object(checkpoint / "trainer_state.json").get("best_model_checkpoint")
    return None if best is None else checkpoint.parent / Path(best).name
