"""The baselines of Frac: mixers in plain torch with the interface of `FracMixer`.

mixer    = make_mixer("mamba2", 160, num_heads=8, head_dim=40)
y, state = mixer(x)                     a sequence from its start
y, state = mixer(x, state=state)        its continuation, in pieces of any length
state    = absorb(mixer, x, state)      the state alone, at less cost
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from experiments.baselines.attention import Attention, AttentionState
from experiments.baselines.frac import Frac
from experiments.baselines.gated_deltanet import GatedDeltaNet
from experiments.baselines.mamba2 import Mamba2
from experiments.baselines.mamba3 import Mamba3, Mamba3State
from flash_frac.ops import ControlSettings

MIXERS: dict[str, type[nn.Module]] = {
    "frac": Frac,
    "attention": Attention,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "gated_deltanet": GatedDeltaNet,
}


# Maps of the paper's text, where the authors' code differs; docs/maths.md, section 5. alpha must
# not be 0, so its range starts just above.
PAPER_CLOCK: Mapping[str, Any] = MappingProxyType(
    {"lambda_map": "softplus", "alpha_min": 0.001, "alpha_max": 1.0}
)


def make_mixer(
    name: str, hidden_size: int, *, num_heads: int, head_dim: int, **options: Any
) -> nn.Module:
    """A mixer by its name in `MIXERS`; `options` are passed to its class.

    Example:
        >>> mixer = make_mixer("mamba2", 160, num_heads=8, head_dim=40, state_size=64)
    """
    if name not in MIXERS:
        raise ValueError(f"name must be one of {', '.join(MIXERS)}, got {name!r}")
    return MIXERS[name](hidden_size, num_heads=num_heads, head_dim=head_dim, **options)


def mixer_of(design: Any, hidden_size: int) -> nn.Module:
    """The mixer of a design with the fields `mixer`, `num_heads`, `head_dim` and `options`."""
    sizes = {"num_heads": design.num_heads, "head_dim": design.head_dim}
    return make_mixer(design.mixer, hidden_size, **sizes, **design.options)


def published_frac(
    options: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of FracMixer as in the published 1.3B model, with the given options and settings.

    Example: `make_mixer("frac", 128, num_heads=6, head_dim=32, **published_frac())`
    """
    controls = ControlSettings(**{"alpha_min": 0.1, "alpha_max": 0.9, **(settings or {})})
    plain = {"num_modes": 16, "tau_max": 2.0**17, "read_init": -1.0}
    return {**plain, **(options or {}), "settings": controls}


def absorb(mixer: nn.Module, x: Tensor, state: Any = None, **options: Any) -> Any:
    """The state of a mixer after x (B, T, E), computed as cheaply as the mixer can.

    `options` are passed to the mixer's method, such as `elapsed` for Frac.
    """
    method = getattr(mixer, "absorb", None)
    return (
        mixer(x, state=state, **options)[1] if method is None else method(x, state=state, **options)
    )


__all__ = [
    "MIXERS",
    "PAPER_CLOCK",
    "Attention",
    "AttentionState",
    "Frac",
    "GatedDeltaNet",
    "Mamba2",
    "Mamba3",
    "Mamba3State",
    "absorb",
    "make_mixer",
    "mixer_of",
    "published_frac",
]
