"""Accuracy of token predictions, by class or by token, over the batches of a test set.

    macro = mean over classes v of   hits_v / targets_v
    micro = Σ_v hits_v / Σ_v targets_v

Macro skips classes that are neither a target nor predicted; a class that is predicted but never a
target counts as 0. Predictions where the target is IGNORE are not counted.

The official runs take the macro accuracy of each batch and then the mean over batches, weighted by
batch size: `Accuracy.batch_mean`. `Accuracy.macro` is over all batches together.
Letters: B batch, T time, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.madlab.tasks import IGNORE


def confusion(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Counts (V, V) of scored tokens: targets in rows, predictions in columns.

    Args:
        predicted, target: integer tensors of one shape; IGNORE in `target` is not scored.
        num_classes: V.
    """
    # An extra cell for unscored tokens, because boolean indexing would sync with the device.
    cells = (target * num_classes + predicted).where(target != IGNORE, num_classes**2).flatten()
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=target.device)
    # Not torch.bincount, which is not deterministic on a GPU.
    counts.index_add_(0, cells, torch.ones_like(cells))
    return counts[:-1].view(num_classes, num_classes)


def macro_accuracy(counts: Tensor) -> Tensor:
    """Mean recall (a scalar) over classes that were a target or predicted; 0 if there are none."""
    hits, targets, predictions = counts.diagonal(), counts.sum(1), counts.sum(0)
    recall = hits / targets.clamp_min(1)
    present = targets + predictions > 0
    return recall.sum() / present.sum().clamp_min(1)


def micro_accuracy(counts: Tensor) -> Tensor:
    """Accuracy (a scalar) over scored tokens; 0 if there are none."""
    return counts.diagonal().sum() / counts.sum().clamp_min(1)


class Accuracy:
    """Accuracies of the batches seen so far, scalars on the device of the predictions.

    Nothing here syncs with the device.

    Example:
        >>> accuracy = Accuracy(num_classes=16)
        >>> accuracy.update(logits.argmax(-1), targets)
        >>> accuracy.batch_mean(), accuracy.macro(), accuracy.micro()
    """

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        self.num_classes = num_classes
        self._counts: Tensor | None = None
        self._batches: list[tuple[int, Tensor]] = []

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a batch of predictions and targets, (B, T) each."""
        if predicted.shape != target.shape:
            raise ValueError(
                f"predicted must have the shape of target, {tuple(target.shape)}, got "
                f"{tuple(predicted.shape)}; take the argmax of logits first"
            )
        counts = confusion(predicted, target, self.num_classes)
        self._batches.append((len(target), macro_accuracy(counts)))
        self._counts = counts if self._counts is None else self._counts + counts

    def batch_mean(self) -> Tensor:
        """Mean over batches of the macro accuracy, weighted by the number of sequences."""
        if not self._batches:
            raise ValueError("there is no batch to take the accuracy of; call update first")
        weighted = torch.stack([size * accuracy for size, accuracy in self._batches])
        return weighted.sum() / sum(size for size, _ in self._batches)

    def macro(self) -> Tensor:
        """Macro accuracy of all batches together."""
        return macro_accuracy(self.counts)

    def micro(self) -> Tensor:
        """Micro accuracy of all batches together."""
        return micro_accuracy(self.counts)

    @property
    def counts(self) -> Tensor:
        """Counts (V, V) of all batches: targets in rows, predictions in columns."""
        if self._counts is None:
            raise ValueError("there is no batch to take the accuracy of; call update first")
        return self._counts
