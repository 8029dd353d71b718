"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024): the library's `DeltaMixer`.

Its weights have torch's default initialisation, as in flash-linear-attention.
"""

from __future__ import annotations

from flash_frac.layers import DeltaMixer


class GatedDeltaNet(DeltaMixer):
    """A layer with a matrix state, corrected by the delta rule and decayed per head.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: K, channels of queries and keys.
        expand_v: D / K, for the value channels; head_dim * expand_v must be an integer.
    """

    def __init__(
        self, hidden_size: int, *, num_heads: int, head_dim: int, expand_v: float = 2.0
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            initializer_range=None,
        )
