"""Sequences from a stream of documents, tokenised while they are read, without a store."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from flash_frac.data.arguments import DataArguments
from flash_frac.data.cache import prepare_held_out
from flash_frac.data.encoding import Encoder, is_held_out
from flash_frac.data.hub import HubDocuments, Position
from flash_frac.data.packing import Item, PackedDataset, check_length, make_item
from flash_frac.files import read_object

# Little text at a time, so that the first item does not wait for megabytes of download.
BATCH_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Bookmark:
    """A point between two documents of a stream, from which it can be read on.

    Attributes:
        item: the number of items that begin before it and are complete.
        tokens: read, but in none of these items.
        starts: where documents begin among them, and at last where they end.
        position: of the documents, see `HubDocuments.read`.
    """

    item: int
    tokens: np.ndarray
    starts: list[int]
    position: Position

    def to_json(self) -> str:
        """For a file, which `read` takes."""
        return json.dumps({**vars(self), "tokens": self.tokens.tolist()})

    @classmethod
    def read(cls, path: Path) -> Bookmark:
        """From a file with what `to_json` gave; ValueError that names it if it is damaged."""
        kinds = {"item": int, "tokens": list, "starts": list}
        content = read_object(path, kinds)
        try:
            return cls(**{**content, "tokens": np.array(content["tokens"], np.int64)})
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


class StreamingDataset(IterableDataset[Item]):
    """The items of `PackedDataset`, from documents as they come, in their order.

    With n dataloader workers, worker w yields items w, w + n, ...: the items are the same for any
    number of workers, and none comes twice. Each worker reads and tokenises the whole stream.
    Items of a hub stream have a `bookmark`, from which `resume` reads on.

    Several processes with `Collator(separate=True)` need accelerate's `dispatch_batches=False`:
    dispatching would cut one process's batch, which is a single row, into parts for the others.

    Args:
        documents: can be iterated over again, and gives the same texts each time.
        tokenizer: with an eos token.
        sequence_length: T.
        seed, held_out: of the held-out split, as for `prepare`.
        part: "train" leaves the held-out documents out, "held_out" reads only those.
        keep_tail: as for `PackedDataset`.

    Example: `StreamingDataset(HubDocuments("user/books", streaming=True), tokenizer, 1024, seed=0)`
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        seed: int,
        held_out: float = 0.0,
        part: str = "train",
        keep_tail: bool = False,
    ) -> None:
        check_length(sequence_length)
        if part not in ("train", "held_out"):
            raise ValueError(f"part must be 'train' or 'held_out', got {part!r}")
        self.documents = documents
        self.sequence_length = sequence_length
        self.seed = seed
        self.held_out = held_out
        self.part = part
        self.keep_tail = keep_tail
        self._encoder = Encoder(tokenizer)
        self._bookmark: Bookmark | None = None
        self._first_items = 0

    def resume(self, bookmark: Bookmark, first_items: int) -> None:
        """Let the next iteration read on from a bookmark, with placeholders for what came before.

        Trainer skips as many items as it has trained on. All it may look at again are the
        `first_items` of a batch of all processes, which fill up the last batch of a stream.
        """
        self._bookmark, self._first_items = bookmark, first_items

    def restart(self) -> None:
        """Let the next iteration begin at the beginning."""
        self._bookmark = None

    def __iter__(self) -> Iterator[Item]:
        worker, mark = get_worker_info(), self._bookmark
        items = self._items(None) if mark is None else self._resumed(mark)
        if worker is None:
            return items
        # The copy of a worker that stays for the next epoch.
        self.restart()
        return islice(items, worker.id, None, worker.num_workers)

    def _resumed(self, mark: Bookmark) -> Iterator[Item]:
        first = min(self._first_items, mark.item)
        yield from islice(self._items(None), first)
        empty = np.zeros(1, np.int64)
        yield from repeat(
            make_item(empty, empty, sequence_length=self.sequence_length), mark.item - first
        )
        yield from self._items(mark)

    def _documents(self, mark: Bookmark | None) -> Iterator[tuple[Position | None, str]]:
        if isinstance(self.documents, HubDocuments):
            return self.documents.read(mark and mark.position)
        return ((None, text) for text in self.documents)

    def _items(self, mark: Bookmark | None) -> Iterator[Item]:
        length, documents = self.sequence_length, self._documents(mark)
        # Of the documents that the encoder has taken and not yet given back.
        positions: deque[Position | None] = deque()

        def wanted() -> Iterator[tuple[bool, str]]:
            for position, text in documents:
                held = is_held_out(text, seed=self.seed, share=self.held_out)
                if held == (self.part == "held_out"):
                    positions.append(position)
                    yield held, text

        item = mark.item if mark else 0
        buffer = [mark.tokens if mark else np.zeros(0, np.int64)]
        starts, size = list(mark.starts) if mark else [0], len(buffer[0])
        for _, ids, ends in self._encoder.encode_documents(
            wanted(), batch_characters=BATCH_CHARACTERS
        ):
            buffer.append(ids.astype(np.int64))
            size += len(ids)
            if ends:
                starts.append(size)
            position = positions.popleft() if ends else None
            # One token more than an item: the label of its last.
            if size > length:
                tokens, where = np.concatenate(buffer), np.array(starts)
                used = (size - 1) // length * length
                for start in range(0, used, length):
                    yield self._item(tokens, where, start, mark)
                item, buffer, size = item + used // length, [tokens[used:]], size - used
                starts = [start - used for start in starts if start >= used]
            # One for each new item is enough.
            if position is not None and self.part == "train" and (not mark or item > mark.item):
                buffer = [np.concatenate(buffer)]
                mark = Bookmark(item, buffer[0], list(starts), position)
        if size == length or (size and self.keep_tail):
            # The last start is the end of everything, where no document begins.
            yield self._item(np.concatenate(buffer), np.array(starts[:-1]), 0, mark)

    def _item(
        self, tokens: np.ndarray, starts: np.ndarray, start: int, mark: Bookmark | None
    ) -> Item:
        stop = start + self.sequence_length + 1
        low, high = np.searchsorted(starts, [start, stop])
        inside = starts[low:high].astype(np.int64) - start
        item = make_item(tokens[start:stop], inside, sequence_length=self.sequence_length)
        if mark is not None:
            item["bookmark"] = mark
        return item


@dataclass(frozen=True)
class Streams:
    """The datasets to train and to evaluate on; no `held_out` where none was asked for."""

    train: StreamingDataset
    held_out: StreamingDataset | PackedDataset | None


def stream(
    arguments: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: bool = True,
) -> Streams:
    """The datasets of a run with `streaming`; `prepare` is for all others.

    The held-out documents of a stream are found by reading it to its end, at each evaluation;
    `held_out_files` are tokenised once and are quick.

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
    length, share = arguments.sequence_length, arguments.held_out
    if arguments.held_out_files is not None:
        store = prepare_held_out(arguments, tokenizer, progress=progress)
        train = StreamingDataset(documents, tokenizer, length, seed=seed)
        return Streams(train, PackedDataset(store, length, keep_tail=True))
    train = StreamingDataset(documents, tokenizer, length, seed=seed, held_out=share)
    if share == 0:
        return Streams(train, None)
    held_out = StreamingDataset(
        documents, tokenizer, length, seed=seed, held_out=share, part="held_out", keep_tail=True
    )
    return Streams(train, held_out)
