"""How MADLab models are trained and scored, by the official code and by the paper.

The official code differs, or may differ, from the paper in what its settings do not show:

- its cosine schedule is never applied, because Lightning does not read the key under which it is
  returned: the learning rate stays constant;
- its score is that of the epoch with the lowest test perplexity, not of the last one;
- its accuracy is macro (see `metric.py`), taken per batch and averaged over batches;
- its AdamW decays all parameters, biases and norms included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

Schedule = Literal["constant", "cosine"]
Selection = Literal["last", "best_test_ppl"]
Average = Literal["batch_macro", "macro", "micro"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of a run that are the same for all models and tasks.

    Attributes:
        lr_schedule: "constant", or "cosine" from lr to min_lr over all epochs.
        select: the epoch to score: "last" or "best_test_ppl".
        average: "batch_macro" (mean over batches of the macro accuracy), "macro" or "micro".
        epochs, batch_size: number of epochs, and sequences per batch in training and test.
        lrs, weight_decays: the sweep; the pair with the best mean over seeds counts.
        seeds: each determines its own data and weights.
        stop_accuracy: a run ends after an epoch whose test accuracy exceeds it.
        bfloat16: whether to compute in mixed precision.
    """

    lr_schedule: Schedule
    select: Selection
    average: Average = "batch_macro"
    epochs: int = 200
    batch_size: int = 128
    lrs: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decays: tuple[float, ...] = (0.0, 0.1)
    min_lr: float = 1e-6
    seeds: tuple[int, ...] = (12345, 12346, 12347, 12348, 12349)
    stop_accuracy: float = 0.999
    bfloat16: bool = True

    def __post_init__(self) -> None:
        choices = {"lr_schedule": Schedule, "select": Selection, "average": Average}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(allowed))}, "
                    f"got {getattr(self, name)!r}"
                )
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lrs", "weight_decays", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one value, got none")

    @property
    def sweep(self) -> tuple[tuple[float, float], ...]:
        """All pairs of learning rate and weight decay."""
        return tuple(product(self.lrs, self.weight_decays))

    def num_steps(self, num_train: int) -> int:
        """Steps of a whole run on `num_train` sequences; a smaller last batch is dropped."""
        return self.epochs * (num_train // self.batch_size)


PRESETS = {
    "official": Protocol(lr_schedule="constant", select="best_test_ppl"),
    "paper": Protocol(lr_schedule="cosine", select="last"),
}
"""The official code's settings, and the paper's text taken literally."""
