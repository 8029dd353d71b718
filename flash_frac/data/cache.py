"""A cache of token stores: each `DataArguments` is tokenised only once.

A cache entry is a folder named by a hash of everything that determines its tokens. It is written
under another name and renamed when complete, so every entry that exists is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from flash_frac.data.arguments import DataArguments
from flash_frac.data.drafts import collect_drafts, open_draft, writing
from flash_frac.data.encoding import Encoder, mark_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.prepared import PreparedData
from flash_frac.data.sources import find_files, read_documents, suffix_of
from flash_frac.data.store import FORMAT, Store, StoreWriter, TokenStore

# Seconds before a progress bar appears; shorter work needs none.
BAR_DELAY = 1.0


@dataclass(frozen=True)
class Splits:
    """The training store and the held-out store, which is None if nothing is held out."""

    train: Store
    held_out: Store | None

    @property
    def content(self) -> str | None:
        """A hash of the training text and its tokenizer; None for prepared data.

        That of prepared data is `fingerprint_of` its folder.
        """
        if not isinstance(self.train, TokenStore):
            return None
        meta = self.train.meta
        return _hash([_contents(meta["sources"]), meta["tokenizer"]])


@dataclass(frozen=True)
class _Source:
    """Documents, and `facts` that identify their content for the cache key."""

    facts: list[dict[str, Any]]
    read: Callable[[bool], Iterable[str]]


def prepare(
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: bool = True,
) -> Splits:
    """Tokenise the data of a run, or read its tokens from the cache.

    Documents are held out by a hash of (seed, text), see `is_held_out`, unless there are
    `held_out_files`. If the cache has an entry, the tokenizer is not called. `prepared_data` is
    opened and checked against the tokenizer.

    Args:
        arguments: data settings without `streaming`; for a stream, see `stream`.
        tokenizer: a fast or slow tokenizer with an eos token.
        seed: random seed of the held-out split.
        progress: whether to show a progress bar.

    Example: `splits = prepare(arguments, load_tokenizer(arguments.tokenizer), seed=0)`
    """
    if arguments.prepared_data is not None:
        data = PreparedData(arguments.prepared_data)
        encoder = Encoder(tokenizer)
        data.check_tokenizer(arguments.tokenizer, encoder.hash, encoder.beginning)
        return Splits(data.train, data.held_out)
    if arguments.streaming:
        raise ValueError("streaming: a stream has no store; use flash_frac.data.stream instead")
    maker = _Maker(arguments.cache_folder, Encoder(tokenizer), arguments.text_field, progress)
    if arguments.data_files is not None:
        source = _files(arguments.data_files, "data_files", arguments.text_field, progress)
    else:
        source = _hub(arguments)
    if arguments.held_out_files is None:
        return maker.make(source, seed=seed, share=arguments.held_out or 0.0)
    held_out = _files(arguments.held_out_files, "held_out_files", arguments.text_field, progress)
    for fact in held_out.facts:
        if any(fact["hash"] == other["hash"] for other in source.facts):
            raise ValueError(
                f"held_out_files: {fact['name']} has the same content as a file in data_files; "
                "remove it from one of them"
            )
    train = maker.make(source, seed=seed, share=0.0).train
    return Splits(train, maker.make(held_out, seed=seed, share=0.0).train)


def prepare_held_out(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, *, progress: bool = True
) -> Store:
    """Tokenise `held_out_files` alone.

    Example: `prepare_held_out(DataArguments(data_files=["a"], held_out_files=["b"]), tokenizer)`
    """
    if arguments.held_out_files is None:
        raise ValueError("held_out_files must be given, got None")
    maker = _Maker(arguments.cache_folder, Encoder(tokenizer), arguments.text_field, progress)
    source = _files(arguments.held_out_files, "held_out_files", arguments.text_field, progress)
    return maker.make(source, seed=0, share=0.0).train


@dataclass(frozen=True)
class _Maker:
    """Writes or finds cache entries for one tokenizer."""

    cache: Path
    encoder: Encoder
    text_field: str
    progress: bool

    def make(self, source: _Source, *, seed: int, share: float) -> Splits:
        split = {"held_out": share, "seed": seed} if share > 0 else {}
        settings = split | {"tokenizer": self.encoder.hash, "text_field": self.text_field}
        settings["beginning"] = self.encoder.beginning
        key = _hash({"format": FORMAT, "contents": _contents(source.facts), **settings})[:32]
        entry = self.cache / key
        collect_drafts(self.cache)
        if not entry.is_dir():
            with self._writing():
                self.cache.mkdir(parents=True, exist_ok=True)
                draft = open_draft(self.cache, key)
            with draft:
                self._write(draft.folder, source, settings, seed=seed, share=share)
                with self._writing():
                    draft.move(entry)
        return _open(entry, ["train", "held_out"] if share > 0 else ["train"])

    def _write(
        self, draft: Path, source: _Source, settings: dict[str, Any], *, seed: int, share: float
    ) -> None:
        names = ["train", "held_out"] if share > 0 else ["train"]
        writers: list[StoreWriter] = []
        try:
            with self._writing():
                writers += [StoreWriter(draft / name, self.encoder.dtype) for name in names]
            documents = mark_held_out(source.read(self.progress), seed=seed, share=share)
            for held_out, ids, ends in self.encoder.encode_documents(documents):
                with self._writing():
                    writers[held_out].write(ids, ends=ends)
            _check_split(writers, share)
            meta = {"sources": source.facts, "eos_token_id": self.encoder.eos_token_id}
            with self._writing():
                for writer in writers:
                    writer.close(meta | settings)
        finally:
            for writer in writers:
                writer.abandon()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.cache, "cache_dir", "or set cache_dir to another folder")


def _open(entry: Path, names: Sequence[str]) -> Splits:
    """The stores of a cache entry, checked against their checksums.

    That takes less time than hashing the sources, which a run on files does before.
    """
    try:
        train, *held_out = [TokenStore(entry / name) for name in names]
    except ValueError as error:
        # The whole entry, because a partial one is never completed.
        raise ValueError(f"{error}; delete {entry} to have it written again") from error
    return Splits(train, held_out[0] if held_out else None)


def _check_split(writers: Sequence[StoreWriter], share: float) -> None:
    counts = [writer.num_documents for writer in writers]
    total = sum(counts)
    if total == 0:
        raise ValueError("the data contains no text; add some, or use other data")
    remedy = (
        "set held_out to 0 for no evaluation, set held_out_files, add documents (each line of a "
        ".jsonl file is one, each .txt file is one), or change held_out or the seed"
    )
    if share > 0 and counts[1] == 0:
        raise ValueError(f"held_out is {share}, but selects none of {total} documents: {remedy}")
    if counts[0] == 0:
        raise ValueError(
            f"held_out is {share}, and selects all {total} documents, which leaves none to train "
            f"on: {remedy}"
        )


def _contents(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What determines the documents: everything but the names."""
    return [{k: v for k, v in fact.items() if k != "name"} for fact in facts]


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _hub(arguments: DataArguments) -> _Source:
    assert arguments.dataset_name is not None
    documents = HubDocuments(
        arguments.dataset_name,
        arguments.dataset_config,
        split=arguments.dataset_split,
        text_field=arguments.text_field,
    )

    def read(progress: bool) -> Iterator[str]:
        yield from tqdm(
            documents, "tokenising", documents.num_rows, unit=" documents", disable=not progress
        )

    return _Source([{"name": arguments.dataset_name, "hash": documents.fingerprint}], read)


