"""From a model to tokens: `Generator` for batches, `FracStream` for states to hold and continue."""

from flash_frac.inference.generator import Generator
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.state import StreamMark
from flash_frac.inference.stream import FracStream
from flash_frac.inference.text import StopStrings

__all__ = [
    "FracStream",
    "Generator",
    "PrefixStates",
    "SamplingSettings",
    "StopStrings",
    "StreamMark",
]
