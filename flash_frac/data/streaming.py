"""Training sequences from a stream of documents, tokenised on the fly without a store.

Documents are divided among readers: with n ranks and m dataloader workers each, worker w of rank r
is reader r m + w of n m. Each reader tokenises and packs only its own documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from flash_frac.data.arguments import DataArguments
from flash_frac.data.cache import prepare_held_out
from flash_frac.data.encoding import Encoder, digest_of
from flash_frac.data.hub import HubDocuments, Position, beginning_of
from flash_frac.data.packing import SKIPPED, Item, PackedDataset, check_length, make_item

logger = logging.get_logger(__name__)
# Small batches, so that the first item does not wait for megabytes of download.
BATCH_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Bookmark:
    """The end of an item, where its reader resumes.

    Attributes:
        worker: the dataloader worker that reads; 0 without workers.
        items: number of items it has returned.
        position: position before the document in which the next item starts; see
            `HubDocuments.read`.
        offset: tokens of this document that are already in items.
    """

    worker: int
    items: int
    position: Position
    offset: int


class StreamingDataset(IterableDataset[Item]):
    """The items of `PackedDataset`, from a stream of documents in order.

    Items of a hub stream have a `bookmark`, from which `resume` continues.

    Several processes need accelerate's `dispatch_batches=False`: each reads its own batches.

    Args:
        documents: an iterable that yields the same texts each time.
        tokenizer: a tokenizer with an eos token.
        sequence_length: T.
        keep_tail: as in `PackedDataset`.
        rank, ranks: this process and the number of processes; each reads its share of documents.
        left_out: texts to skip, wherever they occur.
        endless: start over at the end of the documents; the first item then starts with the
            tokens left over.

    Example: `StreamingDataset(HubDocuments("user/books", streaming=True), tokenizer, 1024)`
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        keep_tail: bool = False,
        rank: int = 0,
        ranks: int = 1,
        left_out: Iterable[str] = (),
        endless: bool = False,
    ) -> None:
        check_length(sequence_length)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be in [0, ranks), got rank {rank} and ranks {ranks}")
        self.documents = documents
        self.sequence_length = sequence_length
        self.keep_tail = keep_tail
        self.rank, self.ranks = rank, ranks
        self.endless = endless
        self._left_out = frozenset(map(digest_of, left_out))
        self._encoder = Encoder(tokenizer)
        self._bookmarks: Mapping[int, Bookmark] = {}

    def resume(self, bookmarks: Iterable[Bookmark]) -> None:
        """Continue after the last items of all workers; each earlier item becomes `SKIPPED`.

        So a loader that skips the items trained on does not read them again.
        """
        self._bookmarks = {mark.worker: mark for mark in bookmarks}

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _Reader(self, worker, self.rank * workers + worker, self.ranks * workers)
        if reader.part == 0:
            _warn_of_reading_all(self.documents, self.ranks, workers)
        mark = self._bookmarks.get(worker)
        yield from repeat(SKIPPED, mark.items if mark else 0)
        yield from reader.items(mark)