def _files(paths: Sequence[str], argument: str, text_field: str, progress: bool) -> _Source:
    files = find_files(paths, argument=argument)
    total = sum(file.stat().st_size for file in files)

    def read(progress: bool) -> Iterator[str]:
        with byte_bar("tokenising", total, progress) as bar:
            for file in files:
                yield from read_documents(file, text_field=text_field, progress=bar.update)

    return _Source(file_facts(files, progress=progress), read)


def file_facts(files: Sequence[Path], *, progress: bool) -> list[dict[str, Any]]:
    """Name, suffix and hash of each file; the last two determine its documents.

    Example: `file_facts([Path("books.jsonl")], progress=False)[0]["hash"]`
    """
    facts = []
    total = sum(file.stat().st_size for file in files)
    # Hashing releases the GIL, and disks are faster with several requests at once.
    with byte_bar("hashing", total, progress) as bar, ThreadPoolExecutor(8) as pool:
        for file, digest in zip(files, pool.map(_hash_file, files), strict=True):
            facts.append({"name": str(file), "suffix": suffix_of(file), "hash": digest})
            bar.update(file.stat().st_size)
    return facts


def byte_bar(name: str, total: int, progress: bool) -> tqdm:
    """A progress bar that counts bytes."""
    settings = {"desc": name, "unit": "B", "unit_scale": True, "delay": BAR_DELAY}
    return tqdm(total=total, disable=not progress, **settings)


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
