"""The public import of sampling; the code is in `flash_frac.inference.sampling`."""

from flash_frac.inference.sampling import GREEDY, SamplingSettings, adjust, choose

__all__ = ["GREEDY", "SamplingSettings", "adjust", "choose"]
