"""torch.compile for the blocks of a model in training.

Blocks of one type share their code, so each type is compiled only once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flash_frac.models.lanes import LaneCache


@contextmanager
def compiled_blocks(model: Any) -> Iterator[None]:
    """Compile the blocks of a FracForCausalLM for training mode; undo it on exit.

    Whatever torch.compile cannot compile raises an error: there are no silent graph breaks.

    Example: `with compiled_blocks(model): model(ids).logits`
    """
    blocks = list(model.model.layers)
    for number, block in enumerate(blocks):
        # Replacing forward, not the module, keeps hooks (FSDP's too) outside the graph.
        block.forward = _compiled_in_training(block, number)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _compiled_in_training(block: nn.Module, number: int) -> Callable[..., Any]:
    plain, compiled = block.forward, torch.compile(block.forward, fullgraph=True)

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        # Evaluation is rare, and would recompile for each of its shapes.
        run = compiled if block.training else plain
        if not block.training or not isinstance(past_key_values, LaneCache):
            return run(*args, past_key_values=past_key_values, **kwargs)
        with _as_first_layer(block, number, past_key_values) as cache:
            return run(*args, past_key_values=cache, **kwargs)

    return forward


@contextmanager
def _as_first_layer(block: nn.Module, number: int, cache: LaneCache) -> Iterator[LaneCache]:
    """A cache of this block alone, as layer 0: a graph only holds for one index of a layer.

    It shares the tensors of `cache`.
    """
    own, windows = copy.copy(cache), cache.windows
    layers = {0: windows.layers[number]} if number in windows.layers else {}
    own.layers, own.windows = [cache.layers[number]], replace(windows, layers=layers)
    own._updated = {}
    parts: list[Any] = [part for part in block.modules() if hasattr(part, "layer_idx")]
    try:
        for part in parts:
            part.layer_idx = 0
        yield own
    finally:
        for part in parts:
            part.layer_idx = number
    if own._updated:
        cache._updated[number] = own._updated[0]
