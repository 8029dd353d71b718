"""Inspect the memory of a trained model.

`memory_statistics` returns a few numbers for each layer, cheap enough for a training log, and
`layer_kernel` returns the kernel of a layer at its mean controls. `inspect_model` measures the
memory of every head along a text, `write_report` turns that into a page, figures and a JSON file,
and `inspect_checkpoint` does both for a saved model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_frac.inspect.fits import Fit, Stretch, fit_exponential, fit_power_law
    from flash_frac.inspect.records import (
        Distances,
        Distribution,
        HeadReport,
        LayerReport,
        MemoryReport,
    )
    from flash_frac.inspect.report import inspect_model
    from flash_frac.inspect.response import Horizon, horizon, impulse_response, log_spaced_lags
    from flash_frac.inspect.statistics import (
        LayerStatistics,
        evaluating,
        layer_kernel,
        layer_numbers,
        memory_statistics,
    )
    from flash_frac.inspect.write import inspect_checkpoint, write_report

__all__ = [
    "Distances",
    "Distribution",
    "Fit",
    "HeadReport",
    "Horizon",
    "LayerReport",
    "LayerStatistics",
    "MemoryReport",
    "Stretch",
    "evaluating",
    "fit_exponential",
    "fit_power_law",
    "horizon",
    "impulse_response",
    "inspect_checkpoint",
    "inspect_model",
    "layer_kernel",
    "layer_numbers",
    "log_spaced_lags",
    "memory_statistics",
    "write_report",
]

_PARTS = ("statistics", "fits", "response", "records", "report", "write")


def __getattr__(name: str) -> Any:
    # Import each part on first use: training needs the statistics but not the page.
    for part in (
        ("statistics", "fits", "response", "records", "report", "write") if name in __all__ else ()
    ):
        module = import_module(f"flash_frac.inspect.{part}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'flash_frac.inspect' has no attribute {name!r}")
