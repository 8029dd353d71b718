"""Measure the memory of every head of a model along a text.

Frac layers are measured here, content-based layers (attention, delta) in `content.py`.
Letters: B batch, T time, E width, H heads, M modes, L lags.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flash_frac.inspect.content import ByDistance, attention_by_distance, delta_by_distance
from flash_frac.inspect.fits import better, fit_exponential, fit_power_law
from flash_frac.inspect.records import (
    QUANTILES,
    HeadReport,
    LayerReport,
    MemoryReport,
    distributions,
)
from flash_frac.inspect.response import (
    horizon,
    impulse_response,
    log_spaced_lags,
    source_positions,
)
from flash_frac.inspect.statistics import check_model, check_tokens, visit_layers
from flash_frac.layers import DeltaMixer, FracMixer
from flash_frac.models.attention import Attention
from flash_frac.ops import Controls, Dynamics, mode_log_decay

# Slower decays are clamped to this, so that half-lives are finite.
_SLOWEST = 1e-12


def inspect_model(
    model: nn.Module,
    input_ids: Tensor,
    *,
    name: str | None = None,
    text: str = "tokens",
    factor: float = 1.25,
    num_lags: int = 64,
    max_sources: int = 4096,
    max_queries: int = 256,
) -> MemoryReport:
    """Measure the memory of every layer and head, from one forward pass without gradients.

    Besides the pass itself, only one layer's controls, 3 B T H M numbers, or some rows of attention
    weights are in memory at a time.

    Args:
        model: an unwrapped Frac model.
        input_ids: (B, T) tokens without padding; T limits the lags that can be measured.
        name: name of the model in the report; by default the end of its path or id.
        text: name of the text in the report.
        factor: a law holds at a lag if it is within this factor of the response.
        num_lags: approximate number of lags at which responses are measured.
        max_sources: maximum source tokens per row and lag, in Frac layers.
        max_queries: maximum tokens per row whose weights are computed, in attention and delta
            layers.

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
            f"input_ids must have at least 16 tokens per row, got {num_tokens}; use a text "
            "of a few thousand tokens, because its length limits the lags"
        )
    lags = log_spaced_lags(num_tokens, num_lags=num_lags)
    layers: list[LayerReport] = []
    config: Any = model.config

    def visit(layer: int, mixer: FracMixer, inner_x: Tensor, u: Tensor) -> None:
        dyn = mixer.dynamics(mixer.dyn_proj(inner_x))
        controls = mixer.controls(inner_x, u)
        response = impulse_response(controls, lags, max_sources=max_sources)
        found = _frac_layer(mixer, dyn, controls, lags, response, factor)
        counts = [len(source_positions(num_tokens, int(n), max_sources)) for n in lags]
        sources = [len(input_ids) * count for count in counts]
        layers.append(LayerReport(number=layer, type="frac", sources=sources, **found))

    def visit_content(layer: int, mixer: Attention | DeltaMixer, x: Tensor, inputs: Any) -> None:
        found = _content_layer(mixer, x, inputs, lags, factor, max_queries)
        layers.append(LayerReport(number=layer, type=config.mixer_types[layer], **found))

    visit_layers(model, input_ids, visit, visit_content=visit_content)
    path = [part for part in str(getattr(model, "name_or_path", "")).split("/") if part]
    return MemoryReport(
        name=name or "/".join(path[-2:]) or type(model).__name__,
        text=text,
        num_rows=len(input_ids),
        num_tokens=num_tokens,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        lags=lags.tolist(),
        factor=factor,
        quantiles=list(QUANTILES),
        layers=layers,
    )


def _frac_layer(
    mixer: FracMixer,
    dyn: Dynamics,
    controls: Controls,
    lags: np.ndarray,
    response: np.ndarray,
    factor: float,
) -> dict[str, Any]:
    log_tau = mixer.base_log_tau.detach().double()
    edges, found = distributions(_logs_of_controls(dyn, log_tau))
    fast, slow = _clamped(mixer, dyn)
    # Sum in float64 over the original dtype: a float64 copy would need more memory.
    read, write = (x.mean((0, 1), dtype=torch.float64).cpu().numpy() for x in controls[:2])
    tau = log_tau.expand(mixer.num_heads, -1).exp().tolist()
    heads = [
        HeadReport(
            distributions={name: each[h] for name, each in found.items()},
            **_laws(lags, response[h], factor),
            tau=tau[h],
            read=read[h].tolist(),
            write=write[h].tolist(),
            read_share=_shares(read[h]),
            write_share=_shares(write[h]),
            clamped_fast=float(fast[h]),
            clamped_slow=float(slow[h]),
        )
        for h in range(len(response))
    ]
    return {
        "tau": log_tau.view(-1, mixer.num_modes).mean(0).exp().tolist(),
        "edges": edges,
        "distributions": {name: each[-1] for name, each in found.items()},
        **_laws(lags, response.mean(0), factor),
        "clamped_fast": float(fast.mean()),
        "clamped_slow": float(slow.mean()),
        "heads": heads,
    }


