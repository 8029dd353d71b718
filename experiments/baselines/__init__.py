"""The mixers that Frac is compared with, in plain torch and with the interface of `FracMixer`.

mixer    = make_mixer("mamba2", 160, num_heads=8, head_dim=40)
y, state = mixer(x)                     a sequence from its beginning
y, state = mixer(x, state=state)        its continuation, in pieces of any length
state    = absorb(mixer, x, state)      the state alone, at less cost
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from experiments.baselines.attention import Attention, AttentionState
from experiments.baselines.frac import Frac
from experiments.baselines.gated_deltanet import GatedDeltaNet
from experiments.baselines.mamba2 import Mamba2
from experiments.baselines.mamba3 import Mamba3, Mamba3State

MIXERS: dict[str, type[nn.Module]] = {
    "frac": Frac,
    "attention": Attention,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "gated_deltanet": GatedDeltaNet,
}


def make_mixer(
    name: str, hidden_size: int, *, num_heads: int, head_dim: int, **options: Any
) -> nn.Module:
    """A mixer by its name in `MIXERS`; `options` are those of its class.

    Example:
        >>> mixer = make_mixer("mamba2", 160, num_heads=8, head_dim=40, state_size=64)
    """
    if name not in MIXERS:
        raise ValueError(f"name must be one of {', '.join(MIXERS)}, got {name!r}")
    return MIXERS[name](hidden_size, num_heads=num_heads, head_dim=head_dim, **options)


def absorb(mixer: nn.Module, x: Tensor, state: Any = None, **options: Any) -> Any:
    """The state of a mixer after x (B, T, E), by the cheapest way that the mixer has.

    `options` are those of the mixer's own method, such as `elapsed` of Frac.
    """
    method = getattr(mixer, "absorb", None)
    return (
        mixer(x, state=state, **options)[1] if method is None else method(x, state=state, **options)
    )


__all__ = [
    "MIXERS",
    "Attention",
    "AttentionState",
    "Frac",
    "GatedDeltaNet",
    "Mamba2",
    "Mamba3",
    "Mamba3State",
    "absorb",
    "make_mixer",
]
