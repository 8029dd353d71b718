"""The token store: a folder with one flat, memory-mapped array of tokens.

- `tokens.bin`: little-endian uint16, or uint32 if the vocabulary needs it; each document is
  followed by the eos token, and nothing else.
- `documents.npy`: int64, where each document starts, and finally where the last one ends.
- `meta.json`: counts, the tokenizer's hash, the sources, the format version.
- `manifest.json`: sizes and checksums of the other files.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flash_frac.files import read_object
from flash_frac.manifest import check_manifest, write_manifest

# Format 2 added the manifest.
FORMAT = 2
# The dtypes that an encoder writes; numpy would accept others, and some hold pointers.
DTYPES = ("<u2", "<u4")


class Store(Protocol):
    """The interface that datasets read: the tokens of all documents in a row; see `TokenStore`."""

    folder: Path
    num_tokens: int
    num_documents: int
    starts: np.ndarray

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens [start, stop) as (stop - start,) int64."""
        ...


class TokenStore:
    """A finished store, opened for reading.

    Args:
        folder: a folder written by `StoreWriter`.
        check: read all files and compare them with their checksums.

    Attributes:
        num_tokens, num_documents: counts, including eos tokens.
        starts: (num_documents + 1,) int64, the start of each document, then `num_tokens`.
        meta: the content of `meta.json`.

    Example: `store = TokenStore("tokens/train"); ids = store.tokens(0, 1024)`
    """

    def __init__(self, folder: str | Path, *, check: bool = True) -> None:
        self.folder = Path(folder)
        try:
            self.meta: dict[str, Any] = read_object(self.folder / "meta.json")
            self._check_meta()
            if check:
                check_manifest(self.folder)
            self.num_tokens: int = self.meta["num_tokens"]
            self.num_documents: int = self.meta["num_documents"]
            self.starts: np.ndarray = np.load(
                self.folder / "documents.npy", mmap_mode="r", allow_pickle=False
            )
            self._tokens = np.memmap(
                self.folder / "tokens.bin", np.dtype(self.meta["dtype"]), mode="r"
            )
            self._check_boundaries()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.folder} is not a complete token store: {error}") from error

    def _check_meta(self) -> None:
        path = self.folder / "meta.json"
        known = {"format": (FORMAT,), "dtype": DTYPES}
        for name, values in known.items():
            if (value := self.meta.get(name)) not in values:
                raise ValueError(f"{path} has {name} {value!r}, this version reads {values}")
        for name in ("num_tokens", "num_documents"):
            if type(self.meta.get(name)) is not int:
                raise ValueError(f"{path} needs a whole number as {name}")

    def _check_boundaries(self) -> None:
        """Check the counts: data truncated by a full disk or a partial copy must be refused."""
        starts = self.starts
        if starts.dtype != np.int64 or starts.shape != (self.num_documents + 1,):
            raise ValueError(
                f"documents.npy holds {starts.dtype} {starts.shape}, expected int64 "
                f"({self.num_documents + 1},)"
            )
        if len(self._tokens) != self.num_tokens:
            raise ValueError(
                f"meta.json counts {self.num_tokens} tokens, tokens.bin holds {len(self._tokens)}"
            )
        if starts[0] != 0 or starts[-1] != self.num_tokens or (np.diff(starts) <= 0).any():
            raise ValueError(
                f"the starts in documents.npy do not increase from 0 to {self.num_tokens}"
            )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens [start, stop) as (stop - start,) int64; both must be in the store."""
        check_range(start, stop, self.num_tokens)
        return self._tokens[start:stop].astype(np.int64)

    def __repr__(self) -> str:
        return (
            f"TokenStore({str(self.folder)!r}, num_tokens={self.num_tokens}, "
            f"num_documents={self.num_documents})"
        )

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        # Spawned dataloader workers open the files themselves, because pickling would copy the
        # tokens. The files have been checked already.
        return partial(TokenStore, check=False), (self.folder,)


class StoreWriter:
    """Writes a store in pieces; it can be opened once `close` has returned.

    Example: `writer = StoreWriter("new", np.dtype("<u2")); writer.write(ids, ends=True);
    writer.close({})`
    """

    def __init__(self, folder: str | Path, dtype: np.dtype) -> None:
        self.folder = Path(folder)
        self.folder.mkdir()
        self.dtype = dtype
        self.num_tokens = 0
        self._starts = array("q", [0])
        self._file = open(self.folder / "tokens.bin", "wb", buffering=1 << 20)  # noqa: SIM115

    @property
    def num_documents(self) -> int:
        """Number of complete documents so far."""
        return len(self._starts) - 1

    def write(self, ids: np.ndarray, *, ends: bool) -> None:
        """Append ids (n,); `ends` says whether they end a document."""
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self.num_tokens += len(ids)
        if ends:
            self._starts.append(self.num_tokens)

    def close(self, meta: Mapping[str, Any]) -> None:
        """Write the index, `meta` with the counts, and the manifest; sync all files to disk."""
        _sync(self._file)
        with open(self.folder / "documents.npy", "wb") as file:
            np.save(file, np.frombuffer(self._starts, np.int64))
            _sync(file)
        counts = {
            "format": FORMAT,
            "dtype": self.dtype.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
        }
        with open(self.folder / "meta.json", "w") as file:
            json.dump(counts | dict(meta), file, indent=1)
            _sync(file)
        write_manifest(self.folder)

    def abandon(self) -> None:
        """Close the file of a store that is not needed."""
        # Flushing to a full disk fails again, and there is nothing to save.
        with suppress(OSError):
            self._file.close()


def check_range(start: int, stop: int, num_tokens: int) -> None:
    """Raise ValueError unless tokens [start, stop) are in a store."""
    if not 0 <= start <= stop <= num_tokens:
        raise ValueError(
            f"start and stop must satisfy 0 <= start <= stop <= {num_tokens}, "
            f"got {start} and {stop}"
        )


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
