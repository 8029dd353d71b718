"""The public import of `FracStream` and `StreamMark`; the code is in `flash_frac.inference`."""

from flash_frac.inference import FracStream, StreamMark

__all__ = ["FracStream", "StreamMark"]
