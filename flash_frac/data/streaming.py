"""Sequences from a stream of documents, tokenised while they are read, without a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from flash_frac.data.arguments import DataArguments
from flash_frac.data.cache import prepare_held_out
from flash_frac.data.encoding import Encoder, mark_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.packing import Item, PackedDataset, check_length, make_item

# Little text at a time, so that the first item does not wait for megabytes of download.
BATCH_CHARACTERS = 1 << 16


class StreamingDataset(IterableDataset[Item]):
    """The items of `PackedDataset`, from documents as they come, in their order.

    With n dataloader workers, worker w yields items w, w + n, ...: the items are the same for any
    number of workers, and none comes twice. Each worker reads and tokenises the whole stream.

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

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        if worker is None:
            return self._items()
        return islice(self._items(), worker.id, None, worker.num_workers)

    def _items(self) -> Iterator[Item]:
        length = self.sequence_length
        marked = mark_held_out(self.documents, seed=self.seed, share=self.held_out)
        wanted = ((held, text) for held, text in marked if held == (self.part == "held_out"))
        pieces = self._encoder.encode_documents(wanted, batch_characters=BATCH_CHARACTERS)
        buffer: list[np.ndarray] = []
        starts, size = [0], 0
        for _, ids, ends in pieces:
            buffer.append(ids.astype(np.int64))
            size += len(ids)
            if ends:
                starts.append(size)
            # One token more than an item: the label of its last.
            if size <= length:
                continue
            tokens, where = np.concatenate(buffer), np.array(starts)
            used = (size - 1) // length * length
            for start in range(0, used, length):
                yield self._item(tokens, where, start)
            buffer, size = [tokens[used:]], size - used
            starts = [start - used for start in starts if start >= used]
        if size == length or (size and self.keep_tail):
            # The last start is the end of everything, where no document begins.
            yield self._item(np.concatenate(buffer), np.array(starts[:-1]), 0)

    def _item(self, tokens: np.ndarray, starts: np.ndarray, start: int) -> Item:
        stop = start + self.sequence_length + 1
        low, high = np.searchsorted(starts, [start, stop])
        inside = starts[low:high].astype(np.int64) - start
        return make_item(tokens[start:stop], inside, sequence_length=self.sequence_length)


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
