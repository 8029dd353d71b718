"""Temporary eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module's mode is restored.

    Example: `with evaluating(model): logits = model(ids).logits`
    """
    training = [module for module in model.modules() if module.training]
    try:
        if training:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
