"""What every head of a model does with its memory along a text, as numbers.

    MemoryReport -> LayerReport -> HeadReport -> Distribution, Fit (and its Stretch), Horizon

`MemoryReport.as_dict()` is what `report.json` holds: the attributes below by their names.
Letters: B batch, T time, H heads, M modes, L lags.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flash_frac.inspect.fits import Fit, better, fit_exponential, fit_power_law
from flash_frac.inspect.response import (
    Horizon,
    horizon,
    impulse_response,
    log_spaced_lags,
    source_positions,
)
from flash_frac.inspect.statistics import check_model, check_tokens, visit_layers
from flash_frac.layers import FracMixer
from flash_frac.ops import Controls, Dynamics, mode_log_decay

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
class HeadReport:
    """The memory of one head.

    Attributes:
        distributions: of "delta", "alpha", "lambda" over tokens, and of "timescale", that is
            tau_m / (Δ λ^(1/α)) in tokens, over tokens and modes.
        response: (L,) R(n) at the report's lags, lag 0 first.
        power, exponential: the best of each law over lags of 1 and more, or None.
        better: the kind of the one that is closer, or None.
        horizon: how far the response reaches.
        read, write: (M,) mean weight of each mode; write has the factor 1 - ρ in it.
        read_share, write_share: (M,) the same, as shares of their sum.
        clamped_fast, clamped_slow: of all (token, mode), the share with ρ on its lower bound
            rho_eps, and on its upper bound 1 - rho_eps.
    """

    distributions: dict[str, Distribution]
    response: list[float]
    power: Fit | None
    exponential: Fit | None
    better: str | None
    horizon: Horizon
    read: list[float]
    write: list[float]
    read_share: list[float]
    write_share: list[float]
    clamped_fast: float
    clamped_slow: float


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The memory of one layer: its heads, and the same of the mean of their responses.

    Attributes:
        number: its position in the model, from 0; attention layers count.
        tau: (M,) timescales of the bank, in tokens.
        edges: (41,) edges of the log bins of each distribution, by name.
        distributions: as in `HeadReport`, over all heads.
        response, power, exponential, better, horizon: as in `HeadReport`, of the mean response.
        clamped_fast, clamped_slow: means over heads.
        heads: one report each.
    """

    number: int
    tau: list[float]
    edges: dict[str, list[float]]
    distributions: dict[str, Distribution]
    response: list[float]
    power: Fit | None
    exponential: Fit | None
    better: str | None
    horizon: Horizon
    clamped_fast: float
    clamped_slow: float
    heads: list[HeadReport]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a model on a text.

    Attributes:
        name: of the model; text: of what it read.
        num_rows, num_tokens: B and T of the text.
        num_parameters: of the model.
        lags: (L,) n in tokens, lag 0 first.
        sources: (L,) over how many source tokens of the text each R(n) is a mean.
        factor: within which a law must be to hold at a lag.
        quantiles: the levels of the quantiles, ascending.
        layers: one report for each Frac layer.
    """

    name: str
    text: str
    num_rows: int
    num_tokens: int
    num_parameters: int
    lags: list[int]
    sources: list[int]
    factor: float
    quantiles: list[float]
    layers: list[LayerReport]

    def as_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, numbers and text, to 6 digits: `report.json`.

        Example: `report.as_dict()["layers"][0]["heads"][3]["power"]["exponent"]`
        """
        return _plain(asdict(self))


def inspect_model(
    model: nn.Module,
    input_ids: Tensor,
    *,
    name: str | None = None,
    text: str = "tokens",
    factor: float = 1.25,
    num_lags: int = 64,
    max_sources: int = 4096,
) -> MemoryReport:
    """Measure the memory of every layer and head, from one forward pass without gradients.

    Only one layer's controls, 3 B T H M numbers, are in memory at a time beyond the pass itself.

    Args:
        model: a Frac model; of one that is wrapped, the model inside.
        input_ids: (B, T) tokens without padding; T bounds the lags that can be measured.
        name: of the model, for the report; by default the end of the path or id it came from.
        text: name of the text, for the report.
        factor: a law holds at a lag if it is within this factor of the response.
        num_lags: lags at which responses are measured, about.
        max_sources: source tokens of each row and lag, at most.

    Example:
        >>> report = inspect_model(model, ids)
        >>> head = report.layers[0].heads[3]
        >>> print(head.power.exponent, head.power.first, head.power.last, head.horizon.half)
    """
    if not factor > 1:
        raise ValueError(f"factor must be above 1, such as 1.25, got {factor}")
    check_model(model)
    check_tokens(input_ids)
    num_tokens = input_ids.shape[1]
    if num_tokens < 16:
        raise ValueError(
            f"input_ids must have at least 16 tokens a row, got {num_tokens}; use a text "
            "of some thousand tokens, because lags end where it does"
        )
    lags = log_spaced_lags(num_tokens, num_lags=num_lags)
    layers: list[LayerReport] = []

    def visit(layer: int, mixer: FracMixer, inner_x: Tensor, u: Tensor) -> None:
        dyn = mixer.dynamics(mixer.dyn_proj(inner_x))
        controls = mixer.controls(inner_x, u)
        response = impulse_response(controls, lags, max_sources=max_sources)
        layers.append(_layer(layer, mixer, dyn, controls, lags, response, factor))

    visit_layers(model, input_ids, visit)
    path = [part for part in str(getattr(model, "name_or_path", "")).split("/") if part]
    counts = [len(source_positions(num_tokens, int(n), max_sources)) for n in lags]
    return MemoryReport(
        name=name or "/".join(path[-2:]) or type(model).__name__,
        text=text,
        num_rows=len(input_ids),
        num_tokens=num_tokens,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        lags=lags.tolist(),
        sources=[len(input_ids) * count for count in counts],
        factor=factor,
        quantiles=list(QUANTILES),
        layers=layers,
    )


