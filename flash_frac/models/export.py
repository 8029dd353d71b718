"""Checkpoints that plain transformers can load if flash-frac is installed.

Every saved configuration names its model's classes in `auto_map`, and a file next to it imports
them. So `trust_remote_code=True` finds them in any release of transformers, without importing
flash_frac first.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from flash_frac.files import drafted, folder_size, read_object
from flash_frac.manifest import MANIFEST, check_manifest, write_manifest

MODULE = "modeling_frac"
AUTO_MAP = {
    "AutoConfig": "FracConfig",
    "AutoModel": "FracModel",
    "AutoModelForCausalLM": "FracForCausalLM",
    "AutoModelForSequenceClassification": "FracForSequenceClassification",
}
CODE = f'''"""The classes of this checkpoint, from flash-frac, which must be installed."""

from flash_frac.models import {", ".join(sorted(AUTO_MAP.values()))}  # noqa: F401
'''
# Training files of a checkpoint: large, pickled, and other trainers store access tokens in them.
_OF_TRAINING = ("training_args.bin", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth")


def auto_map() -> dict[str, str]:
    """Class names in the format of a configuration's `auto_map`."""
    return {auto: f"{MODULE}.{name}" for auto, name in AUTO_MAP.items()}


def write_code(folder: str | os.PathLike) -> None:
    """Write the file that `auto_map` names."""
    (Path(folder) / f"{MODULE}.py").write_text(CODE)


def export(checkpoint: str | Path, folder: str | Path) -> Path:
    """Copy a checkpoint to a new folder, for `transformers serve --trust-remote-code`.

    The server needs more than `auto_map`: it looks up the model's class name in transformers. The
    copy also adds `auto_map` to a checkpoint written by other tools, and leaves out files that are
    only needed to resume training.

    Args:
        checkpoint: a folder with a Frac model.
        folder: target of the copy; it must not exist.

    Example: `export("my-frac", "my-frac-portable")`
    """
    source, target = Path(checkpoint), Path(folder)
    if not (source / "config.json").is_file():
        raise ValueError(f"checkpoint must be a folder with a config.json, got {source}")
    config = read_object(source / "config.json")
    if config.get("model_type") != "frac":
        raise ValueError(
            f"checkpoint must be of a Frac model, got model_type {config.get('model_type')!r}"
        )
    if target.exists():
        raise ValueError(f"folder must not exist yet, got {target}; remove it or name another")
    verified = (source / MANIFEST).exists()
    if verified:
        check_manifest(source)
    # transformers finds an Auto class under this name, which then reads auto_map.
    config["architectures"] = ["AutoModelForCausalLM"]
    config["auto_map"] = auto_map()
    with drafted(target, folder_size(source)) as draft:
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*_OF_TRAINING))
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_code(draft)
        if verified:
            write_manifest(draft)
    return target
