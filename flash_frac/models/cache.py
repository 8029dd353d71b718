"""Hugging Face's cache, holding the states of Frac layers and the keys and values of attention.

The tensors live in `transformers`' own `LinearAttentionLayer`: conv_states (B, I, K - 1) and
recurrent_states (B, H, M, D), and in its `DynamicLayer`: keys and values (B, heads, T, channels).
Reordering beams, resetting and offloading are its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from flash_frac.layers import MixerState


@dataclass(frozen=True)
class AttentionMemory:
    """What the attention layers of a hybrid model remember. Nothing writes to its tensors.

    Attributes:
        layers: by number of the layer, keys and values (B, heads, T, channels); none if T = 0.
        real: (B, T), False at padding, which no query sees.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    real: Tensor

    def select(self, rows: Sequence[int]) -> AttentionMemory:
        """The sequences at `rows`, in that order, without the tokens that are padding in all."""
        real = self.real[torch.as_tensor(rows, device=self.real.device)]
        kept = real.any(0)
        layers = {
            n: tuple(x[torch.as_tensor(rows, device=x.device)][:, :, kept.to(x.device)] for x in kv)
            for n, kv in self.layers.items()
        }
        return AttentionMemory(layers, real[:, kept])  # pyright: ignore[reportArgumentType]

    @staticmethod
    def cat(memories: Sequence[AttentionMemory]) -> AttentionMemory:
        """One batch of all sequences, the shorter ones behind padding."""
        longest = max(memory.real.shape[1] for memory in memories)
        real = [F.pad(x.real, (longest - x.real.shape[1], 0)) for x in memories]
        known = next((memory.layers for memory in memories if memory.layers), {})

        def joined(n: int, part: int) -> Tensor:
            blank = known[n][part][:1, :, :0]
            each = [
                x.layers[n][part] if x.layers else blank.expand(len(x.real), -1, -1, -1)
                for x in memories
            ]
            return torch.cat([F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in each])

        return AttentionMemory({n: (joined(n, 0), joined(n, 1)) for n in known}, torch.cat(real))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for pair in self.layers.values() for x in pair)


CANNOT_CROP = (
    "tokens cannot be removed from the cache of a Frac model (crop), as assisted decoding does "
    "with rejected ones: a state sums over all tokens; use a transformer as assistant_model, or "
    "prompt_lookup_num_tokens with one, or decode without"
)


class FracCache(DynamicCache):
    """A `DynamicCache` that also counts the tokens it has seen, and notes which were padding.

    `generate` needs the count to tell new tokens from those already in the cache; Hugging Face's
    caches take it from attention layers, of which most Frac models have none.

    Attributes:
        num_tokens: tokens seen, padding included.
        real: of a hybrid model, (B, num_tokens), False at padding; None if there was none.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.num_tokens = 0
        self.real: Tensor | None = None
        attention = [isinstance(layer, DynamicLayer) for layer in self.layers]
        self.frac_layers = [n for n, is_attention in enumerate(attention) if not is_attention]
        self.attention_layers = [n for n, is_attention in enumerate(attention) if is_attention]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile unasked, as it does not for a `DynamicCache`."""
        return False

    def count(self, num_tokens: int) -> None:
        """Note that all layers have seen this many tokens more."""
        self.num_tokens += num_tokens

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a state is a sum over all tokens, from which none can be taken back."""
        raise ValueError(CANNOT_CROP)

    def tensors(self) -> list[Tensor]:
        """The memory of all Frac layers that have seen tokens: recurrent states and windows."""
        layers: list[Any] = [self.layers[n] for n in self.frac_layers]
        states = (_tensor(x) for y in layers for x in (y.recurrent_states, y.conv_states))
        return [state for state in states if state is not None]

    def reset(self) -> None:
        """Empty the cache, keeping the memory of Frac layers."""
        super().reset()
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values, and the count of tokens; states stay as they are."""
        for n in self.attention_layers:
            # transformers 5.10 would zero its tensors, and keep their length.
            self.layers[n] = DynamicLayer()
        self.num_tokens, self.real = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the sequences at `beam_idx`, in that order."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        if self.real is not None:
            self.real = self.real.index_select(0, beam_idx.to(self.real.device))

    def memory(self, batch_size: int) -> AttentionMemory:
        """What the attention layers remember of B sequences, in the memory of the cache."""
        layers: dict[int, Any] = {n: self.layers[n] for n in self.attention_layers}
        held = {n: (x.keys, x.values) for n, x in layers.items() if x.get_seq_length()}
        real = self.real
        if real is None:
            length = self.num_tokens if self.attention_layers else 0
            place = next((keys.device for keys, _ in held.values()), None)
            real = torch.ones(batch_size, length, dtype=torch.bool, device=place)
        return AttentionMemory(held, real)

    def set_memory(self, memory: AttentionMemory) -> None:
        """Let the attention layers remember this, in the same memory, and nothing else."""
        self.forget()
        for n, (keys, values) in memory.layers.items():
            layer: Any = self.layers[n]
            layer.lazy_initialization(keys, values)
            # Not by update, which would copy them; no layer of this kind writes to its tensors.
            layer.keys, layer.values = keys, values
        self.num_tokens = memory.real.shape[1]
        self.real = None if bool(memory.real.all()) else memory.real

    def unpack(self, cu_seqlens: Tensor) -> None:
        """Make a batch of the N sequences packed in one row, the shorter ones behind padding."""
        packed = self.memory(1)
        ends = cu_seqlens.to(packed.real.device, torch.long)
        begins, ends = ends[:-1, None], ends[1:, None]
        longest = int((ends - begins).max())
        places = ends - longest + torch.arange(longest, device=ends.device)
        rows = places.clamp_min(0)
        layers = {
            n: (keys[0][:, rows].transpose(0, 1), values[0][:, rows].transpose(0, 1))
            for n, (keys, values) in packed.layers.items()
        }
        self.set_memory(AttentionMemory(layers, places >= begins))


