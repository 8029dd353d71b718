"""Equal sequences over a token store, and batches of them.

An item of T tokens is a dict of
- `input_ids`: (T,) int64;
- `shift_labels`: (T,) int64, the next token of the stream, -100 where there is none;
- `document_starts`: (n,) int64, the offsets in [0, T) where a document begins;
- `ends_document`: bool, whether the token behind the item begins a document;
- `tokens_before`, of `LaneDataset`: how many tokens of the item's first document came before it.

In a flowing batch documents are joined by nothing but the eos token, and memory flows across. In a
separate one all rows lie in one of b T tokens, and `cu_seqlens` (N + 1,) int32 gives the boundaries
of sequences that know nothing of each other. Letters: b rows, T tokens in each, N sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flash_frac.data.store import TokenStore

IGNORED = -100
Item = dict[str, Any]
# In place of each item that a resumed run was trained on: it is skipped, and need not be read.
SKIPPED: Item = {}


def make_item(tokens: np.ndarray, starts: np.ndarray, *, sequence_length: int) -> Item:
    """One item from up to T + 1 tokens; a shorter one is filled with its last token, unlabelled.

    Args:
        tokens: (n,) int64, n <= T + 1; the last is only a label if n = T + 1.
        starts: (m,) int64, ascending offsets in [0, T] where a document begins.

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
    """Item i is tokens [i T, i T + T) of the store; see the module for its keys.

    Args:
        store: the tokens.
        sequence_length: T.
        keep_tail: whether to keep what is left at the end, filled up without labels; else it is
            dropped.

    Example: `PackedDataset(splits.train, 1024)[0]["input_ids"]` has shape (1024,)
    """

    def __init__(self, store: TokenStore, sequence_length: int, *, keep_tail: bool = False) -> None:
        check_length(sequence_length)
        self.store = store
        self.sequence_length = sequence_length
        whole, rest = divmod(store.num_tokens, sequence_length)
        self._length = whole + bool(keep_tail and rest)
        if self._length == 0:
            raise ValueError(
                f"sequence_length is {sequence_length}, but {store.folder} holds only "
                f"{store.num_tokens} tokens: shorten sequence_length, or give more data"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        index = _check_index(index, len(self))
        start = index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.store.num_tokens)
        # The end of everything, last among the starts, is never below `stop`.
        low, high = np.searchsorted(self.store.starts, [start, stop])
        starts = np.asarray(self.store.starts[low:high]) - start
        tokens = self.store.tokens(start, stop)
        return make_item(tokens, starts, sequence_length=self.sequence_length)


class LaneDataset(Dataset[Item]):
    """Whole documents dealt to `lanes` streams, for truncated back-propagation.

    The documents, shuffled by the seed, go one by one to the lane that is shortest so far (the
    first of equals), and all lanes are cut to the same number of segments of T tokens. Item k is
    segment k // lanes of lane k % lanes: read in order, in batches of `lanes`, row b of each batch
    continues row b of the one before. An index of documents is kept, the tokens stay on the disk.

    Args:
        store: the tokens.
        sequence_length: T.
        lanes: how many; the batch size of all processes together.
        seed: of the shuffle.

    Example: `DataLoader(LaneDataset(store, 1024, 8, seed=0), batch_size=8, shuffle=False)`
    """

    def __init__(self, store: TokenStore, sequence_length: int, lanes: int, *, seed: int) -> None:
        check_length(sequence_length)
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        if store.num_documents < lanes:
            raise ValueError(
                f"lanes is {lanes}, but {store.folder} holds only {store.num_documents} documents: "
                "use a smaller batch, or give more documents"
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
                f"{shortest} tokens: shorten sequence_length, use a smaller batch, or give more "
                "data"
            )

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the ends of the lanes that no item holds."""
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
            # Where the lane's position 0 would lie in the store, if this document led there.
            origin = int(self.store.starts[documents[number]]) - begin
            pieces.append(self.store.tokens(origin + max(begin, start), origin + min(end, stop)))
            begin, number = end, number + 1
        tokens = np.concatenate(pieces)
        starts = np.array(starts, np.int64)
        item = make_item(tokens, starts, sequence_length=self.sequence_length)
        return item | {"tokens_before": before}


def _deal(lengths: np.ndarray, lanes: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The documents of each lane, in order, and where in the lane each of them ends."""
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
    """ValueError unless a sequence has at least one token."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")


def _check_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is outside a dataset of {length} items")
    return index % length


class Collator:
    """Makes a batch of b items, all of it torch tensors.

    - flowing: `input_ids`, `shift_labels`, `labels`, each (b, T);
    - separate: each (1, b T), and `cu_seqlens` with a boundary at every row and document, none
      empty; what would predict the first token of another document is -100;
    - separate with `lanes`: the first sequence of each row continues what came before. A document
      that begins with the row therefore leaves an empty sequence there: a value twice in
      `cu_seqlens`. `first_sequence` (b,) int64 gives the number of each row's first sequence.

    `labels` equals `shift_labels`: they are shifted already. The `bookmark` of the last item, if
    it comes from a stream, is handed on. A batch of `SKIPPED` items is empty.

    Args:
        separate: whether documents are kept apart.
        lanes: whether rows continue those of the batch before (`LaneDataset`).
        shard: (r, n): only the r-th of n equal slices of every row, for context parallelism.
            Separate, b must be 1, and for r > 0 the first sequence continues from the slice
            before, with an empty one as above.

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
                f"lanes cannot be combined with shard {tuple(shard)}: carry memory from batch to "
                "batch, or divide each row, but not both"
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
                # The token before a document's first; the one before this row is in another row.
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
