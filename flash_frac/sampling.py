"""The public import of sampling; the code is in `flash_frac.inference.sampling`."""

from flash_frac.inference.sampling import (
    GREEDY,
    SamplingSettings,
    SlotSettings,
    adjust,
    choose,
    choose_each,
)

__all__ = ["GREEDY", "SamplingSettings", "SlotSettings", "adjust", "choose", "choose_each"]
