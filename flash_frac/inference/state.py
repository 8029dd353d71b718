"""The state of a model's layers in a `BufferedCache`, and its decay over time without input.

The KV cache of full-attention layers only grows at its end, so all marks of a stream share it.
Letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from flash_frac.inference.graphs import Recorder
from flash_frac.inference.text import TextTail
from flash_frac.layers import MixerState
from flash_frac.models import FracCache, FracForCausalLM
from flash_frac.models.attention import AttentionBlock
from flash_frac.models.block import FracBlock
from flash_frac.models.buffers import BufferedCache, KeyValues
from flash_frac.models.cache import read_state, write_state
from flash_frac.models.evaluating import evaluating

logger = logging.get_logger(__name__)

# Tokens of a piece in `read_pieces`.
PIECE = 4096


@dataclass(frozen=True, eq=False)
class StreamMark:
    """A snapshot of a stream. A mark from `FracStream.mark` is never written to.

    Attributes:
        cache: the states of the layers.
        logits: (B, V) float32 of the next token, or None if they are unknown.
        seen: (B, V), True at tokens that the sequence contains; replaced, never written.
        lengths: number of tokens of each sequence.
        tails: each sequence's end as text; empty without a tokenizer.
    """

    cache: BufferedCache
    logits: Tensor | None
    seen: Tensor
    lengths: tuple[int, ...]
    tails: tuple[TextTail, ...]

    def copy(self, into: BufferedCache | None = None) -> StreamMark:
        """A copy in new memory, or in that of a cache that is no longer needed.

        It shares the KV cache of full-attention layers.
        """
        if into is None:
            into = self.cache.copy()
        else:
            into.copy_fixed(self.cache)
            into.follow(self.cache)
        logits = None if self.logits is None else self.logits.clone()
        return replace(self, cache=into, logits=logits)

    def fork(self) -> StreamMark:
        """A copy that shares no memory."""
        copied = self.copy()
        copied.cache.full = copied.cache.full.resized(copied.cache.full.size)
        return copied

    def without_tokens(self) -> StreamMark:
        """Like `copy`, without the growing KV cache, which the later stream holds."""
        copied = self.copy()
        copied.cache.full = KeyValues()
        return copied

    def after(
        self,
        ids: Tensor,
        counts: Sequence[int],
        tails: tuple[TextTail, ...],
        cache: BufferedCache,
        logits: Tensor,
    ) -> StreamMark:
        """The mark after reading the last `counts` of ids (B, T), with its cache and logits."""
        device, fed = self.seen.device, torch.tensor(counts)[:, None]
        mask = padding_mask(ids, counts)
        if mask is not None:
            # Replace padding by the last token, which is marked as seen anyway.
            ids = torch.where(mask.to(ids.device), ids, ids[:, -1:])
        seen = self.seen.scatter(1, ids.to(device), True)
        if min(counts) == 0 and self.logits is not None:
            some = (fed > 0).to(device)
            logits, seen = logits.where(some, self.logits), seen.where(some, self.seen)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        return StreamMark(cache, logits, seen, lengths, tails)

    def select(self, rows: list[int]) -> StreamMark:
        """The sequences at `rows`, in that order."""
        index = torch.tensor(rows, device=self.seen.device)
        return StreamMark(
            BufferedCache.cat([self.cache], rows),
            None if self.logits is None else self.logits[index],
            self.seen[index],
            tuple(self.lengths[n] for n in rows),
            tuple(self.tails[n] for n in rows if self.tails),
        )

    @staticmethod
    def cat(marks: Sequence[StreamMark]) -> StreamMark:
        """One batch of all sequences, in order."""
        logits = [mark.logits for mark in marks if mark.logits is not None]
        return StreamMark(
            BufferedCache.cat([mark.cache for mark in marks]),
            torch.cat(logits) if len(logits) == len(marks) else None,
            torch.cat([mark.seen for mark in marks]),
            tuple(length for mark in marks for length in mark.lengths),
            tuple(tail for mark in marks for tail in mark.tails),
        )


def find_mark(marks: Sequence[StreamMark], mark: StreamMark | None) -> int:
    """The position of a mark, or of the last one, among those of a stream."""
    found = [n for n, mine in enumerate(marks) if mark is None or mine is mark]
    if not marks and mark is None:
        raise ValueError("there is no mark to roll back to or release; call mark() first")
    if not found:
        raise ValueError(
            f"mark must be one of this stream's {len(marks)} marks, got another; rollback and "
            "release drop all later marks"
        )
    return found[-1]


def check_model(model: object) -> None:
    """Raise a ValueError unless this is an unwrapped FracForCausalLM with loaded weights."""
    if not isinstance(model, FracForCausalLM):
        raise ValueError(
            f"model must be a FracForCausalLM, got {type(model).__name__}; if it is wrapped "
            "(compiled, or in DistributedDataParallel), pass the model inside"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "model must not be offloaded (some of its weights are on the meta device); load it "
            "without offloading, or use model.generate"
        )


def read_tokens(
    model: FracForCausalLM, cache: FracCache, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Read ids (B, T) into the cache; return float32 logits (B, V) after the last.

    Args:
        mask: (B, T), 0 at padding, on the left; None without padding.
    """
    device = model.model.embed_tokens.weight.device
    if mask is not None and mask.device.type != "cpu":
        # The model moves a mask on the CPU itself, after checking it there.
        mask = mask.to(device)
    with evaluating(model):
        output = model(
            ids.to(device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return output.logits[:, -1]


def read_pieces(
    model: FracForCausalLM, cache: BufferedCache, ids: Tensor, mask: Tensor | None
) -> Tensor:
    """Like `read_tokens`; only the KV cache grows with T, no other memory."""
    cache.reserve(ids.shape[1])
    logits = None
    for part in pieces(ids, mask, PIECE):
        logits = read_tokens(model, cache, *part)
        cache.took(num_real(*part))
    assert logits is not None
    return logits


def read_one(
    recorder: Recorder,
    source: BufferedCache,
    target: BufferedCache,
    ids: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Read ids (B, 1) after the tokens of one cache into another, with a CUDA graph."""

    def step(ids: Tensor, mask: Tensor | None = None) -> Tensor:
        target.copy_fixed(source)
        return read_tokens(recorder.model, target, ids, mask)

    target.follow(source)
    target.reserve(1)
    recorder.bind(source, target, target.full)
    inputs = [x for x in (ids, mask) if x is not None]
    kind = ("token", len(inputs), target.signature(1))
    logits = recorder.run(kind, step, inputs, variant=id(source))
    assert logits is not None
    target.took(num_real(*inputs))
    return logits


def num_real(ids: Tensor, mask: Tensor | None = None) -> list[int]:
    """Number of tokens in each sequence of ids (B, T), without padding."""
    return [ids.shape[1]] * ids.shape[0] if mask is None else mask.ne(0).sum(1).tolist()


def padding_mask(ids: Tensor, counts: Sequence[int]) -> Tensor | None:
    """(B, T), False before the last `counts` of each sequence; None without padding."""
    if min(counts) == ids.shape[1]:
        return None
    return torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(counts)[:, None]


def pieces(ids: Tensor, mask: Tensor | None, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Ids (B, T), and the mask if there is one, cut along T into pieces of at most `size`."""
    whole = [x for x in (ids, mask) if x is not None]
    yield from zip(*(x.split(size, 1) for x in whole), strict=True)


def mixers(model: FracForCausalLM) -> list[Any]:
    """The mixers of layers with a fixed-size state, in order."""
    return [block.mixer for block in model.model.layers if isinstance(block, FracBlock)]


@torch.no_grad()
def empty_cache(model: FracForCausalLM, batch_size: int) -> BufferedCache:
    """An empty cache for B sequences."""
    blocks = enumerate(model.model.layers)
    examples = {n: x.self_attn.k_norm.weight for n, x in blocks if isinstance(x, AttentionBlock)}
    cache = BufferedCache(model.config, batch_size, examples)
    # Tensors made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        for index, mixer in zip(cache.state_layers, mixers(model), strict=True):
            write_state(cache, index, mixer.empty_state(batch_size))
    return cache


@torch.no_grad()
def states_of(cache: FracCache) -> list[MixerState]:
    """The states of frac and delta layers, in the memory of the cache."""
    states = (read_state(cache, index) for index in cache.state_layers)
    return [state for state in states if state is not None]


@torch.no_grad()
def let_pass(model: FracForCausalLM, cache: FracCache, gap: float) -> None:
    """`FracStream.advance`, in place on the cache."""
    if cache.attention_layers:
        logger.warning_once(
            f"advance leaves the attention layers {cache.attention_layers} unchanged, because "
            "keys and values do not fade; only frac and delta layers fade."
        )
    for mixer, state in zip(mixers(model), states_of(cache), strict=True):
        # In float64: rounding errors of factors close to 1 (slow modes) would add up.
        factor = torch.exp(gap * mixer.idle_log_decay().double())
        state.recurrent.copy_(state.recurrent * factor[..., None])
        shift = min(math.floor(gap), state.conv.shape[-1])
        zeros = state.conv.new_zeros(*state.conv.shape[:2], shift)
        state.conv.copy_(torch.cat([state.conv[..., shift:], zeros], -1))
