"""The states of a model's layers, kept in a `FracCache`, and what time without input does to them.

Attention layers of hybrid models have keys and values there, which grow with every token. They are
replaced and never written, so that copies share them.
Letters: B sequences, V vocabulary, H heads, M modes, D head channels, I = H D, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_frac.inference.text import TextTail
from flash_frac.layers import FracMixer, MixerState
from flash_frac.models import FracCache, FracForCausalLM
from flash_frac.models.cache import AttentionMemory, read_state, write_state
from flash_frac.models.evaluating import evaluating
from flash_frac.models.modeling import FracBlock
from flash_frac.ops import dynamics, mode_log_decay

# Tokens are read in pieces of so many, in memory that does not grow with their number.
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
            copy_states(self.cache, into)
            into.set_memory(self.memory())
        logits = None if self.logits is None else self.logits.clone()
        return replace(self, cache=into, logits=logits)

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


def read_tokens(
    model: FracForCausalLM, cache: FracCache, ids: Tensor, mask: Tensor | None
) -> Tensor:
    """Take ids (B, T) into the cache; logits (B, V) after the last.

    Args:
        mask: (B, T), False at padding, on the left; None if there is none.
    """
    place, logits = model.model.embed_tokens.weight.device, None
    with evaluating(model):
        for start in range(0, ids.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            logits = model(
                ids[:, piece].to(place),
                attention_mask=None if mask is None else mask[:, piece].to(place),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
    assert logits is not None
    return logits[:, -1]


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


@torch.no_grad()
def make_cache(
    model: FracForCausalLM, states: Sequence[MixerState], memory: AttentionMemory | None = None
) -> FracCache:
    """A cache that holds copies of these states of the Frac layers, and this memory itself."""
    cache = FracCache(model.config)
    for index, state in zip(cache.frac_layers, states, strict=True):
        write_state(cache, index, state)
    if memory is not None:
        cache.set_memory(memory)
    return cache


def to_tensors(cache: FracCache, batch_size: int) -> dict[str, Tensor]:
    """Everything that a cache holds, by names that begin with the number of the layer."""
    tensors = {}
    for index, state in zip(cache.frac_layers, states_of(cache), strict=True):
        tensors |= {f"{index}.recurrent": state.recurrent, f"{index}.conv": state.conv}
    memory = cache.memory(batch_size)
    for index, (keys, values) in memory.layers.items():
        tensors |= {f"{index}.keys": keys, f"{index}.values": values}
    return tensors | ({"real": memory.real} if memory.layers else {})


def from_tensors(model: FracForCausalLM, tensors: dict[str, Tensor]) -> FracCache:
    """The cache that `to_tensors` was given, on the devices of the layers, in other memory."""
    states, layers, place = [], {}, model.lm_head.weight.device
    for index, block in enumerate(model.model.layers):
        place = next(block.parameters()).device
        if isinstance(block, FracBlock):
            names = (f"{index}.recurrent", f"{index}.conv")
            states.append(MixerState(*(tensors[name] for name in names)).to(place))
        elif f"{index}.keys" in tensors:
            names = (f"{index}.keys", f"{index}.values")
            # Copies, because on a CPU these would be the file itself, mapped into memory.
            layers[index] = tuple(tensors[name].to(place, copy=True) for name in names)
    blank = torch.ones(states[0].batch_size, 0, dtype=torch.bool)
    memory = AttentionMemory(layers, tensors.get("real", blank).to(place, copy=True))
    return make_cache(model, states, memory)


@torch.no_grad()
def states_of(cache: FracCache) -> list[MixerState]:
    """The states of the Frac layers, in the memory of the cache."""
    states = (read_state(cache, index) for index in cache.frac_layers)
    return [state for state in states if state is not None]


@torch.no_grad()
def copy_states(source: FracCache, target: FracCache) -> None:
    """Copy all states, in two kernels where the device allows it: one for each dtype."""
    pairs = list(zip(states_of(target), states_of(source), strict=True))
    for name in ("recurrent", "conv"):
        mine, theirs = ([getattr(pair[n], name) for pair in pairs] for n in (0, 1))
        torch._foreach_copy_(mine, theirs)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def idle_log_decay(mixer: FracMixer) -> Tensor:
    """log_decay (H, M) that the heads choose for an input of zero, in float32 (float64 stays)."""
    weight = mixer.conv1d.weight
    logits = mixer.dyn_proj(weight.new_zeros(1, weight.shape[0]))[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    parts = logits.unflatten(0, (mixer.num_dynamics, -1)).unbind()
    alpha = None if mixer.num_dynamics == 2 else parts[1]
    dyn = dynamics(parts[0] + mixer.dt_bias, alpha, parts[-1], mixer.settings)
    log_tau = mixer.base_log_tau.to(logits.dtype)
    return mode_log_decay(dyn, log_tau, rho_eps=mixer.settings.rho_eps)


def check_fading(model: FracForCausalLM) -> None:
    """ValueError unless all that a model remembers fades with time."""
    if model.config.attention_layers:
        raise ValueError(
            "advance needs a model without attention_layers, got "
            f"{model.config.attention_layers}: keys and values do not fade; feed tokens instead"
        )


@torch.no_grad()
def let_pass(mixer: FracMixer, state: MixerState, gap: float) -> None:
    """`FracStream.advance` for one layer, in place."""
    # In float64: a factor close to 1, for a slow mode, would be off the same way every time.
    factor = torch.exp(gap * idle_log_decay(mixer).double())
    state.recurrent.copy_(state.recurrent * factor[..., None])
    shift = min(math.floor(gap), state.conv.shape[-1])
    zeros = state.conv.new_zeros(*state.conv.shape[:2], shift)
    state.conv.copy_(torch.cat([state.conv[..., shift:], zeros], -1))
