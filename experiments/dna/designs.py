"""The paper's DNA models: 8 layers of width 256 with 8 heads, four taps, about 7M parameters.

The paper gives the expansions: 1.5 for Frac, 1.75 for Mamba3, 2 for the values of Gated DeltaNet,
whose keys span 0.75 of the width as in its language models. A mixer then has 6 to 6.3 E^2 weights,
and eight mixers 3.2M to 3.4M. The core "swiglu" adds the same SwiGLU of 8 E^2 weights to every
block, which gives 7M. The core "plain" has none; Frac is then the model size frac-dna.
`frac_delta` is Frac with layers 1, 4 and 7 of Gated DeltaNet, as in experiments/mixed_models.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.baselines import published_frac
from experiments.dna.data import VOCAB_SIZE
from experiments.language_model import LanguageModelDesign

WIDTH, NUM_LAYERS, NUM_HEADS = 256, 8, 8
# Two thirds of four times the width, rounded up to a multiple of 16.
CORES = {"swiglu": 688, "plain": 0}


class Heads(NamedTuple):
    """Channels of a head, and the options of its mixer.

    mixer: its name, if it differs from the model's.
    others: by layer index, models in `MODELS` whose mixers replace it there.
    """

    head_dim: int
    options: Mapping[str, Any] = MappingProxyType({})
    mixer: str | None = None
    others: Mapping[int, str] = MappingProxyType({})


MODELS = {
    "frac": Heads(48, published_frac()),
    "mamba3": Heads(56, {"state_size": 128}),
    "gated_deltanet": Heads(24, {"expand_v": 2.0}),
    # Not in the paper's figure: sized like Mamba3, and like Frac.
    "mamba2": Heads(56, {"state_size": 128}),
    "attention": Heads(48),
    "frac_delta": Heads(48, published_frac(), "frac", dict.fromkeys((1, 4, 7), "gated_deltanet")),
}


def make_design(model: str, core: str, *, small: bool = False) -> LanguageModelDesign:
    """The design of a model in `MODELS` with a core of `CORES`; `small` is for tests of the code.

    Example: `make_model(make_design("frac", "plain"), seed=0)`
    """
    for name, value, known in (("model", model, MODELS), ("core", core, CORES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    heads, num_layers = MODELS[model], 2 if small else NUM_LAYERS
    others = {
        number: make_design(other, core, small=small)
        for number, other in heads.others.items()
        if number < num_layers
    }
    return LanguageModelDesign(
        mixer=heads.mixer or model,
        vocab_size=VOCAB_SIZE,
        hidden_size=32 if small else WIDTH,
        num_layers=num_layers,
        num_heads=2 if small else NUM_HEADS,
        head_dim=heads.head_dim,
        options=heads.options,
        mlp_size=CORES[core] // (8 if small else 1),
        others=others,
    )
