"""The controls of each layer, seen one layer at a time while a model reads a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_frac.inspect.statistics import check_model, evaluating, layer_dynamics
from flash_frac.layers import FracMixer
from flash_frac.ops import Controls, Dynamics

Visit = Callable[[int, FracMixer, Dynamics, Controls], None]


@contextmanager
def watching(model: nn.Module, visit: Visit) -> Iterator[None]:
    """Within it, every call of a layer also calls visit(layer, mixer, dynamics, controls).

    Δ, α, λ are (B, T, H), and read, write, log_decay (B, T, H, M). Nothing is kept for longer than
    the visit. Afterwards, on errors too, the layers are as they were.

    Example:
        >>> with watching(model, lambda n, mixer, dyn, controls: print(n, dyn.alpha.mean())):
        ...     model(ids)
    """
    mixers = [module for module in model.modules() if isinstance(module, FracMixer)]
    # An instance may have a `controls` of its own already, which must come back.
    before = [vars(mixer).get("controls") for mixer in mixers]

    def wrap(layer: int, mixer: FracMixer) -> Callable[..., Controls]:
        original = mixer.controls

        def controls(inner_x: Tensor, *rest: Tensor | None) -> Controls:
            result = original(inner_x, *rest)  # pyright: ignore[reportArgumentType]
            visit(layer, mixer, layer_dynamics(mixer, mixer.dyn_proj(inner_x)), result)
            return result

        return controls

    try:
        for layer, mixer in enumerate(mixers):
            vars(mixer)["controls"] = wrap(layer, mixer)
        yield
    finally:
        for mixer, own in zip(mixers, before, strict=True):
            vars(mixer).pop("controls", None)
            if own is not None:
                vars(mixer)["controls"] = own


def visit_layers(model: nn.Module, input_ids: Tensor, visit: Visit) -> None:
    """Call visit(layer, mixer, dynamics, controls) for every layer in one pass over the tokens.

    Example: `visit_layers(model, ids, lambda n, mixer, dyn, controls: means.append(dyn.delta))`
    """
    check_model(model)
    check_tokens(input_ids)
    # The base model, because logits over the vocabulary are not looked at.
    base: Any = getattr(model, "base_model", model)
    with evaluating(model), watching(model, visit):
        base(input_ids, use_cache=False)


def check_tokens(input_ids: Tensor) -> None:
    """Raise unless these are rows of token ids."""
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be integers of shape (B, T), got {tuple(input_ids.shape)} "
            f"{input_ids.dtype}; of one text, pass ids[None]"
        )
