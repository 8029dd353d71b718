"""Check a checkpoint: that it exists, is undamaged and finite, has a tokenizer, and runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flash_frac.doctor import Finding
from flash_frac.layers.plain import parts_of
from flash_frac.manifest import MANIFEST, ManifestError, NoManifestError, check_manifest
from flash_frac.models.loading import Found, find_checkpoint, find_tokenizer, read_model

REPLACE = "copy or download the checkpoint again, or go back to an earlier one"


def examine_checkpoint(name: str) -> Iterator[Finding]:
    """Yield findings on a checkpoint; a wrong one may end the check.

    Example: `[finding.status for finding in examine_checkpoint("quickstart/final")]`
    """
    try:
        found = find_checkpoint(name)
    except ValueError as error:
        yield Finding("checkpoint", "wrong", str(error), "check the name and working directory")
        return
    where = "a model on the hub" if found.folder is None else "a folder"
    yield Finding("checkpoint", "ok", f"{found.name}, {where}")
    if found.folder is not None:
        yield _files(found.folder)
    yield _tokenizer(found)
    try:
        model, problems = read_model(found, dtype="auto")
    except ValueError as error:
        yield Finding("weights", "wrong", str(error), REPLACE)
        return
    yield _weights(model, problems)
    # With bad weights, logits tell nothing new.
    if not problems:
        yield _logits(model)


def _files(folder: Path) -> Finding:
    """Whether all files match the manifest, whatever their size."""
    try:
        count = check_manifest(folder)
    except NoManifestError:
        found = f"not verified: there is no {MANIFEST}, which `frac train` writes"
        return Finding("files", "ok", found)
    except ManifestError as error:
        remedy = f"{REPLACE}; if you changed it yourself, delete {folder / MANIFEST}"
        return Finding("files", "wrong", str(error), remedy)
    return Finding("files", "ok", f"{count} files match their checksums in {MANIFEST}")


def _tokenizer(found: Found) -> Finding:
    try:
        tokenizer = find_tokenizer(found)
    except ValueError as error:
        return Finding("tokenizer", "warning", str(error), "commands that read text need one")
    return Finding("tokenizer", "ok", f"{type(tokenizer).__name__} with {len(tokenizer):,} tokens")


def _weights(model: Any, problems: list[str]) -> Finding:
    if problems:
        return Finding("weights", "wrong", "; ".join(problems), REPLACE)
    # A quantised weight states the dtype of its products; its parts have those of the files.
    parts = [part for weight in model.parameters() for part in parts_of(weight)]
    dtypes = sorted({str(part.dtype).removeprefix("torch.") for part in parts})
    found = f"{model.num_parameters():,} parameters of {type(model).__name__}, "
    return Finding("weights", "ok", f"{found}{', '.join(dtypes)}, all present and finite")


@torch.no_grad()
def _logits(model: Any) -> Finding:
    """Whether a forward pass gives finite logits, which finite weights do not guarantee."""
    ids = torch.arange(64)[None] % model.config.vocab_size
    logits = model.eval()(ids).logits
    if bool(logits.isfinite().all()):
        return Finding("logits", "ok", f"finite over {ids.shape[1]} tokens")
    found = f"NaN or inf over {ids.shape[1]} tokens, although all weights are finite"
    return Finding("logits", "wrong", found, "load it in float32, or check for very large weights")
