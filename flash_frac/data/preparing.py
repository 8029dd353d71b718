"""Tokenise a corpus into prepared data with many processes; a restart resumes the work.

Each part of the corpus becomes one shard or, if it is long, several. A shard is written as a draft
and renamed when complete; a complete one is never written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flash_frac.beginning import set_beginning
from flash_frac.data.cache import byte_bar
from flash_frac.data.corpus import (
    Corpus,
    CorpusArguments,
    HeldOutRule,
    held_out_rule,
    open_corpus,
)
from flash_frac.data.drafts import collect_drafts, holding, open_draft, writing
from flash_frac.data.encoding import Encoder
from flash_frac.data.pool import run_parts
from flash_frac.data.prepared import (
    FORMAT,
    META,
    SHARDS,
    SPLITS,
    TOKENIZER,
    PreparedData,
    read_meta,
)
from flash_frac.data.store import StoreWriter
from flash_frac.data.tokenizer import load_tokenizer
from flash_frac.files import check_folder, drafted, read_record, write_record
from flash_frac.manifest import MANIFEST, Entry, check_manifest, read_manifest, write_manifest
from flash_frac.provenance import provenance

# Characters per shard, at most some hundred megabytes of tokens. A longer part gets several shards.
SHARD_CHARACTERS = 1 << 28
RECORD = "shard.json"


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to write shards.

    Attributes:
        key: a hash of the settings, stored in each shard's record.
    """

    folder: Path
    key: str
    corpus: Corpus
    encoder: Encoder
    rule: HeldOutRule
    shard_characters: int

    def writing(self) -> AbstractContextManager[None]:
        remedy = "and run the same command again: finished shards are kept"
        return writing(self.folder, "OUT", remedy)

    def records(self, part: int) -> list[dict[str, Any]]:
        """The records of the finished shards of a part, in order."""
        found = []
        while (path := self.path(part, len(found)) / RECORD).exists():
            found.append(self._record(path))
        return found

    def path(self, part: int, number: int) -> Path:
        return self.folder / f"{part:06}-{number:04}"

    def _record(self, path: Path) -> dict[str, Any]:
        remedy = f"delete {path.parent}, and run the same command again"
        try:
            fields = {"key": str, "read": int, "dropped": int, "last": bool, "splits": dict}
            record = read_record(path, fields)
            for split in record["splits"]:
                check_manifest(path.parent / split, most_bytes=0)
        except ValueError as error:
            raise ValueError(f"{error}; {remedy}") from error
        if record["key"] != self.key:
            raise ValueError(f"{path.parent} was made from other data or settings: {remedy}")
        return record


def prepare_corpus(
    arguments: CorpusArguments,
    out: str | Path,
    *,
    processes: int | None = None,
    shard_characters: int = SHARD_CHARACTERS,
    progress: bool = True,
) -> tuple[PreparedData, bool]:
    """Tokenise a corpus into a folder, or resume an interrupted call.

    Args:
        out: a new folder, or that of an earlier call with the same arguments.
        processes: number of worker processes; by default one per core.
        shard_characters: characters after which a part gets another shard.
        progress: whether to show a progress bar.

    Returns:
        The data, and whether it was already finished.

    Example: `data, _ = prepare_corpus(CorpusArguments(sources=("books",)), "tokens")`
    """
    out = check_folder(Path(out), "OUT")
    if processes is not None and processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    if out.is_dir() and os.listdir(out) and not (out / META).is_file():
        raise ValueError(f"OUT {out} is not empty and holds no prepared data: name a new folder")
    for source in arguments.sources:
        # A restart would read the output as part of the source.
        if out.resolve().is_relative_to(Path(source).expanduser().resolve()):
            raise ValueError(f"OUT {out} is inside SOURCE {source}: name a folder elsewhere")
    tokenizer = load_tokenizer(arguments.tokenizer)
    set_beginning(tokenizer, arguments.add_bos_token)
    encoder = Encoder(tokenizer)
    corpus = open_corpus(arguments, progress=progress)
    rule = held_out_rule(arguments, corpus)
    settings = _settings(arguments, corpus, encoder) | {"shard_characters": shard_characters}
    with writing(out, "OUT", "or name another folder"):
        (out / SHARDS).mkdir(parents=True, exist_ok=True)
    with holding(out):
        _check_settings(out, settings)
        if (out / MANIFEST).is_file():
            return PreparedData(out), True
        meta = {"format": FORMAT, "tokenizer": arguments.tokenizer, "settings": settings}
        if not (out / META).is_file():
            write_record(out / META, meta)
        if not (out / TOKENIZER).is_dir():
            with drafted(out / TOKENIZER, 0) as draft:
                tokenizer.save_pretrained(draft)
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
        job = Job(out / SHARDS, key, corpus, encoder, rule, shard_characters)
        _write_shards(job, processes or _cores(), progress)
        _finish(out, job, meta)
    return PreparedData(out), False


