"""Inference: `Engine` serves many requests, `Generator` runs batches, and `FracStream` holds a
state that you can save, fork and continue."""

from flash_frac.inference.engine import Engine
from flash_frac.inference.generator import Generator
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.scheduling import EngineStopped, QueueFull, Request, Update
from flash_frac.inference.state import StreamMark
from flash_frac.inference.stream import FracStream
from flash_frac.inference.text import StopStrings

__all__ = [
    "Engine",
    "EngineStopped",
    "FracStream",
    "Generator",
    "PrefixStates",
    "QueueFull",
    "Request",
    "SamplingSettings",
    "StopStrings",
    "StreamMark",
    "Update",
]
