"""The tokens that are there for a run before it starts: prepared data, and the cache of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_frac.beginning import set_beginning
from flash_frac.data import PreparedData, load_tokenizer
from flash_frac.data.cache import file_facts
from flash_frac.data.encoding import Encoder
from flash_frac.data.sources import find_files
from flash_frac.files import read_object
from flash_frac.train.recipe import Recipe


def known_tokens(recipe: Recipe) -> tuple[int | None, str]:
    """Tokens of the training text if known without tokenising it, and a phrase for their source.

    Example: `known_tokens(load_recipe("small"))[0]`
    """
    data = recipe.data
    if data.prepared_data is not None:
        folder = Path(data.prepared_data)
        return PreparedData(folder).train.num_tokens, f"in {folder}"
    if data.data_files is None:
        return None, f"the size of {data.dataset_name} is unknown until it is read"
    try:
        files = find_files(data.data_files, argument="data_files")
        size = f"{sum(file.stat().st_size for file in files) / 1e9:.3g} GB in data_files, "
        entries = _entries_of(files, data.cache_folder)
        if not entries:
            return None, size + "not tokenised yet"
        wanted = _cache_settings(recipe)
    except ValueError as error:
        # A plan may be made before the text or the tokenizer exists.
        return None, str(error)
    why = ""
    for path, meta in entries:
        found = {name: meta.get(name) for name in wanted}
        differ = [name for name in wanted if found[name] != wanted[name]]
        if not differ and _same_content(meta["sources"], path.stat().st_mtime):
            return meta["num_tokens"], f"in {path.parent}"
        # The newest entry explains it best.
        names = " and ".join(differ).replace("beginning", "add_bos_token")
        why = why or (f"tokenised with another {names}" if differ else "changed since tokenised")
    return None, size + why


def _entries_of(files: Sequence[Path], cache: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The cache entries that were made from files of these names, newest first."""
    names = sorted(map(str, files))
    paths = sorted(cache.glob("*/train/meta.json"), key=lambda x: x.stat().st_mtime, reverse=True)
    entries = [(path, read_object(path)) for path in paths]
    return [
        (path, meta)
        for path, meta in entries
        if sorted(source.get("name", "") for source in meta.get("sources", [])) == names
    ]


def _cache_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings, besides the content of the files, that a cache entry must have."""
    data = recipe.data
    tokenizer = load_tokenizer(data.tokenizer)
    set_beginning(tokenizer, data.add_bos_token)
    encoder = Encoder(tokenizer)
    share = 0 if data.held_out_files is not None else data.held_out
    return {
        "tokenizer": encoder.hash,
        "beginning": encoder.beginning,
        "text_field": data.text_field,
        "held_out": share or None,
        "seed": recipe.training.seed if share else None,
    }


def _same_content(sources: Sequence[Mapping[str, Any]], tokenised: float) -> bool:
    """Whether files are as they were; only those that were touched since then are read."""
    touched = [x for x in sources if Path(x["name"]).stat().st_ctime >= tokenised]
    facts = file_facts([Path(x["name"]) for x in touched], progress=False)
    return all(now["hash"] == x["hash"] for now, x in zip(facts, touched, strict=True))