class FracStaticCache(StaticCache):
    """The cache of `cache_implementation="static"`, with which a compiled model decodes.

    Frac states have a fixed size anyway; the attention layers of hybrid models get room for
    `max_cache_len` tokens. It does not note padding: with one, pass masks of all tokens.

    Attributes:
        num_tokens: tokens seen, padding included; a tensor, so that a compiled step can count.
    """

    def __init__(self, config: PreTrainedConfig, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.num_tokens = torch.zeros((), dtype=torch.long)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # pyright: ignore
        """Tokens seen, padding included."""
        return self.num_tokens

    def place(self, device: torch.device) -> None:
        """Count on this device, on which the model runs."""
        if self.num_tokens.device != device:
            self.num_tokens = self.num_tokens.to(device)
            torch._dynamo.mark_static_address(self.num_tokens)

    def count(self, num_tokens: int) -> None:
        """Note that all layers have seen this many tokens more."""
        self.num_tokens.add_(num_tokens)

    def reset(self) -> None:
        """Empty the cache, keeping its memory."""
        super().reset()
        self.num_tokens.zero_()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused, as for `FracCache`."""
        raise ValueError(CANNOT_CROP)


def _tensor(states: Any) -> Tensor | None:
    """Releases of transformers keep one tensor, or a dict of several with ours at 0."""
    return states[0] if isinstance(states, dict) else states


def read_state(cache: Cache, layer_idx: int) -> MixerState | None:
    """The state of a layer, or None before its first tokens."""
    layer = cache.layers[layer_idx]
    if not cache.has_previous_state(layer_idx):
        return None
    state = MixerState(_tensor(layer.recurrent_states), _tensor(layer.conv_states))  # pyright: ignore
    # The cache will be overwritten in place, under a graph that still needs these values.
    return state.clone() if torch.is_grad_enabled() else state


def write_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Replace the state of a layer, in the same memory once there is some."""
    layer: Any = cache.layers[layer_idx]
    if cache.has_previous_state(layer_idx) and not getattr(layer, "record_past", False):
        for mine, new in (
            (_tensor(layer.recurrent_states), state.recurrent),
            (_tensor(layer.conv_states), state.conv),
        ):
            # A step in place has written it already.
            if mine is not new:
                mine.copy_(new)  # pyright: ignore[reportOptionalMemberAccess]
        return
    cache.update_conv_state(state.conv, layer_idx)
    # transformers 5.10 would make the recurrent state in the dtype of the window.
    layer.dtype = state.recurrent.dtype
    cache.update_recurrent_state(state.recurrent, layer_idx)
