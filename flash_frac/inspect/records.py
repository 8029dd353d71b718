"""The records of a report: numbers about every head, layer and model.

    MemoryReport -> LayerReport -> HeadReport -> Distribution, Distances, Fit (Stretch), Horizon

`report.json` contains `MemoryReport.as_dict()`: the attributes below by name.
Letters: H heads, M modes, L lags.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flash_frac.inspect.fits import Fit
from flash_frac.inspect.response import Horizon

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUM_BINS = 40


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Quantiles and log-binned histogram of one quantity of a head over tokens (and modes).

    Attributes:
        quantiles: at 5, 25, 50, 75 and 95%.
        counts: (40,) number of values in each bin; the edges are in `LayerReport.edges`.
    """

    quantiles: list[float]
    counts: list[int]


@dataclass(frozen=True, kw_only=True)
class Distances:
    """How far attention looks: its weight by distance, as a mean over queries.

    Attributes:
        shares: share of the weight in each bin, with sum 1; the edges, 0, 1, 2, 4 and so on, are
            `LayerReport.edges["distance"]`.
        median, mean: distances in tokens, by weight; the weight of distance n is spread over
            [n, n + 1) for the median.
        beyond: the share of the weight at this distance or farther, by distance.
    """

    shares: list[float]
    median: float
    mean: float
    beyond: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """The memory of one head.

    Attributes:
        distributions: for a Frac head "delta", "alpha", "lambda" over tokens, and "timescale",
            tau_m / (Δ λ^(1/α)) in tokens, over tokens and modes; for a delta head "half_life",
            log 2 / -log_decay in tokens, and "beta"; none for attention.
        response: (L,) R(n) at the report's lags, lag 0 first.
        power, exponential: the best fit of each law over lags of 1 and more, or None.
        better: the kind of the closer fit, or None.
        horizon: how far the response reaches.
        tau: (M,) timescales of its bank, in tokens.
        read, write: (M,) mean weight of each mode; write includes the factor β.
        read_share, write_share: (M,) the same, as shares of their sum.
        clamped_fast, clamped_slow: share of all (token, mode) with ρ at its lower bound rho_eps,
            and at its upper bound 1 - rho_eps.
        distances: how far attention looks.
    The last eight are None where they do not apply.
    """

    distributions: dict[str, Distribution]
    response: list[float]
    power: Fit | None
    exponential: Fit | None
    better: str | None
    horizon: Horizon
    tau: list[float] | None = None
    read: list[float] | None = None
    write: list[float] | None = None
    read_share: list[float] | None = None
    write_share: list[float] | None = None
    clamped_fast: float | None = None
    clamped_slow: float | None = None
    distances: Distances | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The memory of one layer: its heads, and the same numbers for their mean response.

    Attributes:
        number: its index among all layers of the model, from 0.
        type: "frac", "delta", "attention" or "sliding_attention".
        sources: (L,) number of token pairs in the mean R(n).
        tau: (M,) timescales of the bank, in tokens; the geometric mean over heads if each has its
            own bank; empty without a bank.
        edges: (41,) edges of the log bins of each distribution, by name.
        distributions: as in `HeadReport`, over all heads.
        response, power, exponential, better, horizon: as in `HeadReport`, of the mean response.
        clamped_fast, clamped_slow: means over heads.
        distances: for the mean over heads.
        heads: one report each.
    """

    number: int
    type: str
    sources: list[int]
    tau: list[float]
    edges: dict[str, list[float]]
    distributions: dict[str, Distribution]
    response: list[float]
    power: Fit | None
    exponential: Fit | None
    better: str | None
    horizon: Horizon
    clamped_fast: float | None = None
    clamped_slow: float | None = None
    distances: Distances | None = None
    heads: list[HeadReport]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a model on a text.

    Attributes:
        name: name of the model; text: name of the text.
        num_rows, num_tokens: B and T of the text.
        num_parameters: parameters of the model.
        lags: (L,) n in tokens, lag 0 first.
        factor: a law holds at a lag if it is within this factor of the response.
        quantiles: the levels of the quantiles, ascending.
        layers: one report each.
    """

    name: str
    text: str
    num_rows: int
    num_tokens: int
    num_parameters: int
    lags: list[int]
    factor: float
    quantiles: list[float]
    layers: list[LayerReport]

    def as_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, 6-digit numbers and text, for `report.json`.

        Example: `report.as_dict()["layers"][0]["heads"][3]["power"]["exponent"]`
        """
        return _plain(asdict(self))


def distributions(
    logs: dict[str, np.ndarray],
) -> tuple[dict[str, list[float]], dict[str, list[Distribution]]]:
    """By name: edges of the log bins, and the distributions of each head, then of all together.

    Args:
        logs: by name, logarithms of a quantity (tokens, H).
    """
    edges, found = {}, {}
    for name, values in logs.items():
        low, high = float(values.min()), float(values.max())
        # A constant quantity still gets bins of some width, centred on it.
        margin = max(0.0, 0.05 - (high - low) / 2)
        bounds = np.linspace(low - margin, high + margin, NUM_BINS + 1)
        # Rounding must not exclude the ends.
        bounds[0], bounds[-1] = bounds[0] - 1e-9, bounds[-1] + 1e-9
        edges[name] = np.exp(bounds).tolist()
        found[name] = [
            Distribution(
                quantiles=np.exp(np.quantile(column, QUANTILES)).tolist(),
                counts=np.histogram(column, bounds)[0].tolist(),
            )
            for column in [*np.ascontiguousarray(values.T), values.flatten()]
        ]
    return edges, found


def _plain(value: Any) -> Any:
    """Round numbers to 6 digits, and turn named tuples into dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
