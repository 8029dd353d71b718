"""From what a caller feeds to token ids; errors name the argument and what is expected.

Letters: B sequences, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flash_frac.models import FracForCausalLM

Inputs: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor


def to_ids(
    inputs: Inputs,
    *,
    batch_size: int,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Tensor, list[int]]:
    """Ids (B, T), the shorter sequences behind zeros that mean nothing, and tokens of each.

    Example: `to_ids([[5, 6], [7]], ...)` gives [[5, 6], [0, 7]] and [2, 1].
    """
    if isinstance(inputs, Tensor):
        ids = inputs[None] if inputs.ndim == 1 else inputs
        if ids.ndim != 2:
            raise ValueError(f"inputs must have shape (T,) or (B, T), got {tuple(inputs.shape)}")
        counts = [ids.shape[1]] * ids.shape[0]
    else:
        rows = [torch.as_tensor(row) for row in _rows(inputs, tokenizer)]
        # A list without tokens becomes a tensor of floats.
        rows = [row if row.numel() else row.long() for row in rows]
        counts = [row.numel() for row in rows]
        ids = torch.zeros(len(rows), max(counts), dtype=torch.long)
        for row, out in zip(rows, ids, strict=True):
            if row.ndim != 1 or row.is_floating_point():
                raise ValueError(f"inputs must hold whole numbers, ids of tokens, got {inputs!r}")
            out[ids.shape[1] - row.numel() :] = row
    if ids.shape[0] != batch_size:
        raise ValueError(
            f"inputs must be for {batch_size} sequences, the batch_size of the stream, got "
            f"{ids.shape[0]}; to feed all of them the same, repeat it in a list"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"inputs must hold whole numbers, ids of tokens, got {ids.dtype}")
    if ids.numel():
        # On a GPU, an id outside would end the process.
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"inputs must be in [0, {vocab_size}), the vocabulary, got {low} to {high}"
            )
    return ids.long(), counts


def _rows(
    inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Sequence[Sequence[int]]:
    texts = [inputs] if isinstance(inputs, str) else inputs
    if any(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise ValueError(
                "inputs must be ids, got text; for text, make FracStream(model, tokenizer)"
            )
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)  # pyright: ignore
        return encoded["input_ids"]  # pyright: ignore[reportReturnType]
    nested = len(inputs) > 0 and isinstance(inputs[0], (Sequence, Tensor))
    return inputs if nested else [inputs]  # pyright: ignore[reportReturnType]


def end_ids(
    eos: bool | int | Sequence[int],
    model: FracForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[int]:
    """Tokens that end a sequence: those named or, for True, those that the model knows of."""
    if eos is False:
        return []
    if eos is True:
        known: Any = getattr(model.generation_config, "eos_token_id", None)
        if known is None and tokenizer is not None:
            known = tokenizer.eos_token_id
        return [] if known is None else end_ids(known, model, tokenizer)
    return [eos] if isinstance(eos, int) else list(eos)