@dataclass(frozen=True)
class _Reader:
    """One of `parts` readers of a dataset's documents."""

    dataset: StreamingDataset
    worker: int
    part: int
    parts: int

    def items(self, mark: Bookmark | None) -> Iterator[Item]:
        dataset, length = self.dataset, self.dataset.sequence_length
        # The positions after the documents that the encoder has read but not yet returned.
        positions: deque[Position | None] = deque()
        count, skip = (mark.items, mark.offset) if mark else (0, 0)
        buffer, size = [np.zeros(0, np.int64)], 0
        # Where documents start in the buffer (the first perhaps before it), and their positions.
        starts, places = [-skip], [mark.position if mark else self._beginning()]
        for _, ids, ends in dataset._encoder.encode_documents(
            self._wanted(places[0], positions), batch_characters=BATCH_CHARACTERS
        ):
            buffer.append(ids[skip:].astype(np.int64))
            size, skip = size + len(buffer[-1]), max(skip - len(ids), 0)
            if ends:
                starts.append(size)
                places.append(positions.popleft())
            # An item needs one token more, the label of its last.
            if size > length:
                tokens = np.concatenate(buffer)
                for start in range(0, size - length, length):
                    count += 1
                    yield self._item(tokens, starts, start) | self._mark(
                        count, starts, places, start + length
                    )
                used = (size - 1) // length * length
                buffer, size = [tokens[used:]], size - used
                first = bisect_right(starts, used) - 1
                starts, places = [start - used for start in starts[first:]], places[first:]
        if size == length or (size and dataset.keep_tail):
            # The last start is the end of the stream, where no document starts.
            yield self._item(np.concatenate(buffer), starts[:-1], 0)

    def _beginning(self) -> Position | None:
        return beginning_of(0) if self._is_stream() else None

    def _is_stream(self) -> bool:
        return isinstance(self.dataset.documents, HubDocuments) and self.dataset.documents.streaming

    def _wanted(
        self, position: Position | None, positions: deque[Position | None]
    ) -> Iterator[tuple[bool, str]]:
        """The documents from a position on; appends the position after each to `positions`."""
        # A pass that was resumed may have no document left.
        found = position is not None and position != beginning_of(position["epoch"])
        while True:
            for behind, text in self._read(position):
                if self.dataset._left_out and digest_of(text) in self.dataset._left_out:
                    continue
                found = True
                positions.append(behind)
                yield False, text
            if not self.dataset.endless:
                return
            if not found:
                raise ValueError(
                    f"reader {self.part + 1} of {self.parts} has no document to train on: use "
                    "fewer ranks or dataloader workers, or hold out fewer documents"
                )
            position, found = position and beginning_of(position["epoch"] + 1), False

    def _read(self, position: Position | None) -> Iterator[tuple[Position | None, str]]:
        documents = self.dataset.documents
        if self._is_stream():
            assert isinstance(documents, HubDocuments)
            return documents.read(position, part=self.part, parts=self.parts)
        return ((None, text) for text in islice(documents, self.part, None, self.parts))

    def _item(self, tokens: np.ndarray, starts: Sequence[int], start: int) -> Item:
        length = self.dataset.sequence_length
        stop = start + length + 1
        inside = np.array([x - start for x in starts if start <= x < stop], np.int64)
        return make_item(tokens[start:stop], inside, sequence_length=length)

    def _mark(
        self, count: int, starts: Sequence[int], places: Sequence[Position | None], end: int
    ) -> dict[str, Any]:
        """The bookmark for an item that ends at token `end` of the buffer."""
        number = bisect_right(starts, end) - 1
        position = places[number]
        if position is None:
            return {}
        return {"bookmark": Bookmark(self.worker, count, position, end - starts[number])}


def _warn_of_reading_all(documents: Iterable[str], ranks: int, workers: int) -> None:
    parts = ranks * workers
    if not isinstance(documents, HubDocuments) or not documents.streaming:
        return
    if not documents.has_shards_for(parts):
        logger.warning(
            f"dataset_name {documents.name!r} has {documents.num_shards} shards, fewer than "
            f"{ranks} ranks x {workers} dataloader workers: each of these {parts} reads every "
            "document, but tokenises only its own."
        )


@dataclass(frozen=True)
class Streams:
    """The training dataset and the held-out dataset, which is None if nothing is held out."""

    train: StreamingDataset
    held_out: list[Item] | PackedDataset | None

    @property
    def content(self) -> str:
        """The version of the training text: see `HubDocuments.version`."""
        assert isinstance(self.train.documents, HubDocuments)
        return self.train.documents.version


def stream(
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
    progress: bool = True,
) -> Streams:
    """The datasets of a run with `streaming`; `prepare` is for all others.

    The first `held_out_documents` of the source, and all copies of them, are left out of training.
    The training dataset is endless: each pass over the documents is followed by another.

    Args:
        seed: random seed of the order, with `shuffle_buffer`.
        rank, ranks: this process, and the number of processes that share the documents.
        progress: whether to show a progress bar while `held_out_files` are tokenised.

    Example: `stream(DataArguments(dataset_name="user/books", streaming=True), tokenizer, seed=0)`
    """
    if not arguments.streaming or arguments.dataset_name is None:
        raise ValueError("stream needs streaming set to true and a dataset_name; or use prepare")
    documents = HubDocuments(
        arguments.dataset_name,
        arguments.dataset_config,
        split=arguments.dataset_split,
        streaming=True,
        text_field=arguments.text_field,
    )
    length, held_out = arguments.sequence_length, None
    left_out = _first_documents(documents, arguments.held_out_documents or 0)
    if arguments.held_out_files is not None:
        store = prepare_held_out(arguments, tokenizer, progress=progress)
        held_out = PackedDataset(store, length, keep_tail=True)
    elif left_out:
        held_out = list(StreamingDataset(left_out, tokenizer, length, keep_tail=True))
    if arguments.shuffle_buffer:
        documents = documents.shuffled(seed, arguments.shuffle_buffer)
    train = StreamingDataset(
        documents, tokenizer, length, rank=rank, ranks=ranks, left_out=left_out, endless=True
    )
    return Streams(train, held_out)


def _first_documents(documents: HubDocuments, count: int) -> list[str]:
    texts = list(islice(documents, count))
    if len(texts) < count:
        raise ValueError(
            f"held_out_documents is {count}, but dataset_name {documents.name!r} has only "
            f"{len(texts)} documents: hold out fewer, or set held_out_files"
        )
    return texts
