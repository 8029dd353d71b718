"""A corpus in parts that processes read independently of each other, in the order of its source.

A part is several small files, a span of a large one, or a shard of a hub dataset. The parts depend
only on the source, so a restart finds the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from flash_frac.data.cache import file_facts
from flash_frac.data.encoding import digest_of, is_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.sources import Span, divide_file, find_files, read_documents, suffix_of

# Bytes per part: small enough that a restart repeats only minutes and all cores have work.
SMALLEST_PART, LARGEST_PART = 1 << 23, 1 << 28
PARTS = 512
# A file, the span to read (None for all of it), and its size in bytes.
_Piece = tuple[Path, Span | None, int]
# The form of a hub id.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class CorpusArguments:
    """What to prepare: the documents, the tokenizer, and which documents to hold out.

    Args:
        sources: files and folders, like `data_files`; or one hub dataset, or its folder.
        dataset_config, split: for a dataset; if either is set, a folder is read as a dataset.
        text_field: the field of .jsonl, .parquet and hub rows to read.
        tokenizer: "bytes", "dna", a folder or a hub id.
        add_bos_token: whether documents start with the bos token; None does as the tokenizer does.
        held_out: fraction of the documents to hold out, by a hash of seed and text.
        held_out_documents: hold out this many documents from the beginning instead.
        seed: random seed for `held_out`.
        part_bytes: bytes per part; None chooses by the size of the corpus.

    Example: `CorpusArguments(sources=("books",), tokenizer="bytes", held_out_documents=100)`
    """

    sources: tuple[str, ...]
    dataset_config: str | None = None
    split: str | None = None
    text_field: str = "text"
    tokenizer: str = "bytes"
    add_bos_token: bool | None = None
    held_out: float = 0.0
    held_out_documents: int = 0
    seed: int = 0
    part_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(
                f"--held-out must be a fraction in [0, 1), got {self.held_out}; for a number of "
                "documents use --held-out-documents"
            )
        if self.held_out_documents < 0:
            raise ValueError(
                f"--held-out-documents must be 0 or more, got {self.held_out_documents}"
            )
        if self.held_out and self.held_out_documents:
            raise ValueError("--held-out and --held-out-documents cannot be combined; pass one")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ValueError(f"part_bytes must be at least 1, got {self.part_bytes}")
        if (self.dataset_config or self.split) and len(self.sources) != 1:
            raise ValueError(
                f"--dataset-config and --split apply to one dataset, got {len(self.sources)} "
                "sources: prepare them one by one"
            )


class Corpus(Protocol):
    """Documents in parts.

    Attributes:
        facts: what identifies the documents; all facts but the names determine their content.
        num_parts: number of parts.
        size: total bytes of all parts; None for a stream.
    """

    facts: list[dict[str, Any]]
    num_parts: int
    size: int | None

    def read(self, part: int, progress: Callable[[int], object]) -> Iterator[str]:
        """The documents of a part; `progress` gets bytes read, or 1 per document of a stream."""
        ...


def open_corpus(arguments: CorpusArguments, *, progress: bool = True) -> Corpus:
    """Find the sources and divide them into parts.

    Example: `open_corpus(CorpusArguments(sources=("books",))).num_parts`
    """
    name = arguments.sources[0]
    if arguments.dataset_config or arguments.split:
        return _HubCorpus(arguments)
    absent = len(arguments.sources) == 1 and not Path(name).exists()
    # A name with a file suffix is more likely a wrong path than a hub id.
    if absent and _HUB_ID.fullmatch(name) and suffix_of(Path(name)) is None:
        return _HubCorpus(arguments)
    return _FileCorpus(arguments, progress)


class _FileCorpus:
    def __init__(self, arguments: CorpusArguments, progress: bool) -> None:
        files = find_files(arguments.sources, argument="SOURCE")
        self._text_field = arguments.text_field
        size = sum(file.stat().st_size for file in files)
        self.size: int | None = size
        usual = min(max(size // PARTS, SMALLEST_PART), LARGEST_PART)
        self._parts = _divide(files, arguments.part_bytes or usual)
        self.num_parts = len(self._parts)
        for file in {pieces[0][0] for pieces in self._parts if pieces[0][1] is not None}:
            # A span may be empty but a file may not, and a wrong field should fail early.
            next(read_documents(file, text_field=self._text_field))
        self.facts = file_facts(files, progress=progress)

    def read(self, part: int, progress: Callable[[int], object]) -> Iterator[str]:
        for file, span, size in self._parts[part]:
            left = size

            def report(count: int) -> None:
                # Bytes that are read ahead belong to the next part.
                nonlocal left
                count = min(count, left)
                left -= count
                progress(count)

            yield from read_documents(file, text_field=self._text_field, progress=report, span=span)
            progress(left)


def _divide(files: list[Path], size: int) -> list[list[_Piece]]:
    """Parts of about `size` bytes, each a list of whole files or one span of a file."""
    parts: list[list[_Piece]] = []
    # Bytes in the last part, if it holds whole files.
    filled = size
    for file in files:
        if spans := divide_file(file, size):
            units, bytes_of_file = spans[-1][1], file.stat().st_size
            parts.extend([(file, x, bytes_of_file * (x[1] - x[0]) // units)] for x in spans)
            filled = size
            continue
        if filled >= size:
            parts.append([])
            filled = 0
        parts[-1].append((file, None, file.stat().st_size))
        filled += file.stat().st_size
    return parts


class _HubCorpus:
    def __init__(self, arguments: CorpusArguments) -> None:
        name, split = arguments.sources[0], arguments.split or "train"
        try:
            self._documents = HubDocuments(
                name,
                arguments.dataset_config,
                split=split,
                streaming=True,
                text_field=arguments.text_field,
            )
            version = self._documents.version
        except ValueError as error:
            if Path(name).exists():
                raise
            raise ValueError(
                f"SOURCE {name!r} is not a local file or folder, and cannot be read as a hub "
                f"dataset: {error}"
            ) from error
        self.num_parts = self._documents.num_shards
        self.size: int | None = None
        config = arguments.dataset_config
        self.facts = [{"name": name, "config": config, "split": split, "hash": version}]

    def read(self, part: int, progress: Callable[[int], object]) -> Iterator[str]:
        for _, text in self._documents.read(part=part, parts=self.num_parts):
            progress(1)
            yield text


@dataclass(frozen=True)
class HeldOutRule:
    """Selects the documents to hold out, and drops copies of them.

    Attributes:
        share, seed: as in `is_held_out`.
        counts: number of documents held out at the beginning of each part.
        digests: digests of these; the same text elsewhere is neither trained nor evaluated on.
    """

    share: float
    seed: int
    counts: dict[int, int]
    digests: frozenset[bytes]

    def mark(self, part: int, number: int, text: str) -> bool | None:
        """Whether to hold out document `number` of a part; None means drop it."""
        if number < self.counts.get(part, 0):
            return True
        if self.digests and digest_of(text) in self.digests:
            return None
        return is_held_out(text, seed=self.seed, share=self.share)


def held_out_rule(arguments: CorpusArguments, corpus: Corpus) -> HeldOutRule:
    """The rule for these arguments; this reads the documents held out at the beginning.

    Example: `held_out_rule(arguments, corpus).mark(0, 0, "the first document")`
    """
    counts: dict[int, int] = {}
    digests: list[bytes] = []
    wanted = arguments.held_out_documents
    parts = range(corpus.num_parts)
    texts = ((part, text) for part in parts for text in corpus.read(part, lambda _: None))
    for part, text in islice(texts, wanted):
        counts[part] = counts.get(part, 0) + 1
        digests.append(digest_of(text))
    if len(digests) < wanted:
        raise ValueError(
            f"--held-out-documents is {wanted}, but the source has only {len(digests)} documents: "
            "hold out fewer"
        )
    return HeldOutRule(arguments.held_out, arguments.seed, counts, frozenset(digests))
