"""The public import of `Generator` and `StopStrings`; the code is in `flash_frac.inference`."""

from flash_frac.inference import Generator, StopStrings

__all__ = ["Generator", "StopStrings"]
