"""Loss of a language model as a function of its context length.

S tokens are read in windows of L tokens. Each window starts with an empty state and predicts the
next token after each of its tokens, including the first token of the next window. So tokens 1 to S
are each predicted once for any L, from a context of 1 to L tokens, and losses at different L differ
only by the context. Within a window, states carry over from one document to the next, separated by
an eos token, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flash_frac.data.store import Store
from flash_frac.models.evaluating import evaluating

# Tokens per forward pass, which bounds the logits in memory.
BATCH_TOKENS = 4096


def loss_by_length(
    model: nn.Module,
    store: Store,
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[int, float]:
    """Mean negative log-likelihood, in nats per token, for each window length L.

    The same tokens are scored for each L: all complete windows of the largest length, from the
    start of the store, each cut into windows of L.

    Args:
        model: a causal language model with a state cache, such as FracForCausalLM.
        store: the tokens.
        lengths: the lengths L, each a divisor of the largest.
        max_tokens: score at most this many tokens; by default, all in the store.
        batch_tokens: tokens per forward pass. Longer windows are read in pieces that carry the
            state over.

    Returns:
        The loss at each length.

    Example:
        >>> loss_by_length(model, splits.held_out, [256, 1024, 4096])
        {256: 1.61, 1024: 1.58, 4096: 1.57}
    """
    num_tokens = scored_tokens(store, lengths, max_tokens=max_tokens)
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    with evaluating(model):
        return {length: _loss(model, store, length, num_tokens, batch_tokens) for length in lengths}


def scored_tokens(store: Store, lengths: Sequence[int], *, max_tokens: int | None = None) -> int:
    """S, the number of tokens that `loss_by_length` scores: tokens 1 to S of the store.

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
    # The last token has no next token to predict.
    usable = store.num_tokens - 1
    if max_tokens is not None:
        usable = min(usable, max_tokens)
    if usable < longest:
        raise ValueError(
            f"lengths go up to {longest}, but there are only {max(usable, 0)} tokens to score in "
            f"{store.folder}: use shorter lengths, a larger max_tokens, or more text"
        )
    return usable // longest * longest


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss to bits per byte, which do not depend on the tokenizer.

    Example: `bits_per_byte(math.log(2), 1.0) == 1.0`
    """
    if bytes_per_token <= 0:
        raise ValueError(f"bytes_per_token must be positive, got {bytes_per_token}")
    return nats_per_token / math.log(2) / bytes_per_token


def _loss(model: Any, store: Store, length: int, num_tokens: int, batch_tokens: int) -> float:
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
            # The last piece needs no cache.
            more = first + batch_tokens < length
            output = model(inputs[:, piece].to(device), past_key_values=cache, use_cache=more)
            cache = output.past_key_values
            total += F.cross_entropy(
                output.logits.flatten(0, 1), targets[:, piece].flatten().to(device), reduction="sum"
            ).double()
    return total.item() / num_tokens
