"""How a trained model uses its bank of timescales: memory.csv, one row per Frac layer.

The numbers are those of `frac inspect`, on held-out tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.table import Table
from flash_frac.inspect import inspect_model
from flash_frac.inspect.records import LayerReport
from flash_frac.inspect.response import cumulative_weight
from flash_frac.models import FracForCausalLM
from flash_frac.ops import ControlSettings

KEY = ("model", "lr", "seed", "steps", "layer")
LAGS = (1, 16, 256, 1024)
"""Lags up to which the weight of the response is summed."""
COLUMNS = (
    *KEY,
    *("delta_median", "delta_max", "lambda_median", "lambda_max", "alpha_median", "alpha_max"),
    *("clamped_fast", "clamped_slow", "half", "ninety", "last_half"),
    *(f"within_{lag}" for lag in LAGS),
    *("read_modes", "write_modes", "slow_read", "slow_write", "tokens"),
    *("commit", "machine", "torch"),
)
# Source tokens per lag: a few seconds per model, instead of a minute for all 4,096.
_SOURCES = 512


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "memory.csv", COLUMNS, num_key=len(KEY))


def memory_rows(
    model: FracForCausalLM, tokens: Tensor, facts: dict[str, object]
) -> list[dict[str, object]]:
    """The rows of a trained model.

    Args:
        tokens: (T,) to read.
        facts: columns known without measuring.
    """
    device = next(model.parameters()).device
    report = inspect_model(model, tokens[None].long().to(device), max_sources=_SOURCES)
    settings, lags = model.config.control_settings(), np.array(report.lags)
    known = {name: facts[name] for name in COLUMNS if name in facts}
    return [
        {**known, "tokens": len(tokens), **_numbers(layer, settings, lags)}
        for layer in report.layers
        if layer.type == "frac"
    ]


def _numbers(
    layer: LayerReport, settings: ControlSettings, lags: np.ndarray
) -> dict[str, int | float]:
    middle = {name: found.quantiles[2] for name, found in layer.distributions.items()}
    # The weight of lag n covers [n, n + 1), so there are n + 1 weights up to lag n.
    below = cumulative_weight(lags, np.array(layer.response))
    within = {f"within_{lag}": below[min(lag + 1, len(below) - 1)] for lag in LAGS}
    read, write = (
        np.array([getattr(head, f"{name}_share") for head in layer.heads])
        for name in ("read", "write")
    )
    numbers = {
        "delta_median": middle["delta"],
        "delta_max": settings.dt_max,
        "lambda_median": middle["lambda"],
        "lambda_max": settings.lambda_max,
        "alpha_median": middle["alpha"],
        "alpha_max": settings.alpha_max,
        "clamped_fast": layer.clamped_fast,
        "clamped_slow": layer.clamped_slow,
        "half": layer.horizon.half,
        "ninety": layer.horizon.ninety,
        "last_half": layer.horizon.last_half,
        **within,
        "read_modes": effective_number(read),
        "write_modes": effective_number(write),
        "slow_read": slower_half(read),
        "slow_write": slower_half(write),
    }
    return {"layer": layer.number} | {k: float(f"{v:.5g}") for k, v in numbers.items()}


def effective_number(shares: np.ndarray) -> float:
    """Effective number of modes: mean over heads of exp(entropy) of the shares (H, M)."""
    logs = np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    return float(np.exp(-(shares * logs).sum(-1)).mean())


def slower_half(shares: np.ndarray) -> float:
    """Share of the slower half of each head's modes, averaged over heads; from shares (H, M)."""
    return float(shares[:, shares.shape[1] // 2 :].sum(-1).mean())


def held_out_row(held_out: np.ndarray, length: int) -> Tensor:
    """The first `length` tokens of the held-out documents, or all if there are fewer."""
    return torch.from_numpy(np.asarray(held_out[:length], np.int64))
