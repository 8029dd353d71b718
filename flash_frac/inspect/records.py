"""What a report holds: numbers about every head, layer and model.

    MemoryReport -> LayerReport -> HeadReport -> Distribution, Distances, Fit (Stretch), Horizon

`MemoryReport.as_dict()` is what `report.json` holds: the attributes below by their names.
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
    """Of one quantity of a head over tokens (and modes): quantiles, and a histogram in log bins.

    Attributes:
        quantiles: at 5, 25, 50, 75 and 95%.
        counts: (40,) how many lie in each bin; the edges are the layer's, in `LayerReport.edges`.
    """

    quantiles: list[float]
    counts: list[int]


@dataclass(frozen=True, kw_only=True)
class Distances:
    """How far attention looks: its weight by distance, as a mean over queries.

    Attributes:
        shares: of the weight in each bin; the edges are `LayerReport.edges["distance"]`, 0, 1, 2, 4
            and so on, and the shares sum to 1.
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
        distributions: of a Frac head "delta", "alpha", "lambda" over tokens, and "timescale", that
            is tau_m / (Δ λ^(1/α)) in tokens, over tokens and modes; of a delta head "half_life",
            log 2 / -log_decay in tokens, and "beta"; none of attention.
        response: (L,) R(n) at the report's lags, lag 0 first.
        power, exponential: the best of each law over lags of 1 and more, or None.
        better: the kind of the one that is closer, or None.
        horizon: how far the response reaches.
        read, write: (M,) mean weight of each mode; write has the factor 1 - ρ in it.
        read_share, write_share: (M,) the same, as shares of their sum.
        clamped_fast, clamped_slow: of all (token, mode), the share with ρ on its lower bound
            rho_eps, and on its upper bound 1 - rho_eps.
        distances: of attention.
    The last seven are None of heads that have no such thing.
    """

    distributions: dict[str, Distribution]
    response: list[float]
    power: Fit | None
    exponential: Fit | None
    better: str | None
    horizon: Horizon
    read: list[float] | None = None
    write: list[float] | None = None
    read_share: list[float] | None = None
    write_share: list[float] | None = None
    clamped_fast: float | None = None
    clamped_slow: float | None = None
    distances: Distances | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The memory of one layer: its heads, and the same of the mean of their responses.

    Attributes:
        number: its position in the model, from 0; layers of all types count.
        type: "frac", "delta", "attention" or "sliding_attention".
        sources: (L,) over how many pairs of tokens each R(n) is a mean.
        tau: (M,) timescales of the bank, in tokens; empty if it has none.
        edges: (41,) edges of the log bins of each distribution, by name.
        distributions: as in `HeadReport`, over all heads.
        response, power, exponential, better, horizon: as in `HeadReport`, of the mean response.
        clamped_fast, clamped_slow: means over heads.
        distances: of the mean over heads.
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
        name: of the model; text: of what it read.
        num_rows, num_tokens: B and T of the text.
        num_parameters: of the model.
        lags: (L,) n in tokens, lag 0 first.
        factor: within which a law must be to hold at a lag.
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
        """Everything as dictionaries, lists, numbers and text, to 6 digits: `report.json`.

        Example: `report.as_dict()["layers"][0]["heads"][3]["power"]["exponent"]`
        """
        return _plain(asdict(self))


def distributions(
    logs: dict[str, np.ndarray],
) -> tuple[dict[str, list[float]], dict[str, list[Distribution]]]:
    """By name, edges of the log bins, and distributions: of each head, and last of all together.

    Args:
        logs: by name, logarithms of a quantity (tokens, H).
    """
    edges, found = {}, {}
    for name, values in logs.items():
        low, high = float(values.min()), float(values.max())
        # A quantity that never changes still gets bins of some width, with it in the middle.
        margin = max(0.0, 0.05 - (high - low) / 2)
        bounds = np.linspace(low - margin, high + margin, NUM_BINS + 1)
        # Rounding must not leave the ends out.
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
    """The same with numbers to 6 digits, and named tuples as dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
