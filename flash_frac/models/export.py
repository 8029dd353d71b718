"""Checkpoints that plain transformers loads by itself, if flash-frac is installed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

MODULE = "modeling_frac"
CODE = '"""The classes of this checkpoint, from flash-frac, which must be installed."""\n\n'
CODE += "from flash_frac.models import FracConfig, FracForCausalLM  # noqa: F401\n"


def export(checkpoint: str | Path, folder: str | Path) -> Path:
    """Copy a checkpoint to a new folder, with a file that names its classes.

    Such a folder is read by whatever passes `trust_remote_code=True`, such as `transformers serve`,
    which knows no other way to find a class that is not in transformers itself.

    Args:
        checkpoint: a folder that `FracForCausalLM.save_pretrained` has written.
        folder: where the copy goes; it must not exist.

    Example: `export("my-frac", "my-frac-portable")`
    """
    source, target = Path(checkpoint), Path(folder)
    if not (source / "config.json").is_file():
        raise ValueError(f"checkpoint must be a folder with a config.json, got {source}")
    config = json.loads((source / "config.json").read_text())
    if config.get("model_type") != "frac":
        raise ValueError(
            f"checkpoint must be of a Frac model, got model_type {config.get('model_type')!r}"
        )
    if target.exists():
        raise ValueError(f"folder must not exist yet, got {target}; remove it or name another")
    # An automatic class is what transformers has under a name; it then asks auto_map.
    config["architectures"] = ["AutoModelForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": f"{MODULE}.FracConfig",
        "AutoModelForCausalLM": f"{MODULE}.FracForCausalLM",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copytree(source, draft)
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (draft / f"{MODULE}.py").write_text(CODE)
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
