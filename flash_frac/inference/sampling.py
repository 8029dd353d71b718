"""Choosing the next token from its logits: the most likely, or one drawn from the likely ones.

In the order of Hugging Face's `generate`: repetition penalty, temperature, top-k, top-p, min-p.
Nothing here waits for a device, so that it can be recorded in a CUDA graph.
Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen; the defaults take the most likely one.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the most likely tokens that hold this share of the probability together.
        min_p: only tokens with at least this share of the probability of the most likely one.
        repetition_penalty: logits of tokens seen before are divided by it where positive, and
            multiplied where negative; 1 changes nothing.

    Example: `SamplingSettings(temperature=0.8, top_p=0.95)`
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 for all tokens, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], 1 for all tokens, got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), 0 for all tokens, got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(
                f"repetition_penalty must be positive, 1 for none, got {self.repetition_penalty}"
            )


GREEDY = SamplingSettings()


def choose(
    logits: Tensor,
    settings: SamplingSettings,
    *,
    seen: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The next tokens (B,) from logits (B, V).

    Args:
        seen: (B, V), True at tokens to which the repetition penalty applies.
        generator: of random numbers, on the device of the logits; the default one if None.

    Example: `choose(logits, SamplingSettings(temperature=0.8, top_k=40))`
    """
    scores = adjust(logits, settings, seen=seen)
    if settings.temperature == 0:
        return scores.argmax(-1)
    # The largest p / e with e drawn from Exp(1) is a draw from p, without a sum over p.
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return (scores.softmax(-1) / noise).argmax(-1)


def adjust(logits: Tensor, settings: SamplingSettings, *, seen: Tensor | None = None) -> Tensor:
    """Logits (B, V) float32 of the distribution that is drawn from; -inf where nothing is."""
    scores = logits.float()
    if settings.repetition_penalty != 1 and seen is not None:
        penalty = settings.repetition_penalty
        lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(seen, lowered, scores)
    if settings.temperature == 0:
        return scores
    scores = scores / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        last = scores.topk(settings.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < last, -torch.inf)
    if settings.top_p < 1:
        scores = _keep_share(scores, settings.top_p)
    if settings.min_p > 0:
        shares = scores.softmax(-1)
        low = shares < settings.min_p * shares.amax(-1, keepdim=True)
        scores = scores.masked_fill(low, -torch.inf)
    return scores


def _keep_share(scores: Tensor, share: float) -> Tensor:
    """The fewest tokens that hold at least `share` together, from the most likely on."""
    ordered, places = scores.sort(-1)
    # From the least likely up: those that together hold no more than what may go.
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - share
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, places, dropped), -torch.inf)
