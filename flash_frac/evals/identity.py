"""Which model a result is of: hashes of all that decides on its scores.

Hashing all weights takes a second a gigabyte, so that hashes are kept in OUT/hashes.json beside the
size and the times of each file, and a file is read again only when one of these has changed.
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
from flash_frac.models.loading import Found

HASHES = "hashes.json"
# What transformers reads a model from: settings, weights with the index of their shards, adapters,
# and code of its own.
_MODEL_FILES = (
    *("config.json", "adapter_config.json", "*.safetensors", "*model*.bin", "*.index.json"),
    "*.py",
)
# Fields of generation_config.json that say who wrote it.
_NOT_SETTINGS = ("transformers_version", "_from_model_config")


def identity_of_checkpoint(found: Found, tokenizer: Any, out: Path) -> dict[str, Any]:
    """What tells a checkpoint from others, as JSON has it.

    A commit of the hub stands for all files of a model.

    Args:
        found: the checkpoint.
        tokenizer: its tokenizer, or another that takes its place.
        out: folder of the results, where the hashes of files are kept.

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
    """The same of a model of lm-eval that is no folder, by the weights that are in memory."""
    digest = hashlib.sha256(lm.model.config.to_json_string().encode())
    for name, x in sorted(lm.model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    config = getattr(lm.model, "generation_config", None)
    settings = None if config is None else _generation_settings(config.to_diff_dict())
    return _identity(f"memory:{digest.hexdigest()[:32]}", lm.tokenizer, settings)


def _identity(weights: str, tokenizer: Any, settings: Any) -> dict[str, Any]:
    # Its hash is of the ids alone, as training needs them; scores depend on these as well.
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
    """As a file of JSON gives them back, without what is no setting."""
    plain = json.loads(json.dumps(content, default=str))
    return {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}


def _hash_files(folder: Path, kept: Path) -> str:
    """A hash of the files of a model, with their names."""
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
            f"{kept} cannot be read ({error}): delete it, and the weights are hashed again"
        ) from error


def _facts(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Size, times and hash of a file; the hash is taken from `known` if the others are the same."""
    status = path.stat()
    # The second time changes even where a copy has brought along the first.
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
