"""Streams: the whole past of some sequences, in memory of fixed size, as a thing to hold."""

from flash_frac.stream.state import StreamMark
from flash_frac.stream.stream import FracStream

__all__ = ["FracStream", "StreamMark"]
