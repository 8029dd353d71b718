"""The states of a model's layers, kept in a `FracCache`, and what time without input does to them.

Attention layers of hybrid models have keys and values there, which grow with every token. They are
replaced and never written, so that copies share them.
Letters: B sequences, V vocabulary, H heads, M modes, D head channels, I = H D, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_frac.inference.text import TextTail
from flash_frac.layers import FracMixer, MixerState
from flash_frac.models import FracCache, FracForCausalLM
from flash_frac.models.cache import AttentionMemory, read_state, write_state
from flash_frac.models.evaluating import evaluating
from flash_frac.models.modeling import FracBlock
from flash_frac.ops import mode_log_decay

# Tokens of a piece in `read_pieces`.
PIECE = 4096


@dataclass(frozen=True, eq=False)
class StreamMark:
    """All of a stream at one moment. Nothing writes to a mark that `FracStream.mark` has given.

    Attributes:
        cache: the states of the layers.
        logits: (B, V) float32 of the next token, or None if they are not known.
        seen: (B, V), True at tokens that the sequence holds; replaced, never written.
        lengths: tokens of each sequence.
        tails: each sequence's end as text; empty without a tokenizer.
    """

    cache: FracCache
    logits: Tensor | None
    seen: Tensor
    lengths: tuple[int, ...]
    tails: tuple[TextTail, ...]

    def copy(self, model: FracForCausalLM, into: FracCache | None = None) -> StreamMark:
        """The same in other memory: that of a cache which is not needed any more, or new."""
        if into is None:
            into = make_cache(model, states_of(self.cache), self.memory())
        else:
            copy_cache(self.cache, into, len(self.lengths))
        logits = None if self.logits is None else self.logits.clone()
        return replace(self, cache=into, logits=logits)

    def after(
        self,
        ids: Tensor,
        counts: Sequence[int],
        tails: tuple[TextTail, ...],
        cache: FracCache,
        logits: Tensor,
    ) -> StreamMark:
        """The moment after ids (B, T), of each sequence the last `counts`, with what they left."""
        device, fed = self.seen.device, torch.tensor(counts)[:, None]
        mask = padding_mask(ids, counts)
        if mask is not None:
            # Instead of padding the last token once more, which was seen anyway.
            ids = torch.where(mask.to(ids.device), ids, ids[:, -1:])
        seen = self.seen.scatter(1, ids.to(device), True)
        if min(counts) == 0 and self.logits is not None:
            some = (fed > 0).to(device)
            logits, seen = logits.where(some, self.logits), seen.where(some, self.seen)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        return StreamMark(cache, logits, seen, lengths, tails)

    def memory(self) -> AttentionMemory:
        """What the attention layers remember, in the memory of the cache."""
        return self.cache.memory(len(self.lengths))

    def select(self, rows: list[int], model: FracForCausalLM) -> StreamMark:
        """The sequences at `rows`, in that order."""
        index = torch.tensor(rows, device=self.seen.device)
        states = [state.select(rows) for state in states_of(self.cache)]
        return StreamMark(
            make_cache(model, states, self.memory().select(rows)),
            None if self.logits is None else self.logits[index],
            self.seen[index],
            tuple(self.lengths[n] for n in rows),
            tuple(self.tails[n] for n in rows if self.tails),
        )

    @staticmethod
    def cat(marks: Sequence[StreamMark], model: FracForCausalLM) -> StreamMark:
        """One batch of all sequences, in order."""
        layers = zip(*(states_of(mark.cache) for mark in marks), strict=True)
        logits = [mark.logits for mark in marks if mark.logits is not None]
        memory = AttentionMemory.cat([mark.memory() for mark in marks])
        return StreamMark(
            make_cache(model, [MixerState.cat(states) for states in layers], memory),
            torch.cat(logits) if len(logits) == len(marks) else None,
            torch.cat([mark.seen for mark in marks]),
            tuple(length for mark in marks for length in mark.lengths),
            tuple(tail for mark in marks for tail in mark.tails),
        )


def check_model(model: object) -> None:
    """ValueError unless this is a FracForCausalLM itself, with its weights at hand."""
    if not isinstance(model, FracForCausalLM):
        raise ValueError(
            f"model must be a FracForCausalLM, got {type(model).__name__}; of a wrapped one "
            "(compiled, or in DistributedDataParallel) pass the model inside"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "model must not be offloaded (some of its weights are on the meta device); load it "
            "without offloading, or use model.generate"
        )


def read_tokens(
    model: FracForCausalLM, cache: FracCache, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Take ids (B, T) into the cache; logits (B, V) float32 after the last.

    Args:
        mask: (B, T), 0 at padding, on the left; None if there is none.
    """
    device = model.model.embed_tokens.weight.device
    with evaluating(model):
        output = model(
            ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return output.logits[:, -1]


def read_pieces(
    model: FracForCausalLM, cache: FracCache, ids: Tensor, mask: Tensor | None
) -> Tensor:
    """`read_tokens` in memory that does not grow with T."""
    *parts, last = pieces(ids, mask, PIECE)
    for part in parts:
        read_tokens(model, cache, *part)
    return read_tokens(model, cache, *last)


def padding_mask(ids: Tensor, counts: Sequence[int]) -> Tensor | None:
    """(B, T), False before the last `counts` of each sequence; None if all of ids (B, T) count."""
    if min(counts) == ids.shape[1]:
        return None
    return torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(counts)[:, None]


def pieces(ids: Tensor, mask: Tensor | None, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Ids (B, T), and the mask if there is one, cut along T into pieces of at most `size`."""
    whole = [x for x in (ids, mask) if x is not None]
    yield from zip(*(x.split(size, 1) for x in whole), strict=True)


def mixers(model: FracForCausalLM) -> list[FracMixer]:
    """The mixers of the Frac layers, in order."""
    return [block.mixer for block in model.model.layers if isinstance(block, FracBlock)]


def empty_state(mixer: FracMixer, batch_size: int) -> MixerState:
    """The state of B sequences without tokens: zeros."""
    weight = mixer.conv1d.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    sizes = (batch_size, mixer.num_heads, mixer.num_modes, mixer.head_dim)
    window = (batch_size, mixer.num_heads * mixer.head_dim, mixer.conv_kernel - 1)
    return MixerState(weight.new_zeros(sizes, dtype=wide), weight.new_zeros(window))


def empty_cache(model: FracForCausalLM, batch_size: int) -> FracCache:
    """The cache of B sequences without tokens."""
    return make_cache(model, [empty_state(mixer, batch_size) for mixer in mixers(model)])


@torch.no_grad()
def make_cache(
    model: FracForCausalLM, states: Sequence[MixerState], memory: AttentionMemory | None = None
) -> FracCache:
    """A cache that holds copies of these states of the Frac layers, and this memory itself."""
    cache = FracCache(model.config)
    # Tensors made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        for index, state in zip(cache.state_layers, states, strict=True):
            write_state(cache, index, state)
    if memory is not None:
        cache.set_memory(memory)
    return cache


@torch.no_grad()
def states_of(cache: FracCache) -> list[MixerState]:
    """The states of the Frac layers, in the memory of the cache."""
    states = (read_state(cache, index) for index in cache.state_layers)
    return [state for state in states if state is not None]


@torch.no_grad()
def copy_cache(source: FracCache, target: FracCache, batch_size: int) -> None:
    """Copy everything; states in two kernels where the device allows it, one for each dtype."""
    pairs = list(zip(states_of(target), states_of(source), strict=True))
    for name in ("recurrent", "conv"):
        mine, theirs = ([getattr(pair[n], name) for pair in pairs] for n in (0, 1))
        torch._foreach_copy_(mine, theirs)  # pyright: ignore[reportPrivateImportUsage]
    if source.attention_layers:
        target.set_memory(source.memory(batch_size))


@torch.no_grad()
def idle_log_decay(mixer: FracMixer) -> Tensor:
    """log_decay (H, M) that the heads choose for an input of zero, in float32 (float64 stays)."""
    weight = mixer.conv1d.weight
    dyn = mixer.dynamics(mixer.dyn_proj(weight.new_zeros(1, weight.shape[0]))[0])
    log_tau = mixer.base_log_tau.to(dyn.delta.dtype)
    return mode_log_decay(dyn, log_tau, rho_eps=mixer.settings.rho_eps)


def check_fading(model: FracForCausalLM) -> None:
    """ValueError unless all that a model remembers fades with time."""
    if model.config.attention_layers:
        raise ValueError(
            "advance needs a model without attention_layers, got "
            f"{model.config.attention_layers}: keys and values do not fade; feed tokens instead"
        )


@torch.no_grad()
def let_pass(model: FracForCausalLM, cache: FracCache, gap: float) -> None:
    """`FracStream.advance`, in the memory of the cache."""
    for mixer, state in zip(mixers(model), states_of(cache), strict=True):
        # In float64: a factor close to 1, for a slow mode, would be off the same way every time.
        factor = torch.exp(gap * idle_log_decay(mixer).double())
        state.recurrent.copy_(state.recurrent * factor[..., None])
        shift = min(math.floor(gap), state.conv.shape[-1])
        zeros = state.conv.new_zeros(*state.conv.shape[:2], shift)
        state.conv.copy_(torch.cat([state.conv[..., shift:], zeros], -1))
