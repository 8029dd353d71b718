"""Causal softmax attention with rotary positions, and its cache as a state.

    q, k, v = proj(input), q and k [normed and] rotated by their positions
    output  = o_proj(softmax(q k^T / sqrt(D), causal) v)

Letters: B batch, T time, S tokens seen before, E width, H heads, D head channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines.mixer import Mixer
from flash_frac.layers import RMSNorm


class AttentionState(NamedTuple):
    """Keys (rotated) and values of all tokens so far, (B, H, S, D) each."""

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        """S, the position of the next token."""
        return self.keys.shape[2]


class Attention(Mixer):
    """Multi-head causal attention, without the MLP of a block.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: D, even with rotary positions.
        bias: whether the four projections have a bias.
        rope: whether queries and keys are rotated; otherwise there are no positions.
        rope_theta: base of the rotations' wavelengths.
        qk_norm: whether each head's queries and keys go through an RMS norm, as in Qwen3.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        bias: bool = False,
        rope: bool = True,
        rope_theta: float = 10000.0,
        qk_norm: bool = False,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim)
        if rope and head_dim % 2:
            raise ValueError(f"head_dim must be even with rope, got {head_dim}; or set rope=False")
        self.rope, self.rope_theta = rope, rope_theta
        inner = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, inner, bias=bias)
        self.k_proj = nn.Linear(hidden_size, inner, bias=bias)
        self.v_proj = nn.Linear(hidden_size, inner, bias=bias)
        self.o_proj = nn.Linear(inner, hidden_size, bias=bias)
        self.q_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, *, state: AttentionState | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Mix (B, T, E), or continue from a state: y (B, T, E) and the state after it."""
        past = 0 if state is None else state.num_tokens
        state = self.absorb(x, state=state)
        num_tokens = x.shape[1]
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        if self.rope:
            q = self._rotate(q, past)
        mask = None
        if past and num_tokens > 1:
            ones = torch.ones(num_tokens, past + num_tokens, dtype=torch.bool, device=x.device)
            mask = ones.tril(past)
        y = F.scaled_dot_product_attention(
            q, state.keys, state.values, attn_mask=mask, is_causal=past == 0
        )
        return self.o_proj(y.transpose(1, 2).flatten(-2)), state

    def absorb(self, x: Tensor, *, state: AttentionState | None = None) -> AttentionState:
        """The same state after x (B, T, E) as `forward` returns, without computing outputs."""
        past = 0 if state is None else state.num_tokens
        shape = (self.num_heads, past, self.head_dim)
        self.check(x, state, keys=shape, values=shape)
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        values = self._heads(self.v_proj(x)).transpose(1, 2)
        if self.rope:
            keys = self._rotate(keys, past)
        if state is None:
            return AttentionState(keys, values)
        return AttentionState(
            torch.cat([state.keys, keys], 2), torch.cat([state.values, values], 2)
        )

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H D) -> (B, T, H, D)."""
        return x.unflatten(-1, (self.num_heads, -1))

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        """Rotate channels i and i + D / 2 of (B, H, T, D) by an angle linear in the position."""
        half = self.head_dim // 2
        # In float64, because at position 131072 a float32 angle is off by a hundredth.
        exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
        steps = torch.arange(position, position + x.shape[2], device=x.device)
        angle = steps[:, None] * self.rope_theta**-exponent
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
