"""The held-out loss of a model: every token counts once, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_frac.train.others import next_token_loss


@torch.no_grad()
def held_out_loss(
    model: Any,
    batches: Iterable[Any],
    prepare: Callable[[Any], Any],
    device: torch.device,
    *,
    is_frac: bool,
) -> tuple[float, float]:
    """The mean loss per token, and the number of predicted tokens.

    Args:
        model: the model in training, wrapped or not.
        batches: the batches of this process, from `Collator`.
        prepare: moves a batch to its device.
        is_frac: whether it is a Frac model, which accepts all keys of a batch.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        inputs = prepare(batch)
        count = (inputs["shift_labels"] != -100).sum()
        # A slice without labels must add 0, not NaN.
        loss = torch.where(count > 0, _summed(model, inputs, is_frac), 0)
        total += torch.stack([loss.double(), count.double()])
    model.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total[0] / total[1]).item(), total[1].item()


def _summed(model: Any, inputs: dict[str, Any], is_frac: bool) -> Tensor:
    """The summed loss: dividing by one item leaves the sum."""
    if is_frac:
        return model(**inputs, use_cache=False, num_items_in_batch=1).loss
    return next_token_loss(model(inputs["input_ids"], use_cache=False), inputs["shift_labels"], 1)