def _cores() -> int:
    """The number of CPU cores available to this process."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _settings(arguments: CorpusArguments, corpus: Corpus, encoder: Encoder) -> dict[str, Any]:
    """All settings that determine the tokens and their division into shards."""
    share = arguments.held_out
    return {
        "source": corpus.facts,
        "text_field": arguments.text_field,
        "tokenizer": encoder.hash,
        "beginning": encoder.beginning,
        "held_out": share,
        "held_out_documents": arguments.held_out_documents,
        "seed": arguments.seed if share else None,
        "part_bytes": arguments.part_bytes,
    }


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    if not (out / META).is_file():
        return
    before = read_meta(out)["settings"]
    changed = []
    for name, value in settings.items():
        then = before.get(name)
        if name == "source":
            changed += _changed_source(then, value)
        elif then != value:
            # The first characters of a fingerprint are enough.
            changed.append(f"{name} {str(then)[:12]} -> {str(value)[:12]}")
    if changed:
        raise ValueError(
            f"OUT {out} was made from other data or settings ({'; '.join(changed)}), and "
            "its shards cannot be kept: name another folder, or delete this one"
        )


def _changed_source(then: Any, now: list[dict[str, Any]]) -> list[str]:
    """A message about a changed source, if any; its path may change, because it may be moved."""
    contents = [
        [{k: v for k, v in fact.items() if k != "name"} for fact in facts] for facts in (then, now)
    ]
    if contents[0] == contents[1]:
        return []
    names = [[fact["name"] for fact in facts] for facts in (then, now)]
    if names[0] != names[1]:
        first, second = (f"{found[0]} ({len(found)} in total)" for found in names)
        return [f"source {first} -> {second}"]
    differ = [name for name, a, b in zip(names[0], *contents, strict=True) if a != b]
    return [f"{differ[0]} has changed"]


def _write_shards(job: Job, processes: int, progress: bool) -> None:
    with job.writing():
        collect_drafts(job.folder)
    # This also checks all existing shards before any work is done.
    parts = [part for part in range(job.corpus.num_parts) if not _is_done(job.records(part))]
    size = job.corpus.size
    with byte_bar("tokenising", size or 0, progress) as bar:
        if size is None:
            bar.unit, bar.total = " documents", None
        else:
            bar.update(size * (job.corpus.num_parts - len(parts)) // job.corpus.num_parts)
        run_parts(write_part, job, parts, processes, bar)


def _is_done(records: list[dict[str, Any]]) -> bool:
    return bool(records) and records[-1]["last"]


def write_part(job: Job, part: int, progress: Callable[[int], object]) -> None:
    """Write the missing shards of a part."""
    records = job.records(part)
    skip = sum(record["read"] for record in records)
    documents = _Documents(job, part, skip, progress)
    number = len(records)
    while True:
        _write_shard(job, documents, job.path(part, number))
        if documents.ended:
            return
        number += 1


@dataclass
class _Documents:
    """The documents of a part, one shard at a time.

    Attributes:
        read, dropped: documents read for the last shard, and how many of them were dropped.
    """

    job: Job
    part: int
    skip: int
    progress: Callable[[int], object]
    read: int = 0
    dropped: int = 0
    _rest: Iterator[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        texts = enumerate(self.job.corpus.read(self.part, self.progress))
        self._rest = islice(texts, self.skip, None)
        self._next = next(self._rest, None)

    @property
    def ended(self) -> bool:
        return self._next is None

    def take(self) -> Iterator[tuple[bool, str]]:
        """The documents of the next shard, each with whether it is held out."""
        self.read = self.dropped = characters = 0
        while self._next is not None and characters < self.job.shard_characters:
            number, text = self._next
            self.read += 1
            characters += len(text)
            held_out = self.job.rule.mark(self.part, number, text)
            if held_out is None:
                self.dropped += 1
            else:
                yield held_out, text
            self._next = next(self._rest, None)


def _write_shard(job: Job, documents: _Documents, target: Path) -> None:
    with job.writing():
        draft = open_draft(job.folder, job.key)
    writers: dict[str, StoreWriter] = {}
    with draft:
        try:
            for held_out, ids, ends in job.encoder.encode_documents(documents.take()):
                with job.writing():
                    split = SPLITS[held_out]
                    if split not in writers:
                        writers[split] = StoreWriter(draft.folder / split, job.encoder.dtype)
                    writers[split].write(ids, ends=ends)
            with job.writing():
                for writer in writers.values():
                    writer.close({"tokenizer": job.encoder.hash})
                record = {"key": job.key, "read": documents.read, "dropped": documents.dropped}
                counts = {
                    split: {"num_tokens": x.num_tokens, "num_documents": x.num_documents}
                    for split, x in writers.items()
                }
                record |= {"last": documents.ended, "splits": counts}
                write_record(draft.folder / RECORD, record)
                draft.move(target)
        finally:
            for writer in writers.values():
                writer.abandon()


def _finish(out: Path, job: Job, meta: dict[str, Any]) -> None:
    """Write the indices, the counts and the manifest."""
    records = {
        job.path(part, number).name: record
        for part in range(job.corpus.num_parts)
        for number, record in enumerate(job.records(part))
    }
    splits = {split: _count(records, split) for split in SPLITS}
    splits = {split: facts for split, facts in splits.items() if facts["shards"]}
    if "train" not in splits:
        raise ValueError(
            f"{out} has no document to train on: the source has no text, or all of it is held "
            "out; use other data or hold out less, and name another folder"
        )
    for split, facts in splits.items():
        _write_index(out, split, facts)
    dropped = sum(record["dropped"] for record in records.values())
    counts = {"dtype": job.encoder.dtype.str, "dropped_documents": dropped, "splits": splits}
    write_record(out / META, {**meta, **counts, "made_with": provenance()})
    known: dict[str, Entry] = {}
    names = [META, *(f"{split}.npy" for split in splits)]
    names += [f"{TOKENIZER}/{path.name}" for path in (out / TOKENIZER).iterdir()]
    for shard, record in records.items():
        names.append(f"{SHARDS}/{shard}/{RECORD}")
        for split in record["splits"]:
            folder = f"{SHARDS}/{shard}/{split}"
            names.append(f"{folder}/{MANIFEST}")
            known |= {f"{folder}/{k}": v for k, v in read_manifest(out / folder).items()}
    write_manifest(out, names, known=known)


def _count(records: Mapping[str, dict[str, Any]], split: str) -> dict[str, Any]:
    """Number of tokens and documents of a split, and the tokens of each shard that has any."""
    counts = {name: x["splits"][split] for name, x in records.items() if split in x["splits"]}
    return {
        "num_tokens": sum(x["num_tokens"] for x in counts.values()),
        "num_documents": sum(x["num_documents"] for x in counts.values()),
        "shards": {name: x["num_tokens"] for name, x in counts.items()},
    }


def _write_index(out: Path, split: str, facts: dict[str, Any]) -> None:
    """Write the starts of all documents, shard by shard: there may be a hundred million."""
    shape = (facts["num_documents"] + 1,)
    with drafted(out / f"{split}.npy", 8 * shape[0]) as draft, open(draft, "wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.zeros(1, "<i8").tobytes())
        total = 0
        for shard, num_tokens in facts["shards"].items():
            starts = np.load(out / SHARDS / shard / split / "documents.npy", allow_pickle=False)
            file.write((starts[1:] + total).astype("<i8").tobytes())
            total += num_tokens
