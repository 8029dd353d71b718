"""A checkpoint: whether it is there, as written and finite, has a tokenizer, and computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flash_frac.doctor import Finding
from flash_frac.manifest import MANIFEST, ManifestError, NoManifestError, check_manifest
from flash_frac.models.loading import Found, find_checkpoint, find_tokenizer, read_model

REPLACE = "copy or download the checkpoint again, or go back to an earlier one"


def examine_checkpoint(name: str) -> Iterator[Finding]:
    """Findings on a checkpoint, one by one; the first that is wrong may be the last.

    Example: `[finding.status for finding in examine_checkpoint("quickstart/final")]`
    """
    try:
        found = find_checkpoint(name)
    except ValueError as error:
        yield Finding("checkpoint", "wrong", str(error), "check the name, and where you are")
        return
    where = "a model of the hub" if found.folder is None else "a folder"
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
    # With such weights the logits say nothing more.
    if not problems:
        yield _logits(model)


def _files(folder: Path) -> Finding:
    """Whether all files are those that were written, however large they are."""
    try:
        count = check_manifest(folder)
    except NoManifestError:
        found = f"not verified: no {MANIFEST}, which checkpoints of `frac train` have"
        return Finding("files", "ok", found)
    except ManifestError as error:
        remedy = f"{REPLACE}; if you have changed it yourself, delete {folder / MANIFEST}"
        return Finding("files", "wrong", str(error), remedy)
    return Finding("files", "ok", f"{count} files have the checksums of {MANIFEST}")


def _tokenizer(found: Found) -> Finding:
    try:
        tokenizer = find_tokenizer(found)
    except ValueError as error:
        return Finding("tokenizer", "warning", str(error), "commands that read text need one")
    return Finding("tokenizer", "ok", f"{type(tokenizer).__name__} with {len(tokenizer):,} tokens")


def _weights(model: Any, problems: list[str]) -> Finding:
    if problems:
        return Finding("weights", "wrong", "; ".join(problems), REPLACE)
    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters()})
    found = f"{model.num_parameters():,} parameters of {type(model).__name__}, "
    return Finding("weights", "ok", f"{found}{', '.join(dtypes)}, all there and finite")


@torch.no_grad()
def _logits(model: Any) -> Finding:
    """Whether a pass over some tokens stays finite, which finite weights do not ensure."""
    ids = torch.arange(64)[None] % model.config.vocab_size
    logits = model.eval()(ids).logits
    if bool(logits.isfinite().all()):
        return Finding("logits", "ok", f"finite over {ids.shape[1]} tokens")
    found = f"NaN or inf after {ids.shape[1]} tokens, though all weights are finite"
    return Finding("logits", "wrong", found, "load it in float32, or look for weights too large")
