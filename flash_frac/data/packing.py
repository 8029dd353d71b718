"""Sequences of equal length from a token store, and batches of them.

An item of T tokens is a dict of
- `input_ids`: (T,) int64;
- `shift_labels`: (T,) int64, the next token of the store, -100 where there is none;
- `document_starts`: (n,) int64, the offsets in [0, T) where a document starts;
- `ends_document`: bool, whether the token after the item starts a document;
- `tokens_before`, in `LaneDataset`: tokens of the item's first document before the item.

In a flowing batch only an eos token is between documents, and states carry over from one to the
next. In a separate batch all rows are packed into one of b T tokens, and `cu_seqlens` (N + 1,)
int32 gives the boundaries of independent sequences. Letters: b rows, T tokens each, N sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flash_frac.data.store import Store

IGNORED = -100
Item = dict[str, Any]
# Stands for an item that a resumed run skips: it need not be read.
SKIPPED: Item = {}


def make_item(tokens: np.ndarray, starts: np.ndarray, *, sequence_length: int) -> Item:
    """One item from up to T + 1 tokens; a shorter one is padded with its last token, unlabelled.

    Args:
        tokens: (n,) int64, n <= T + 1; if n = T + 1, the last is only a label.
        starts: (m,) int64, ascending offsets in [0, T] where a document starts.

    Example: `make_item(np.arange(5), np.array([0]), sequence_length=4)["shift_labels"]`
    """
    ids, labels = tokens[:sequence_length], tokens[1:]
    if len(ids) < sequence_length:
        ids = np.pad(ids, (0, sequence_length - len(ids)), mode="edge")
    if len(labels) < sequence_length:
        missing = (0, sequence_length - len(labels))
        labels = np.pad(labels, missing, constant_values=IGNORED)
    inside = starts[starts < sequence_length]
    return {
        "input_ids": torch.from_numpy(np.ascontiguousarray(ids)),
        "shift_labels": torch.from_numpy(np.ascontiguousarray(labels)),
        "document_starts": torch.from_numpy(np.ascontiguousarray(inside)),
        "ends_document": len(inside) < len(starts),
    }


class PackedDataset(Dataset[Item]):
    """Item i is tokens [i T, i T + T) of the store; the module docstring describes its keys.

    Args:
        store: the tokens.
        sequence_length: T.
        keep_tail: whether to keep an incomplete last item, padded without labels, or drop it.

    Example: `PackedDataset(splits.train, 1024)[0]["input_ids"]` has shape (1024,)
    """

    def __init__(self, store: Store, sequence_length: int, *, keep_tail: bool = False) -> None:
        check_length(sequence_length)
        self.store = store
        self.sequence_length = sequence_length
        whole, rest = divmod(store.num_tokens, sequence_length)
        self._length = whole + bool(keep_tail and rest)
        if self._length == 0:
            raise ValueError(
                f"sequence_length is {sequence_length}, but {store.folder} holds only "
                f"{store.num_tokens} tokens: lower sequence_length, or add more data"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        index = _check_index(index, len(self))
        start = index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.store.num_tokens)
        # The last entry of `starts` is the end of the store, which is never below `stop`.
        low, high = np.searchsorted(self.store.starts, [start, stop])
        starts = np.asarray(self.store.starts[low:high]) - start
        tokens = self.store.tokens(start, stop)
        return make_item(tokens, starts, sequence_length=self.sequence_length)


class LaneDataset(Dataset[Item]):
    """Whole documents assigned to `lanes` streams, for truncated back-propagation.

    The documents, shuffled by the seed, go one by one to the lane that is shortest so far (the
    first of equals), and all lanes are cut to the same number of segments of T tokens. Item k is
    segment k // lanes of lane k % lanes: read in order, in batches of `lanes`, row b of each batch
    continues row b of the one before. Only an index of documents is in memory, not the tokens.

    Args:
        store: the tokens.
        sequence_length: T.
        lanes: number of lanes: the batch size of all processes together.
        seed: random seed of the shuffle.

    Example: `DataLoader(LaneDataset(store, 1024, 8, seed=0), batch_size=8, shuffle=False)`
    """

    def __init__(self, store: Store, sequence_length: int, lanes: int, *, seed: int) -> None:
        check_length(sequence_length)
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        if store.num_documents < lanes:
            raise ValueError(
                f"lanes is {lanes}, but {store.folder} holds only {store.num_documents} documents: "
                "use a smaller batch, or add more documents"
            )
        self.store = store
        self.sequence_length = sequence_length
        self.lanes = lanes
        self._documents, self._ends = _deal(np.diff(np.asarray(store.starts)), lanes, seed)
        shortest = min(int(ends[-1]) for ends in self._ends)
        self.num_segments = shortest // sequence_length
        if self.num_segments == 0:
            raise ValueError(
                f"sequence_length is {sequence_length}, but the shortest of {lanes} lanes has only "
                f"{shortest} tokens: lower sequence_length, use a smaller batch, or add more data"
            )

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the ends of the lanes that are in no item."""
        return self.store.num_tokens - len(self) * self.sequence_length

    def __len__(self) -> int:
        return self.num_segments * self.lanes

    def __getitem__(self, index: int) -> Item:
        index = _check_index(index, len(self))
        segment, lane = divmod(index, self.lanes)
        documents, ends = self._documents[lane], self._ends[lane]
        start = segment * self.sequence_length
        stop = min(start + self.sequence_length + 1, int(ends[-1]))
        pieces, starts = [], []
        number = int(np.searchsorted(ends, start, side="right"))
        begin = int(ends[number - 1]) if number else 0
        before = start - begin
        while begin < stop:
            end = int(ends[number])
            if begin >= start:
                starts.append(begin - start)
            # Offset from positions in the lane to positions in the store, for this document.
            origin = int(self.store.starts[documents[number]]) - begin
            pieces.append(self.store.tokens(origin + max(begin, start), origin + min(end, stop)))
            begin, number = end, number + 1
        tokens = np.concatenate(pieces)
        starts = np.array(starts, np.int64)
        item = make_item(tokens, starts, sequence_length=self.sequence_length)
        return item | {"tokens_before": before}


