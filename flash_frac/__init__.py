"""flash-frac: FRAC, a state-space sequence model whose memory fades as a power law.

The parts, each imported by name: `flash_frac.theory` (fractional calculus to a finite bank),
`flash_frac.ops` (the scan), `flash_frac.layers` (FracLayer), `flash_frac.models` (Hugging Face) and
`flash_frac.inference` (generation). The names below are loaded when first touched, so that
importing this package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_frac.inference import FracStream, Generator, SamplingSettings
    from flash_frac.layers import DeltaLayer, FracLayer, FracMixer, MixerState
    from flash_frac.models import (
        FracConfig,
        FracForCausalLM,
        FracForSequenceClassification,
        FracModel,
    )
    from flash_frac.ops import ScanOutput, frac_scan, frac_step

__version__ = "0.2.0"

_HOMES = {
    "frac_scan": "flash_frac.ops",
    "frac_step": "flash_frac.ops",
    "ScanOutput": "flash_frac.ops",
    "DeltaLayer": "flash_frac.layers",
    "FracLayer": "flash_frac.layers",
    "FracMixer": "flash_frac.layers",
    "MixerState": "flash_frac.layers",
    "FracConfig": "flash_frac.models",
    "FracModel": "flash_frac.models",
    "FracForCausalLM": "flash_frac.models",
    "FracForSequenceClassification": "flash_frac.models",
    "Generator": "flash_frac.inference",
    "FracStream": "flash_frac.inference",
    "SamplingSettings": "flash_frac.inference",
}

__all__ = [
    "DeltaLayer",
    "FracConfig",
    "FracForCausalLM",
    "FracForSequenceClassification",
    "FracLayer",
    "FracMixer",
    "FracModel",
    "FracStream",
    "Generator",
    "MixerState",
    "SamplingSettings",
    "ScanOutput",
    "__version__",
    "frac_scan",
    "frac_step",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flash_frac' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