def _layer(
    number: int,
    mixer: FracMixer,
    dyn: Dynamics,
    controls: Controls,
    lags: np.ndarray,
    response: np.ndarray,
    factor: float,
) -> LayerReport:
    log_tau = mixer.base_log_tau.detach().double()
    edges, distributions = _distributions(dyn, log_tau)
    fast, slow = _clamped(mixer, dyn)
    # One pass over each in its own dtype, with float64 sums: a copy would double the memory.
    read, write = (x.mean((0, 1), dtype=torch.float64).cpu().numpy() for x in controls[:2])
    heads = [
        HeadReport(
            distributions={name: found[h] for name, found in distributions.items()},
            **_laws(lags, response[h], factor),
            read=read[h].tolist(),
            write=write[h].tolist(),
            read_share=_shares(read[h]),
            write_share=_shares(write[h]),
            clamped_fast=float(fast[h]),
            clamped_slow=float(slow[h]),
        )
        for h in range(len(response))
    ]
    return LayerReport(
        number=number,
        tau=log_tau.exp().tolist(),
        edges=edges,
        distributions={name: found[-1] for name, found in distributions.items()},
        **_laws(lags, response.mean(0), factor),
        clamped_fast=float(fast.mean()),
        clamped_slow=float(slow.mean()),
        heads=heads,
    )


def _laws(lags: np.ndarray, response: np.ndarray, factor: float) -> dict[str, Any]:
    """The part of a report that follows from a response (L,), lag 0 first."""
    power = fit_power_law(lags[1:], response[1:], factor=factor)
    exponential = fit_exponential(lags[1:], response[1:], factor=factor)
    return {
        "response": response.tolist(),
        "power": power,
        "exponential": exponential,
        "better": better(power, exponential),
        "horizon": horizon(lags, response),
    }


def _distributions(
    dyn: Dynamics, log_tau: Tensor
) -> tuple[dict[str, list[float]], dict[str, list[Distribution]]]:
    """By name, edges of the log bins, and distributions: of each head, and last of all together."""
    logs = {
        name: x.double().log().flatten(0, 1).cpu()
        for name, x in zip(("delta", "alpha", "lambda"), dyn, strict=True)
    }
    scale = -logs["delta"] - logs["lambda"] / logs["alpha"].exp()
    logs["timescale"] = (scale[..., None] + log_tau.cpu()).transpose(1, 2).flatten(0, 1)
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
            for column in [*values.T.contiguous().numpy(), values.flatten().numpy()]
        ]
    return edges, found


def _clamped(mixer: FracMixer, dyn: Dynamics) -> tuple[np.ndarray, np.ndarray]:
    """Shares (H,) of (token, mode) on the lower and on the upper bound of ρ."""
    eps = mixer.settings.rho_eps
    if not eps:
        return np.zeros(mixer.num_heads), np.zeros(mixer.num_heads)
    free = mode_log_decay(dyn, mixer.base_log_tau.to(dyn.delta.dtype), rho_eps=0.0)
    ends = (free <= np.log(eps), free >= np.log1p(-eps))
    fast, slow = (end.double().mean((0, 1, 3)).cpu().numpy() for end in ends)
    return fast, slow


def _shares(weights: np.ndarray) -> list[float]:
    size = np.abs(weights)
    return (size / max(size.sum(), 1e-300)).tolist()


def _plain(value: Any) -> Any:
    """The same with numbers to 6 digits, and named tuples as dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