def _content_layer(
    mixer: Attention | DeltaMixer,
    x: Tensor,
    inputs: dict[str, Any],
    lags: np.ndarray,
    factor: float,
    max_queries: int,
) -> dict[str, Any]:
    if isinstance(mixer, Attention):
        weights, found = _attention_layer(mixer, x, inputs, max_queries)
    else:
        weights, found = _delta_layer(mixer, x, max_queries)
    response, sources = weights.response(lags)
    heads = [
        HeadReport(**_laws(lags, response[h], factor), **head)
        for h, head in enumerate(found.pop("heads"))
    ]
    laws = _laws(lags, response.mean(0), factor)
    return {"sources": sources, "tau": [], "heads": heads, **laws, **found}


def _attention_layer(
    attention: Attention, x: Tensor, inputs: dict[str, Any], max_queries: int
) -> tuple[ByDistance, dict[str, Any]]:
    """Γ of its heads by distance, and the report fields that only attention has."""
    q, k, _ = attention.project(
        x, inputs.get("position_embeddings"), query_scale=inputs.get("query_scale")
    )
    weights = attention_by_distance(attention, q, k, max_queries=max_queries)
    edges, (*each, mean) = weights.distances()
    heads = [{"distributions": {}, "distances": distances} for distances in each]
    found = {"edges": {"distance": edges}, "distributions": {}, "distances": mean, "heads": heads}
    return weights, found


def _delta_layer(
    mixer: DeltaMixer, x: Tensor, max_queries: int
) -> tuple[ByDistance, dict[str, Any]]:
    """Like `_attention_layer`, with the distributions of its gates instead of distances."""
    weights = delta_by_distance(mixer, x, max_queries=max_queries)
    gates = mixer.scan_inputs(x)
    rate = (-gates.log_decay.double()).clamp_min(_SLOWEST)
    values = {"half_life": np.log(2) / rate, "beta": gates.beta.double()}
    logs = {name: y.log().flatten(0, 1).cpu().numpy() for name, y in values.items()}
    edges, found = distributions(logs)
    heads = [
        {"distributions": {name: each[h] for name, each in found.items()}}
        for h in range(mixer.num_heads)
    ]
    whole = {name: each[-1] for name, each in found.items()}
    return weights, {"edges": edges, "distributions": whole, "heads": heads}


def _laws(lags: np.ndarray, response: np.ndarray, factor: float) -> dict[str, Any]:
    """The report fields computed from a response (L,), lag 0 first."""
    power = fit_power_law(lags[1:], response[1:], factor=factor)
    exponential = fit_exponential(lags[1:], response[1:], factor=factor)
    return {
        "response": response.tolist(),
        "power": power,
        "exponential": exponential,
        "better": better(power, exponential),
        "horizon": horizon(lags, response),
    }


def _logs_of_controls(dyn: Dynamics, log_tau: Tensor) -> dict[str, np.ndarray]:
    """Logarithms of Δ, α and λ, (tokens, H), and of timescales, (tokens and modes, H)."""
    logs = {
        name: x.double().log().flatten(0, 1).cpu()
        for name, x in zip(("delta", "alpha", "lambda"), dyn, strict=True)
    }
    scale = -logs["delta"] - logs["lambda"] / logs["alpha"].exp()
    logs["timescale"] = (scale[..., None] + log_tau.cpu()).transpose(1, 2).flatten(0, 1)
    return {name: values.numpy() for name, values in logs.items()}


def _clamped(mixer: FracMixer, dyn: Dynamics) -> tuple[np.ndarray, np.ndarray]:
    """Shares (H,) of (token, mode) at the lower and at the upper bound of ρ."""
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
