"""The rows of the ablation: what each changes in Frac, and what the paper found.

A row is a set of options of FracMixer and of ControlSettings; nothing else differs. The paper does
not give the initial distribution of independent timescales (here log-uniform), nor what replaces
the softmax (here the logits themselves; "sigmoid" is a row of ours).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from experiments.baselines import PAPER_CLOCK
from experiments.heavy_tail.model import EARLY, EARLY_SETTINGS
from experiments.language_model import LanguageModel, LanguageModelDesign, make_model
from experiments.long_documents.models import fitted, frac_design

_NOTHING: Mapping[str, Any] = MappingProxyType({})
DATASETS = ("ProofPile", "PG19", "GovReport")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row.

    Attributes:
        label: its name in tables.
        options, settings: for FracMixer and ControlSettings, on top of the baseline's.
        dilation: largest speed-up of time in training (`FracConfig.frac_time_dilation`).
        paper: perplexity at 16K with 390M parameters on DATASETS, if the paper has this row.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    settings: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    dilation: float = 1.0
    paper: tuple[float, float, float] | None = None


BASELINE = "baseline"
_BANK = {"bank": "W1_M16_simplex"}
VARIANTS = {
    BASELINE: Variant(label="Frac", paper=(47.2, 28.4, 11.3)),
    "alpha_1": Variant(label="α = 1", settings={"alpha_fixed": 1.0}, paper=(61.3, 36.2, 19.7)),
    "no_write_prior": Variant(
        label="w/o write prior", settings={"write_prior": False}, paper=(68.5, 41.6, 18.2)
    ),
    "pure_bank": Variant(
        label="pure multiscale bank",
        options={"learned_timescales": True},
        settings={"alpha_fixed": 1.0, "read_prior": False, "write_prior": False},
        paper=(76.3, 47.1, 17.2),
    ),
    "no_softmax": Variant(
        label="w/o softmax R/W", settings={"normalization": "none"}, paper=(80.4, 36.9, 15.5)
    ),
    "learned_timescales": Variant(
        label="learned timescales",
        options={"learned_timescales": True},
        paper=(54.1, 34.3, 13.5),
    ),
    "no_D": Variant(label="w/o D", options={"use_D": False}, paper=(70.9, 46.4, 23.6)),
    "modes_8": Variant(label="M = 8", options={"num_modes": 8}, paper=(51.4, 33.9, 14.5)),
    "modes_32": Variant(label="M = 32", options={"num_modes": 32}, paper=(47.9, 29.1, 10.6)),
    # As in the paper's text, where the authors' code differs.
    "paper_clock": Variant(label="the paper's clock", settings=PAPER_CLOCK),
    # Choices that the paper's text leaves open.
    "exact_zoh": Variant(label="β = (1 - ρ) / λ", settings={"beta": "exact_zoh"}),
    "sigmoid": Variant(label="sigmoid R/W", settings={"normalization": "sigmoid"}),
    # Changes that we propose.
    "exact_prior": Variant(label="exact prior", settings={"prior": "exact"}),
    "optimised_bank": Variant(label="optimised bank", options=_BANK),
    "exact_prior_and_bank": Variant(
        label="exact prior, optimised bank", options=_BANK, settings={"prior": "exact"}
    ),
    "time_dilation": Variant(label="time dilation to 16", dilation=16.0),
    "early_regime": Variant(label="early regime", options=EARLY, settings=EARLY_SETTINGS),
    "early_regime_and_dilation": Variant(
        label="early regime, time dilation to 16",
        options=EARLY,
        settings=EARLY_SETTINGS,
        dilation=16.0,
    ),
}
PAPER_ROWS = tuple(name for name, variant in VARIANTS.items() if variant.paper is not None)


def design(name: str) -> LanguageModelDesign:
    """The model of a row of VARIANTS, 30M parameters without embeddings."""
    variant = VARIANTS[name]
    plain = frac_design(variant.options, variant.settings)
    return replace(plain, dilation=variant.dilation)


def make_variant(name: str, seed: int, *, vocab_size: int, smoke: bool) -> LanguageModel:
    """The model of a row; with `smoke`, a tiny one."""
    return make_model(fitted(design(name), vocab_size, smoke=smoke), seed)
