"""Which checkpoint a run goes on from: one whose files are those of its manifest.

Resuming from a checkpoint without its optimizer, or with other bytes in it, would go on as another
run. One like that is put aside and the one before it is taken; a line says so.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from transformers import TrainerState

from flash_frac.files import read_json, read_object, sync
from flash_frac.manifest import MANIFEST, ManifestError, NoManifestError, check_manifest
from flash_frac.models.loading import damaged_file
from flash_frac.train.checkpoint import checkpoints

# Trainer takes another step without a word where one of these is missing; an optimizer of FSDP
# has a folder, and several processes have a rng_state each.
_STATE = ("optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json")


def newest_whole(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that its manifest confirms, or None if there is no checkpoint at all.

    Newer ones that are refused are renamed to damaged-checkpoint-<step>: nothing is lost, and the
    run writes them again.

    Raises:
        ValueError: if there are checkpoints, and all are refused.
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
            print(f"{error}: taking {folder.name} instead; {aside} is put aside", flush=True)
        return folder
    if refused:
        reasons = "; ".join(map(str, refused.values()))
        unlisted = [path for path, error in refused.items() if isinstance(error, NoManifestError)]
        also = (f", or resume unverified with --resume_from_checkpoint {x}" for x in unlisted)
        raise ValueError(
            f"output_dir {output_dir} holds no checkpoint that can be resumed: {reasons}. Delete "
            f"them to begin again{next(also, '')}"
        )
    return None


def _put_aside(checkpoint: Path) -> Path:
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    sync(aside.parent)
    return aside


def check_asked(folder: Path) -> Path:
    """A checkpoint that the user names; ValueError that names its first bad file.

    One without a manifest, as earlier versions wrote them, is taken if it looks complete.
    """
    if not (folder / "trainer_state.json").exists():
        raise ValueError(
            f"resume_from_checkpoint {folder} is no complete checkpoint: it has no "
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
    """A sentence on the first file besides the weights that cannot be read."""
    path = folder / "trainer_state.json"
    try:
        TrainerState.load_from_json(str(path))
        read_object(path, dict.fromkeys(("global_step", "max_steps", "train_batch_size"), int))
        for path in folder.glob("config.json"):
            read_json(path)
        for path in sorted((*folder.glob("*.pt"), *folder.glob("*.pth"))):
            _check_archive(path)
    # Of JSON, of its encoding, of fields that are missing or strange, and of archives.
    except (ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        return str(error) if str(path) in str(error) else f"{path} is damaged: {error}"
    return None


def _check_archive(path: Path) -> None:
    """ValueError or BadZipFile unless a file of torch.save has the checksums that it holds."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"its part {name} does not match its checksum")


def describe_fresh_parts(folder: Path) -> str | None:
    """What begins again because the checkpoint was saved without it, by save_only_model."""
    lacking = _lacking(folder)
    return lacking and f"{lacking}: optimizer and learning rate begin again (save_only_model)"


def check_best(folder: Path) -> None:
    """ValueError unless the checkpoint that `final` is to be is there and whole."""
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
            "final model. Bring it back, resume from an earlier one with --resume_from_checkpoint, "
            "or set load_best_model_at_end to false"
        )


def best_of(checkpoint: Path) -> Path | None:
    """The best checkpoint so far as one knows it, wherever their folder is now."""
    best = read_object(checkpoint / "trainer_state.json").get("best_model_checkpoint")
    return None if best is None else checkpoint.parent / Path(best).name
