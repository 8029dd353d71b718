"""Identify the model of a result by hashes of everything that determines its scores.

Hashing takes a second per gigabyte of weights. So hashes are cached in OUT/hashes.json with the
size and times of each file, and a file is read again only if one of these has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from flash_frac.beginning import beginning
from flash_frac.data.tokenizer import tokenizer_hash
from flash_frac.files import read_object, read_record, write_record
from flash_frac.layers.plain import parts_of
from flash_frac.models.loading import Found

HASHES = "hashes.json"
# The files from which transformers loads a model: settings, weights and their shard index,
# adapters, and custom code.
_MODEL_FILES = (
    *("config.json", "adapter_config.json", "*.safetensors", "*model*.bin", "*.index.json"),
    "*.py",
)
# Fields of generation_config.json that only record how it was written.
_NOT_SETTINGS = ("transformers_version", "_from_model_config")


def identity_of_checkpoint(found: Found, tokenizer: Any, out: Path) -> dict[str, Any]:
    """The identity of a checkpoint, as JSON values.

    A hub commit identifies all files of a model.

    Args:
        found: the checkpoint.
        tokenizer: its tokenizer, or the one that replaces it.
        out: folder of the results, where the hashes of files are cached.

    Example: `identity_of_checkpoint(found, find_tokenizer(found), Path("evals/frac"))["weights"]`
    """
    if found.folder is None:
        weights = f"hub:{found.name}@{found.options.get('revision')}"
        settings = None
    else:
        weights = _hash_files(found.folder, out / HASHES)
        path = found.folder / "generation_config.json"
        settings = _generation_settings(read_object(path)) if path.is_file() else None
    return _identity(weights, tokenizer, settings)


def identity_in_memory(lm: Any) -> dict[str, Any]:
    """Like `identity_of_checkpoint`, from the weights of an lm-eval model in memory."""
    digest = hashlib.sha256(lm.model.config.to_json_string().encode())
    weights = sorted(lm.model.state_dict().items())
    for name, x in ((name, part) for name, weight in weights for part in parts_of(weight)):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    config = getattr(lm.model, "generation_config", None)
    settings = None if config is None else _generation_settings(config.to_diff_dict())
    return _identity(f"memory:{digest.hexdigest()[:32]}", lm.tokenizer, settings)


def _identity(weights: str, tokenizer: Any, settings: Any) -> dict[str, Any]:
    # `tokenizer_hash` covers only the ids, as training needs; scores depend on the rest too.
    facts = [
        *(tokenizer_hash(tokenizer), beginning(tokenizer), tokenizer.special_tokens_map),
        *(getattr(tokenizer, "clean_up_tokenization_spaces", None), type(tokenizer).__name__),
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return {
        "weights": weights,
        "tokenizer_hash": hashlib.sha256(text.encode()).hexdigest()[:32],
        "generation_settings": settings,
    }


def _generation_settings(content: dict[str, Any]) -> dict[str, Any]:
    """The settings after a round trip through JSON, without `_NOT_SETTINGS`."""
    plain = json.loads(json.dumps(content, default=str))
    return {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}


def _hash_files(folder: Path, kept: Path) -> str:
    """A hash of the names and contents of a model's files."""
    paths = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})
    known = _known(kept)
    found = {str(path.resolve()): _facts(path, known) for path in paths}
    if any(known.get(path) != facts for path, facts in found.items()):
        write_record(kept, {**known, **found})
    lines = [f"{path.name} {found[str(path.resolve())]['sha256']}" for path in paths]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _known(kept: Path) -> dict[str, Any]:
    if not kept.is_file():
        return {}
    try:
        return read_record(kept)
    except ValueError as error:
        raise ValueError(
            f"{kept} cannot be read ({error}): delete it to hash the weights again"
        ) from error


def _facts(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Size, times and hash of a file; reuses the hash in `known` if size and times match."""
    status = path.stat()
    # The change time differs even if a copy preserves the modification time.
    facts = {
        "size": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
    before = known.get(str(path.resolve()), {})
    if isinstance(before, dict) and before == {**facts, "sha256": before.get("sha256")}:
        return before
    with path.open("rb") as file:
        return {**facts, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
