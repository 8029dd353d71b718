"""Read plain, .gz or .zst files as bytes, and report progress."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from flash_frac.extras import require


@contextmanager
def open_bytes(path: Path, progress: Callable[[int], object]) -> Iterator[IO[bytes]]:
    """Open a file for reading; decompress it if its name ends in .gz or .zst.

    `progress` is called at each read with the number of (compressed) bytes read from disk.

    Example: `with open_bytes(Path("a.txt.gz"), print) as file: content = file.read()`
    """
    suffix = path.suffix.lower()
    with io.BufferedReader(_CountedFile(path, progress), 1 << 16) as raw:
        if suffix == ".gz":
            with gzip.open(raw) as file:
                yield cast("IO[bytes]", file)
        elif suffix == ".zst":
            with io.BufferedReader(_ZstdFile(raw), 1 << 18) as file:
                yield file
        else:
            yield raw


def broken_errors(path: Path) -> tuple[type[Exception], ...]:
    """The exceptions that a truncated or damaged compressed file raises.

    Example: `except broken_errors(path) as error: ...`
    """
    if path.suffix.lower() == ".zst":
        return EOFError, _zstandard().ZstdError
    return EOFError, zlib.error, gzip.BadGzipFile


class _CountedFile(io.FileIO):
    """A file that reports how many bytes are read from it."""

    def __init__(self, path: Path, report: Callable[[int], object]) -> None:
        super().__init__(path)
        self._report = report

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._report(count)
        return count

    def readall(self) -> bytes:
        content = super().readall()
        self._report(len(content))
        return content


class _ZstdFile(io.RawIOBase):
    """Decompresses any number of zstandard frames; raises EOFError if the last one is truncated.

    The package's own reader stops there silently, and the rest of the text would be missing.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._frame = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read1(1 << 16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._frame is None:
                # The largest window that the zstd command writes (--long=31).
                reader = _zstandard().ZstdDecompressor(max_window_size=1 << 31)
                self._frame = reader.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _zstandard() -> Any:
    return require("zstandard", "train", "reading .zst files")
