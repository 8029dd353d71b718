"""Sample a token of each row, with its own settings, in plain PyTorch.

Nothing waits for the device.
A row of settings is ten 32-bit words, so one copy sets up a sequence. A draw is the argmax of
logit / temperature + noise over the tokens kept. The noise of a token depends only on the token,
the row's seed and how many tokens were drawn with it.
Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# 32-bit words in a row of settings.
WIDTH = 10
# Lower temperatures are greedy in float32, and an overflowing inverse would turn 0 into NaN.
COLDEST = 1e-30
# Philox makes four words at a time. They go to tokens SPREAD apart, so that each of a kernel's
# four loads reads neighbouring logits.
SPREAD = 256
GROUP = 4 * SPREAD
_MASK = 0xFFFFFFFF


class Fields(NamedTuple):
    """Columns (B,) of a table of settings: views that share its memory.

    Attributes:
        temperature, top_p, min_p, repetition_penalty: float32.
        top_k: int32.
        seed, drawn: int64; the row's random seed, and how many tokens were drawn with it.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    top_k: Tensor
    seed: Tensor
    drawn: Tensor


def fields(table: Tensor) -> Fields:
    """The columns of a table (B, WIDTH) int32."""
    temperature, top_p, min_p, penalty = table.view(torch.float32)[:, :4].unbind(1)
    seed, drawn = table.view(torch.int64)[:, 3:].unbind(1)
    return Fields(temperature, top_p, min_p, penalty, table[:, 4], seed, drawn)


def torch_sample(logits: Tensor, table: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Plain-torch form of `sample`: the same arguments."""
    settings = fields(table)
    logits = logits.float()
    scores = _penalise(logits, settings.repetition_penalty[:, None], seen)
    tokens = scores.argmax(-1)
    top = scores.gather(1, tokens[:, None])
    draws = settings.temperature > 0
    if _may_hold(draws):
        kept = scores >= lowest_kept(scores, settings)
        keys = (scores - top) * _inverse_temperature(settings) + _noise(settings, logits.shape[1])
        drawn = keys.masked_fill(~kept, -torch.inf).argmax(-1)
        tokens = torch.where(draws, drawn, tokens)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    good = logprobs.isfinite() & top[:, 0].isfinite()
    settings.drawn.add_(1)
    marked = seen.gather(1, tokens[:, None]) | good[:, None]
    seen.scatter_(1, tokens[:, None], marked)
    return torch.where(good, tokens, -1), torch.where(good, logprobs, torch.nan)


def _may_hold(condition: Tensor) -> bool:
    """Whether a condition holds in any row; True where checking would wait for the device."""
    return condition.device.type != "cpu" or bool(condition.any())


def _penalise(logits: Tensor, penalty: Tensor, seen: Tensor) -> Tensor:
    if not _may_hold(penalty != 1):
        return logits
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen & (penalty != 1), lowered, logits)


def _inverse_temperature(settings: Fields) -> Tensor:
    return 1 / settings.temperature[:, None].clamp(min=COLDEST)


def lowest_kept(scores: Tensor, settings: Fields) -> Tensor:
    """The lowest logit (B, 1) that may be drawn, after the penalty and before the temperature.

    Every filter keeps the largest logits, so one threshold replaces them all.
    """
    size, top, scale = scores.shape[1], scores.amax(-1, True), _inverse_temperature(settings)
    top_k, top_p = settings.top_k[:, None].long(), settings.top_p[:, None]
    by_count, by_share = (top_k > 0) & (top_k < size), top_p < 1
    # log(0) is -inf, which keeps all tokens.
    threshold = top + settings.min_p[:, None].log() / scale
    if not _may_hold(by_count | by_share):
        return threshold
    ordered = scores.sort(-1, descending=True).values
    last = ordered.gather(1, (top_k - 1).clamp(0, size - 1))
    least = torch.where(by_count, last, -torch.inf)
    weights = ((ordered - top) * scale).exp().double().masked_fill(ordered < least, 0)
    sums = weights.cumsum(-1)
    short = (sums < top_p.double() * sums[:, -1:]).sum(-1, keepdim=True)
    last = ordered.gather(1, short.clamp(max=size - 1))
    least = torch.where(by_share, torch.maximum(last, least), least)
    return torch.maximum(threshold, least)


def _noise(settings: Fields, size: int) -> Tensor:
    """Gumbel noise (B, V) of the tokens."""
    groups = -(-size // GROUP)
    counter = torch.arange(groups * SPREAD, device=settings.seed.device)[None]
    seed, drawn = settings.seed[:, None], settings.drawn[:, None]
    words = philox((counter, drawn & _MASK, drawn >> 32, counter * 0), (seed & _MASK, seed >> 32))
    words = torch.stack([word.unflatten(1, (groups, SPREAD)) for word in words], 2).flatten(1)
    # Likely winners have small exponential noise, where float32 is finest. Noise rounded to 1
    # would never win.
    uniform = (words[:, :size].float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24)
    return -(-torch.log1p(-uniform)).log()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al., 2011): random words from a 4-word counter and a 2-word key.

    Words are int64 tensors of values below 2^32; higher bits of the arguments are ignored.
    """
    c0, c1, c2, c3 = (c & _MASK for c in counter)
    k0, k1 = (k & _MASK for k in key)
    for _ in range(10):
        # Products keep all 64 bits, but not the sign.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (b >> 32 & _MASK) ^ c1 ^ k0, (a >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3
