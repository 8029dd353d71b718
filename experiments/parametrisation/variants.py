"""The parametrisations to compare: fields of FracConfig that differ from the published ones.

A model's name in rows is `MODEL.VARIANT`, such as `frac.no_write_prior`. The models are those of
experiments/mixed_models: Frac alone, and Frac with attention in three of ten layers.

    python -m experiments.parametrisation.variants        prints the variants as a table
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from experiments.baselines import PAPER_CLOCK
from experiments.mixed_models.models import DESIGNS, Design

MODELS = ("frac", "frac_attention")
PUBLISHED = "published"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Fields of FracConfig, and why they may move the layer away from its clamps.

    Attributes:
        label: name in tables.
        changes: the fields.
        reason: what they change in the layer.
    """

    label: str
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    reason: str


_NO_WRITE_PRIOR = {"frac_write_prior": False}
_EQUAL_VARIANCE = {"frac_beta": "equal_variance"}
_NORM = {"frac_rw_norm": True}
_PER_HEAD = {"frac_bank": "per_head"}
VARIANTS = {
    PUBLISHED: Variant(label="published", reason="the layer of the authors' code"),
    "no_write_prior": Variant(
        label="no write prior",
        changes=_NO_WRITE_PRIOR,
        reason="a mode's part is its prior once, not squared",
    ),
    "exact_read_prior": Variant(
        label="exact prior on reads alone",
        changes=_NO_WRITE_PRIOR | {"frac_prior": "exact"},
        reason="the same, with the exact mass of each mode",
    ),
    "equal_variance": Variant(
        label="β of equal variance",
        changes=_EQUAL_VARIANCE,
        reason="a slow mode receives √(2/τ) of a token, not 1/τ",
    ),
    "equal_variance_no_write_prior": Variant(
        label="β of equal variance, no write prior",
        changes=_EQUAL_VARIANCE | _NO_WRITE_PRIOR,
        reason="both",
    ),
    "rw_norm": Variant(
        label="norms of read and write logits",
        changes=_NORM,
        reason="tokens choose modes from the first step on",
    ),
    "rw_norm_no_write_prior": Variant(
        label="norms, no write prior", changes=_NORM | _NO_WRITE_PRIOR, reason="both"
    ),
    "wide_delta": Variant(
        label="Δ up to 16", changes={"frac_dt_max": 16.0}, reason="Δ has 1 as its median and limit"
    ),
    "per_head_bank": Variant(
        label="a bank for each head",
        changes=_PER_HEAD,
        reason="slow heads have no fast modes to prefer",
    ),
    "paper_clock": Variant(
        label="the paper's maps of λ and α",
        changes={f"frac_{name}": value for name, value in PAPER_CLOCK.items()},
        reason="rates start ten times slower",
    ),
    "combined": Variant(
        label="no write prior, equal variance, norms, banks",
        changes=_NO_WRITE_PRIOR | _EQUAL_VARIANCE | _NORM | _PER_HEAD,
        reason="four changes at once",
    ),
}


def split_name(name: str) -> tuple[str, str]:
    """Model and variant of a row's name.

    Example: `split_name("frac.wide_delta") == ("frac", "wide_delta")`
    """
    model, _, variant = name.partition(".")
    return model, variant


def design(name: str) -> Design:
    """The design of a row's name; sizes are those of the published model.

    Example: `make_config(design("frac.no_write_prior"))`
    """
    model, variant = split_name(name)
    base, changes = DESIGNS[model], VARIANTS[variant].changes
    return replace(base, options={**base.options, **changes})


def label(name: str) -> str:
    """A model's name in tables."""
    model, variant = split_name(name)
    return f"{DESIGNS[model].label}, {VARIANTS[variant].label}"


def describe() -> list[str]:
    """Rows of a Markdown table: the variants and what they change."""
    lines = ["| `--variants` | fields of FracConfig | reason |", "|---|---|---|"]
    for name, variant in VARIANTS.items():
        fields = ", ".join(f"`{key}={value!r}`" for key, value in variant.changes.items())
        lines.append(f"| `{name}` | {fields or 'none'} | {variant.reason} |")
    return lines


if __name__ == "__main__":
    print(*describe(), sep="\n")
