"""Loss of a language model as a function of the context that it may use.

A stretch of S tokens is read in windows of L tokens, each of which begins with an empty memory and
predicts, from each of its tokens, the next token of the stretch, also where that one begins the
next window. So tokens 1 to S are each predicted once whatever L is, from 1 to L tokens before them:
numbers of different L differ by the context alone. Documents flow on within a window, joined by
their eos token, as they do in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flash_frac.data import TokenStore
from flash_frac.models.evaluating import evaluating

# Logits of so many tokens are in memory at once.
BATCH_TOKENS = 4096


def loss_by_length(
    model: nn.Module,
    store: TokenStore,
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[int, float]:
    """Mean negative log-likelihood, in nats per token, for each length L of windows.

    The same tokens are scored for each L: as many windows of the largest length as the store holds
    from its beginning, each cut into windows of L.

    Args:
        model: a causal language model with a cache of states, such as FracForCausalLM.
        store: the tokens.
        lengths: L, each a divisor of the largest.
        max_tokens: at most so many tokens are scored; all that the store gives by default.
        batch_tokens: tokens in one forward pass. A longer window is read in pieces, the memory
            carried from one to the next.

    Returns:
        The loss of each length.

    Example:
        >>> loss_by_length(model, splits.held_out, [256, 1024, 4096])
        {256: 1.61, 1024: 1.58, 4096: 1.57}
    """
    num_tokens = scored_tokens(store, lengths, max_tokens=max_tokens)
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    with evaluating(model):
        return {length: _loss(model, store, length, num_tokens, batch_tokens) for length in lengths}


def scored_tokens(
    store: TokenStore, lengths: Sequence[int], *, max_tokens: int | None = None
) -> int:
    """S, how many tokens `loss_by_length` scores: tokens 1 to S of the store.

    Example: `scored_tokens(store, [256, 1024])` is a multiple of 1024.
    """
    if not lengths or any(length < 1 for length in lengths):
        raise ValueError(f"lengths must hold numbers of at least 1, got {list(lengths)}")
    longest = max(lengths)
    if any(longest % length for length in lengths):
        raise ValueError(
            f"lengths must divide the largest of them, {longest}, got {list(lengths)}; "
            "powers of two always do"
        )
    # The last token has none behind it to predict.
    usable = store.num_tokens - 1
    if max_tokens is not None:
        usable = min(usable, max_tokens)
    if usable < longest:
        raise ValueError(
            f"lengths goes up to {longest}, but there are only {max(usable, 0)} tokens to score in "
            f"{store.folder}: use shorter lengths, a larger max_tokens, or more text"
        )
    return usable // longest * longest


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss in a unit that does not depend on the tokenizer.

    Example: `bits_per_byte(math.log(2), 1.0) == 1.0`
    """
    if bytes_per_token <= 0:
        raise ValueError(f"bytes_per_token must be positive, got {bytes_per_token}")
    return nats_per_token / math.log(2) / bytes_per_token


def _loss(model: Any, store: TokenStore, length: int, num_tokens: int, batch_tokens: int) -> float:
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // length)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, num_tokens, rows * length):
        stop = min(start + rows * length, num_tokens)
        tokens = torch.from_numpy(store.tokens(start, stop + 1))
        inputs, targets = (x.view(-1, length) for x in (tokens[:-1], tokens[1:]))
        cache = None
        for first in range(0, length, batch_tokens):
            piece = slice(first, first + batch_tokens)
            # Only a piece that another one follows has a memory to hand on.
            more = first + batch_tokens < length
            output = model(inputs[:, piece].to(device), past_key_values=cache, use_cache=more)
            cache = output.past_key_values
            total += F.cross_entropy(
                output.logits.flatten(0, 1), targets[:, piece].flatten().to(device), reduction="sum"
            ).double()
    return total.item() / num_tokens
