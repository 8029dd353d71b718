"""From `DataArguments` to token stores, made once and found again.

A cache entry is a folder named by a hash of everything that decides on its tokens. It is written
under another name and renamed when it is complete, so an entry that exists can be read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from flash_frac.data.arguments import DataArguments
from flash_frac.data.drafts import collect_drafts, open_draft
from flash_frac.data.encoding import Encoder, mark_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.sources import find_files, read_documents, suffix_of
from flash_frac.data.store import FORMAT, StoreWriter, TokenStore
from flash_frac.files import folder_size, why_unwritten

# What is done within a second needs no bar.
BAR_DELAY = 1.0


@dataclass(frozen=True)
class Splits:
    """The stores to train and to evaluate on; no `held_out` where none was asked for."""

    train: TokenStore
    held_out: TokenStore | None


@dataclass(frozen=True)
class _Source:
    """Documents that have a name for their content: `facts`, which go into the cache key."""

    facts: list[dict[str, Any]]
    read: Callable[[bool], Iterable[str]]


def prepare(
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: bool = True,
) -> Splits:
    """Tokenise the data of a run, or find the tokens of an earlier one in the cache.

    Documents are held out by a hash of (seed, text), see `is_held_out`, unless there are
    `held_out_files`. The tokenizer is not called where the cache has an entry.

    Args:
        arguments: the run's data; not for `streaming`, see `stream`.
        tokenizer: fast or slow, with an eos token.
        seed: of the held-out split.
        progress: whether to show a bar.

    Example: `splits = prepare(arguments, load_tokenizer(arguments.tokenizer), seed=0)`
    """
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
                f"held_out_files: {fact['name']} has the same content as a file of data_files; "
                "leave it out of one of them"
            )
    train = maker.make(source, seed=seed, share=0.0).train
    return Splits(train, maker.make(held_out, seed=seed, share=0.0).train)


def prepare_held_out(
    arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, *, progress: bool = True
) -> TokenStore:
    """The store of `held_out_files` alone.

    Example: `prepare_held_out(DataArguments(data_files=["a"], held_out_files=["b"]), tokenizer)`
    """
    if arguments.held_out_files is None:
        raise ValueError("held_out_files must be given, got None")
    maker = _Maker(arguments.cache_folder, Encoder(tokenizer), arguments.text_field, progress)
    source = _files(arguments.held_out_files, "held_out_files", arguments.text_field, progress)
    return maker.make(source, seed=0, share=0.0).train


@dataclass(frozen=True)
class _Maker:
    """Makes or finds cache entries for one tokenizer."""

    cache: Path
    encoder: Encoder
    text_field: str
    progress: bool

    def make(self, source: _Source, *, seed: int, share: float) -> Splits:
        split = {"held_out": share, "seed": seed} if share > 0 else {}
        settings = split | {"tokenizer": self.encoder.hash, "text_field": self.text_field}
        settings["beginning"] = self.encoder.beginning
        contents = [{k: v for k, v in fact.items() if k != "name"} for fact in source.facts]
        key = _hash({"format": FORMAT, "contents": contents, **settings})[:32]
        entry = self.cache / key
        collect_drafts(self.cache)
        if not entry.is_dir():
            with self._writing():
                self.cache.mkdir(parents=True, exist_ok=True)
                draft = open_draft(self.cache, key)
            with draft:
                self._write(draft.folder, source, settings, seed=seed, share=share)
                with self._writing():
                    _move(draft.folder, entry)
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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                # What this run and others have written until now.
                drafts = sum(map(folder_size, self.cache.glob(".*")))
                why = why_unwritten(self.cache / "tokens", error, drafts, or_more=True)
            raise ValueError(
                f"cache_dir: cannot write tokens to {self.cache} ({why}); make room there or "
                "make it writable, or set cache_dir to another folder"
            ) from error


def _open(entry: Path, names: Sequence[str]) -> Splits:
    """The stores of a cache entry, which are compared with their checksums.

    That takes less time than hashing the sources, which a run with files has done by then.
    """
    try:
        train, *held_out = [TokenStore(entry / name) for name in names]
    except ValueError as error:
        # All of it: half an entry is never completed.
        raise ValueError(f"{error}; delete {entry}, and it will be made again") from error
    return Splits(train, held_out[0] if held_out else None)


def _check_split(writers: Sequence[StoreWriter], share: float) -> None:
    counts = [writer.num_documents for writer in writers]
    total = sum(counts)
    if total == 0:
        raise ValueError("the data holds no text; fill it, or name other data")
    remedy = (
        "set held_out to 0 to go without, name held_out_files, give more documents (each line of "
        "a .jsonl file is one, a .txt file is one as a whole), or change held_out or the seed"
    )
    if share > 0 and counts[1] == 0:
        raise ValueError(f"held_out is {share}, but none of {total} documents fell in it: {remedy}")
    if counts[0] == 0:
        raise ValueError(
            f"held_out is {share}, and all of {total} documents fell in it, which leaves none to "
            f"train on: {remedy}"
        )


def _move(draft: Path, entry: Path) -> None:
    try:
        os.replace(draft, entry)
    except OSError as error:
        # Another process was first; its entry has the same name, hence the same content.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


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
        with _bar("tokenising", total, progress) as bar:
            for file in files:
                yield from read_documents(file, text_field=text_field, progress=bar.update)

    facts = []
    # Hashing lets other threads run, and disks like to be asked for several files at once.
    with _bar("hashing", total, progress) as bar, ThreadPoolExecutor(8) as pool:
        for file, digest in zip(files, pool.map(_hash_file, files), strict=True):
            facts.append({"name": str(file), "suffix": suffix_of(file), "hash": digest})
            bar.update(file.stat().st_size)
    return _Source(facts, read)


def _bar(name: str, total: int, progress: bool) -> tqdm:
    settings = {"desc": name, "unit": "B", "unit_scale": True, "delay": BAR_DELAY}
    return tqdm(total=total, disable=not progress, **settings)


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
