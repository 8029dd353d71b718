"""Items to a batch. Letters: b rows, T tokens in each, N sequences.

Flowing, documents are joined by nothing but the eos token, and memory flows across. Separate, all
rows lie in one of b T tokens, and `cu_seqlens` (N + 1,) int32 gives the boundaries of the
sequences, which know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_frac.data.packing import IGNORED, Item


class Collator:
    """Makes a batch of b items, all of it torch tensors.

    - flowing: `input_ids`, `shift_labels`, `labels`, each (b, T);
    - separate: each (1, b T), and `cu_seqlens` with a boundary at every row and document, none
      empty; what would predict the first token of another document is -100;
    - separate with `lanes`: the first sequence of each row continues what came before. A document
      that begins with the row therefore leaves an empty sequence there: a value twice in
      `cu_seqlens`. `first_sequence` (b,) int64 gives the number of each row's first sequence.

    `labels` equals `shift_labels`: they are shifted already. The `bookmark` of the first item, if
    it comes from a stream, is handed on.

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
        # Of the first item: all items before it are in this batch or an earlier one, of any worker.
        extra = {k: v for k, v in items[0].items() if k == "bookmark"}
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
