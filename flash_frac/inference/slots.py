"""Slots: the tensor rows that hold sequences, and the decode step that computes their next tokens.

Everything that a step needs to know about a sequence, including sampling settings, is in its row of
some tensor. So one CUDA graph for a number of rows serves any sequences in them.
Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_frac.inference.sampling import SamplingSettings, SlotSettings, choose_each
from flash_frac.inference.state import read_tokens
from flash_frac.models import FracForCausalLM
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.slot_cache import SlotCache

# More columns than any buffer has.
EVERYTHING = 2**62
# Longer pieces of prompts keep a GPU busy while the host launches the next kernels, so they need no
# graph.
LONGEST_RECORDED = 4096


class Slots:
    """B rows, allocated once; unused rows compute garbage that nobody reads.

    Args:
        model: in eval mode.
        example: a cache of the model, with the shapes of one sequence.
        num_rows: B.
        size: columns in the KV cache of full-attention layers.

    Attributes:
        cache: states, keys and values.
        settings: sampling settings.
        token: (B, 1), the last token, which the next step reads.
        logits: (B, V) float32, from which it was chosen.
        used: (B,), whether a row holds a sequence. Unused rows restart at position 0 in every step,
            so they never overrun their buffers.
        seen: (B, V), tokens to which the repetition penalty applies.
    """

    def __init__(
        self, model: FracForCausalLM, example: BufferedCache, num_rows: int, size: int
    ) -> None:
        self.model, self.num_rows, self.size = model, num_rows, size
        head = model.lm_head.weight
        self.device = head.device
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.cache = SlotCache(example, num_rows, size)
            self.settings = SlotSettings.empty(num_rows, self.device)
            self.token = torch.zeros(num_rows, 1, dtype=torch.long, device=self.device)
            self.logits = torch.zeros(num_rows, head.shape[0], device=self.device)
            self.seen = torch.zeros_like(self.logits, dtype=torch.bool)
            self.used = torch.zeros(num_rows, dtype=torch.bool, device=self.device)
        self._views: dict[int, tuple[SlotCache, SlotSettings]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        others = (self.token, self.logits, self.seen, self.used)
        return self.cache.claimed + sum(x.nbytes for x in others)

    def clear(self) -> None:
        """Mark every row as used and empty."""
        self.cache.clear()
        self.used.fill_(True)

    def _first(self, num: int) -> tuple[SlotCache, SlotSettings]:
        """Cache and settings of the first rows, always the same objects."""
        if num not in self._views:
            self._views[num] = self.cache.rows(num), self.settings.rows(num)
        return self._views[num]

    def advance(self, num: int) -> Tensor:
        """Read the last tokens of the first rows and return the next, as `choose` does."""
        cache, _ = self._first(num)
        cache.fixed_room = EVERYTHING
        if cache.attention_layers:
            cache.lengths.mul_(self.used[:num].to(cache.lengths.device))
        self.logits[:num] = read_tokens(self.model, cache, self.token[:num])
        return self.choose(num)

    def read(
        self, room: int | None, counts: Sequence[int], ids: Tensor, mask: Tensor | None = None
    ) -> None:
        """Read ids (B', T) into the first B' rows, which hold `counts` tokens; keep the logits.

        Args:
            room: columns to attend to, so that the same kernels serve all counts; None attends to
                as many as there are tokens.
            mask: (B', T), False at padding.
        """
        cache, _ = self._first(len(ids))
        cache.counts, cache.fixed_room = list(counts), room
        self.logits[: len(ids)] = read_tokens(self.model, cache, ids, mask)

    def signature(self, counts: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Host values that `read` of T tokens uses without `room`; each needs its own graph."""
        cache, _ = self._first(len(counts))
        cache.counts, cache.fixed_room = list(counts), None
        return cache.signature(num_tokens)

    def choose(self, num: int) -> Tensor:
        """The next tokens of the first rows: (2, num) int32, tokens and bits of their logprobs.

        A token is -1 where logits are not finite.
        """
        _, settings = self._first(num)
        tokens, logprobs = choose_each(self.logits[:num], settings, seen=self.seen[:num])
        # A failed or unused row still has to read some token.
        self.token[:num, 0] = tokens.clamp_min(0)
        return torch.stack([tokens.int(), logprobs.view(torch.int32)])

    def set_row(self, row: int, sampling: SamplingSettings, seed: int, prompt: np.ndarray) -> None:
        """Let a row choose by these settings from its next token on."""
        self.settings.set(row, sampling, seed)
        if sampling.repetition_penalty != 1:
            self.seen[row].zero_()
            self.seen[row].index_fill_(0, upload(prompt, self.device), True)

    def mark_seen(self, ids: Tensor, mask: Tensor | None) -> None:
        """Let the repetition penalty apply to ids (B, T) of all rows, and to no others.

        Args:
            mask: (B, T), 0 at padding, which does not count; None if there is none.
        """
        real = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
        counts = torch.zeros_like(self.seen, dtype=ids.dtype)
        counts.scatter_add_(1, ids.to(self.device), real.to(self.device))
        self.seen.copy_(counts > 0)

    def copy_row(
        self, row: int, source: Slots, source_row: int, num_tokens: int | None = None
    ) -> None:
        """Copy a row of other slots, which has read this many tokens; None if unknown."""
        self.cache.copy_row(row, source.cache, source_row, num_tokens)
        for mine, theirs in (
            (self.settings.table, source.settings.table),
            (self.token, source.token),
            (self.seen, source.seen),
        ):
            mine[row].copy_(theirs[source_row])

    def most_likely(self, rows: Sequence[int], num: int) -> Tensor:
        """The most likely tokens of these rows in the step that just ran.

        Returns:
            (2, rows, num) int32, tokens and bits of their logprobs.
        """
        logprobs = self.logits[upload(rows, self.device)].log_softmax(-1)
        values, tokens = logprobs.topk(min(num, logprobs.shape[1]))
        return torch.stack([tokens.int(), values.view(torch.int32)])


class Sent:
    """A tensor on its way to the host; only `get` waits for it.

    Example: `sent = Sent(slots.advance(8)); launch_more(); sent.get()`
    """

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    def get(self) -> Tensor:
        """Wait for the tensor and return it on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def pinned(values: Any, device: torch.device) -> Tensor:
    """Integers in pinned memory, which can be copied to a device asynchronously."""
    x = torch.as_tensor(values)
    return x.pin_memory() if device.type == "cuda" else x


def upload(values: Any, device: torch.device) -> Tensor:
    """Integers as a tensor on a device, copied asynchronously."""
    return pinned(values, device).to(device, non_blocking=True)


def floats(bits: Tensor) -> list[Any]:
    """Logprobs of any shape from their int32 bits."""
    return bits.view(torch.float32).tolist()
