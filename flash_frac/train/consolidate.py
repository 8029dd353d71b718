"""One folder for `from_pretrained` out of a checkpoint whose weights are spread over ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flash_frac.extras import require

SHARDS = "pytorch_model_fsdp_0"
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def consolidate(checkpoint: str | Path, output: str | Path) -> Path:
    """Join the weights in `checkpoint`, and put configuration and tokenizer beside them.

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
    draft = output.with_name(output.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    merge(str(checkpoint / SHARDS), str(draft), safe_serialization=True)
    for name in _BESIDE:
        if (checkpoint / name).exists():
            shutil.copy2(checkpoint / name, draft / name)
    os.replace(draft, output)
    return output