def _deal(lengths: np.ndarray, lanes: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The documents of each lane in order, and the positions in the lane where they end."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    hands: list[list[int]] = [[] for _ in range(lanes)]
    heap = [(0, lane) for lane in range(lanes)]
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        total, lane = heap[0]
        hands[lane].append(document)
        heapq.heapreplace(heap, (total + length, lane))
    documents = [np.array(hand, np.int64) for hand in hands]
    return documents, [np.cumsum(lengths[hand]) for hand in documents]


def check_length(sequence_length: int) -> None:
    """Raise ValueError unless a sequence has at least one token."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")


def _check_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is outside a dataset of {length} items")
    return index % length


class Collator:
    """Collates b items into a batch of torch tensors.

    - flowing: `input_ids`, `shift_labels`, `labels`, each (b, T);
    - separate: each (1, b T), and `cu_seqlens` with a boundary at every row and document, none
      empty; a label that is the first token of another document becomes -100;
    - separate with `lanes`: the first sequence of each row continues the previous batch. If a
      document starts with the row, that sequence is empty: `cu_seqlens` repeats a value.
      `first_sequence` (b,) int64 gives the index of each row's first sequence.

    `labels` equals `shift_labels`: both are shifted already. If the last item comes from a stream,
    its `bookmark` is passed on. A batch of `SKIPPED` items is empty.

    Args:
        separate: whether documents are independent of each other.
        lanes: whether rows continue those of the batch before (`LaneDataset`).
        shard: (r, n) takes only the r-th of n equal slices of every row, for context parallelism.
            With separate documents b must be 1, and for r > 0 the first sequence continues the
            slice before, and may be empty as above.

    Example: `DataLoader(PackedDataset(store, 1024), batch_size=8, collate_fn=Collator(True))`
    """

    def __init__(
        self, separate: bool, *, lanes: bool = False, shard: tuple[int, int] = (0, 1)
    ) -> None:
        rank, count = shard
        if not 0 <= rank < count:
            raise ValueError(f"shard must be (r, n) with 0 <= r < n, got {tuple(shard)}")
        if lanes and not separate:
            raise ValueError("lanes needs separate: set separate (separate_documents) to True")
        if lanes and count > 1:
            raise ValueError(
                f"lanes cannot be combined with shard {tuple(shard)}: carry states between batches "
                "or divide each row, but not both"
            )
        self.separate = separate
        self.lanes = lanes
        self.shard = (rank, count)

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        if items[0] == SKIPPED:
            return {}
        input_ids = torch.stack([_tensor(item["input_ids"]) for item in items])
        labels = torch.stack([_tensor(item["shift_labels"]) for item in items])
        self._check_shape(*input_ids.shape)
        starts = [_tensor(item["document_starts"]) for item in items]
        if self.separate:
            for row, item, offsets in zip(labels, items, starts, strict=True):
                # A document's first token is the label of the token before it; at offset 0, that
                # token is in another row.
                row[offsets[offsets > 0] - 1] = IGNORED
                if item["ends_document"]:
                    row[-1] = IGNORED
        rank, count = self.shard
        width = input_ids.shape[1] // count
        low = rank * width
        input_ids = input_ids[:, low : low + width].contiguous()
        labels = labels[:, low : low + width].contiguous()
        extra = {k: v for k, v in items[-1].items() if k == "bookmark"}
        if not self.separate:
            return _batch(input_ids, labels) | extra
        starts = [row[(row >= low) & (row < low + width)] - low for row in starts]
        batch = _batch(input_ids.reshape(1, -1), labels.reshape(1, -1))
        return batch | self._boundaries(starts, width) | extra

    def _boundaries(self, starts: Sequence[Tensor], width: int) -> dict[str, Tensor]:
        """`cu_seqlens`, and with lanes `first_sequence`, from each row's document starts."""
        continues = self.lanes or self.shard[0] > 0
        zero = torch.zeros(1, dtype=torch.int64)
        rows = [torch.cat([zero, row if continues else row[row > 0]]) for row in starts]
        begins = torch.cat([row + i * width for i, row in enumerate(rows)])
        end = torch.tensor([len(rows) * width])
        result = {"cu_seqlens": torch.cat([begins, end]).to(torch.int32)}
        if self.lanes:
            counts = torch.tensor([len(row) for row in rows])
            result["first_sequence"] = counts.cumsum(0) - counts
        return result

    def _check_shape(self, num_rows: int, length: int) -> None:
        rank, count = self.shard
        if length % count:
            raise ValueError(
                f"shard {(rank, count)} divides each row into {count} equal slices, but "
                f"sequence_length is {length}: make it a multiple of {count}"
            )
        if self.separate and count > 1 and num_rows != 1:
            raise ValueError(
                f"shard {(rank, count)} with separate documents takes one row at a time, got "
                f"{num_rows}: set per_device_train_batch_size (and per_device_eval_batch_size) to 1"
            )


def _batch(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": input_ids, "labels": labels, "shift_labels": labels.clone()}


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
