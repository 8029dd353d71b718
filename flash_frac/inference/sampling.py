"""Choose the next token from its logits, greedily or by sampling.

Settings apply in Hugging Face's order: repetition penalty, temperature, top-k, top-p, min-p.
`choose` applies one setting to the whole batch, and `choose_each` applies one to each row.
Nothing here waits for a device, so it can be recorded in a CUDA graph.
Letters: B batch, V vocabulary.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_frac.ops import sample
from flash_frac.ops.sample.reference import WIDTH, fields


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen; greedy by default.

    Attributes:
        temperature: divides the logits; 0 picks the most likely token.
        top_k: keep only the k most likely tokens; 0 for all.
        top_p: keep the fewest top tokens whose total probability reaches this value.
        min_p: keep tokens with at least this fraction of the top probability.
        repetition_penalty: divides positive logits of tokens seen before, and multiplies negative
            ones; 1 changes nothing.

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
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0):
            raise ValueError(
                "top_k, top_p and min_p need a temperature above 0: with 0, the most likely token "
                f"is always taken; set temperature=1.0, got {self}"
            )

    def changed(self, changes: Mapping[str, Any]) -> SamplingSettings:
        """Settings with other values; top_k, top_p or min_p imply sampling unless greedy is asked.

        Example: `SamplingSettings().changed({"top_p": 0.9}).temperature == 1.0`
        """
        found = {**asdict(self), **changes}
        if found["temperature"] == 0:
            if "temperature" in changes or not {"top_k", "top_p", "min_p"} & set(changes):
                found |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
            else:
                found["temperature"] = 1.0
        return SamplingSettings(**found)


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
        generator: torch random generator on the device of the logits; None for the default one.

    Example: `choose(logits, SamplingSettings(temperature=0.8, top_k=40))`
    """
    scores = adjust(logits, settings, seen=seen)
    if settings.temperature == 0:
        return scores.argmax(-1)
    # argmax of p / e, with e drawn from Exp(1), samples from p without a sum over p.
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return (scores.softmax(-1) / noise).argmax(-1)


def adjust(logits: Tensor, settings: SamplingSettings, *, seen: Tensor | None = None) -> Tensor:
    """Float32 logits (B, V) of the sampling distribution; -inf at dropped tokens."""
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
    """Keep the fewest top tokens whose total probability is at least `share`."""
    ordered, order = scores.sort(-1)
    # From the least likely up, drop tokens while their total is at most 1 - share.
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - share
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


class SlotSettings:
    """Sampling settings of many sequences, one row per slot, in one tensor on a device.

    `choose_each` reads them, so a CUDA graph contains no settings. The attributes are views of the
    table, to read and write rows by name.

    Attributes:
        table: (slots, 10) int32, as `flash_frac.ops.sample` reads it.
        temperature, top_p, min_p, repetition_penalty: (slots,) float32.
        top_k: (slots,) int32.
        seed, drawn: (slots,) int64, the random seed and the number of tokens sampled with it.

    Example:
        >>> settings = SlotSettings.empty(64, model.device)
        >>> settings.set(3, SamplingSettings(temperature=0.8), seed=0)
        >>> tokens, logprobs = choose_each(logits, settings.rows(4), seen=seen)
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.top_k,
            self.seed,
            self.drawn,
        ) = fields(table)

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> SlotSettings:
        """Greedy settings for this many slots."""
        made = cls(torch.zeros(slots, WIDTH, dtype=torch.int32, device=device))
        made.set_rows(range(slots), [GREEDY] * slots, [0] * slots)
        return made

    def set(self, row: int, settings: SamplingSettings, seed: int, *, drawn: int = 0) -> None:
        """Set up a slot for a request.

        Args:
            row: the slot's row.
            settings: how its tokens are chosen.
            seed: random seed, any signed 64-bit integer.
            drawn: tokens already sampled with this seed, for a request that resumes.
        """
        self.set_rows([row], [settings], [seed], drawn=[drawn])

    def set_rows(
        self,
        rows: Sequence[int],
        settings: Sequence[SamplingSettings],
        seeds: Sequence[int],
        *,
        drawn: Sequence[int] | None = None,
    ) -> None:
        """Like `set`, for many slots in one copy to the device.

        Example: `settings.set_rows([0, 2], [GREEDY, GREEDY], [0, 0])`
        """
        for row in rows:
            self._check(row)
        requests = zip(rows, settings, seeds, drawn or [0] * len(rows), strict=True)
        packed = b"".join(_pack(*request) for request in requests)
        # Row numbers go in the same copy, which does not wait for the device.
        given = torch.frombuffer(bytearray(packed), dtype=torch.int32).view(-1, 2 + WIDTH)
        given = given.to(self.table.device, non_blocking=True)
        self.table.index_copy_(0, given.view(torch.int64)[:, 0], given[:, 2:])

    def set_all(self, settings: SamplingSettings, seed: int | None) -> None:
        """Like `set`, for all sequences of a batch, with seeds from `seeds_of_rows`.

        Example: `settings.set_all(SamplingSettings(temperature=0.8), seed=7)`
        """
        num = len(self)
        self.set_rows(range(num), [settings] * num, seeds_of_rows(seed, num))

    def move(self, source: int, target: int) -> None:
        """Copy the settings of a slot, with its count of sampled tokens, to another one."""
        self._check(source)
        self._check(target)
        self.table[target].copy_(self.table[source])

    def rows(self, count: int) -> SlotSettings:
        """The first slots, in the same memory."""
        if not 0 < count <= len(self):
            raise ValueError(f"count must be from 1 to {len(self)} (slots), got {count}")
        return SlotSettings(self.table[:count])

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise ValueError(f"row must be from 0 to {len(self) - 1}, got {row}")


def _pack(row: int, settings: SamplingSettings, seed: int, drawn: int) -> bytes:
    """A row's number, and its words in the order of `fields`."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a signed 64-bit integer, got {seed}")
    numbers = (settings.temperature, settings.top_p, settings.min_p, settings.repetition_penalty)
    # Large enough to have no effect, and well within the range of float32 and int32.
    numbers, top_k = [min(x, 1e30) for x in numbers], min(settings.top_k, 2**30)
    return struct.pack("=q4f2i2q", row, *numbers, top_k, 0, seed, drawn)


def seeds_of_rows(seed: int | None, num: int) -> list[int]:
    """Random seeds for the sequences of a batch; the first is `seed` itself.

    Args:
        seed: a signed 64-bit integer; None for new seeds each time.
        num: number of sequences.

    Example: `settings.set_rows(range(4), [sampling] * 4, seeds_of_rows(7, 4))`
    """
    if seed is None:
        return [secrets.randbits(63) for _ in range(num)]
    # Not seed + row: batches with neighbouring seeds would share sequences.
    others = np.random.SeedSequence(seed % 2**64).generate_state(num, np.uint64) >> np.uint64(1)
    return [seed, *others.tolist()[1:]]


def no_numbers(row: int) -> RuntimeError:
    """The error for a sequence of a batch whose token is -1."""
    return RuntimeError(
        f"the logits of sequence {row} are not finite (NaN or infinite); check the model's "
        "weights, or try another dtype"
    )


def choose_each(
    logits: Tensor, settings: SlotSettings, *, seen: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The next tokens (B,) from logits (B, V), with settings for each row, and log-probabilities.

    A row's sample depends only on its logits, its seed and the number of tokens sampled so far: it
    is the same in any batch, at any row and on any backend. At temperature 0 it equals that of
    `choose` with GREEDY and the same penalty. Top-k, top-p and min-p keep the same tokens as
    `adjust`, except for ties: here tokens with equal logits are kept or dropped together, while
    top-p in `adjust` drops some of them in unspecified order.

    Args:
        settings: a row for each sequence; its count of sampled tokens is incremented.
        seen: (B, V) bool, True at tokens to which the repetition penalty applies. Chosen tokens
            are marked in it, whatever the penalty.
        backend: as in `frac_scan`.

    Returns:
        tokens: (B,) int64. A row without a valid distribution (NaN or +inf anywhere in its logits,
            or only -inf) gets -1: end that request; the others are unaffected.
        logprobs: (B,) float32, log_softmax(logits)[token] of the original logits, before penalty,
            temperature and filters, as vLLM reports by default ("raw_logprobs"). OpenAI's
            reference only says "log probability". NaN where the token is -1.

    Example:
        >>> settings = SlotSettings.empty(len(logits), logits.device)
        >>> settings.set(0, SamplingSettings(temperature=0.8, top_p=0.95), seed=1)
        >>> seen = torch.zeros_like(logits, dtype=torch.bool)
        >>> tokens, logprobs = choose_each(logits, settings, seen=seen)
    """
    return sample(logits, settings.table, seen, backend)
