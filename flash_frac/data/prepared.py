"""Prepared data: a folder of tokenised shards with random access for any number of processes.

- `shards/PART-NUMBER/`: sorted by name, the shards hold the documents in the order of their source.
  Each has a `shard.json` and the token stores `train` and `held_out`, unless empty.
- `train.npy`, `held_out.npy`: int64, where each document of a split starts, and where the last
  one ends.
- `tokenizer/`: the tokenizer.
- `meta.json`: the settings and, once finished, the counts.
- `manifest.json`: sizes and checksums of all other files; it is written last.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from flash_frac.data.store import DTYPES, check_range
from flash_frac.files import check_object, read_record
from flash_frac.manifest import MANIFEST, ManifestError, check_manifest

FORMAT = 1
META, TOKENIZER, SHARDS = "meta.json", "tokenizer", "shards"
SPLITS = ("train", "held_out")
# Each keeps a file open, and a process can open 1024 by default.
OPEN_SHARDS = 128
_FIELDS = {"settings": dict, "tokenizer": str, "dtype": str, "splits": dict}


class ShardedStore:
    """One split of prepared data, with the interface of `TokenStore`.

    Args:
        folder: folder of the prepared data, already checked.
        split: "train" or "held_out".

    Example: `ShardedStore("tokens", "train").tokens(0, 1024)`
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder)
        self.split = split
        self.meta = read_record(self.folder / META, _FIELDS)
        facts = self.meta["splits"][split]
        self.num_tokens: int = facts["num_tokens"]
        self.num_documents: int = facts["num_documents"]
        self.shards: list[str] = list(facts["shards"])
        # Where the tokens of each shard end.
        self._ends = np.cumsum(list(facts["shards"].values()), dtype=np.int64)
        index = self.folder / f"{split}.npy"
        self.starts: np.ndarray = np.load(index, mmap_mode="r", allow_pickle=False)
        if self.starts.dtype != np.int64 or self.starts.shape != (self.num_documents + 1,):
            raise ValueError(f"{index} is not the index of {self.num_documents} documents")
        if self.starts[-1] != self.num_tokens or self._ends[-1] != self.num_tokens:
            raise ValueError(f"{index} does not end at the last token, {self.num_tokens}")
        self._open = lru_cache(OPEN_SHARDS)(partial(_open_shard, self.folder, split, self.meta))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens [start, stop) as (stop - start,) int64; both must be in the store."""
        check_range(start, stop, self.num_tokens)
        pieces = [np.zeros(0, np.int64)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[number])
            tokens = self._open(self.shards[number])
            # Counted from the shard's end, because `end` is its end in the whole split.
            begin = start - end + len(tokens)
            pieces.append(tokens[begin : begin + min(stop, end) - start].astype(np.int64))
            start, number = min(stop, end), number + 1
        return np.concatenate(pieces)

    def __repr__(self) -> str:
        return (
            f"ShardedStore({str(self.folder)!r}, {self.split!r}, num_tokens={self.num_tokens}, "
            f"num_documents={self.num_documents})"
        )

    def __reduce__(self) -> tuple[Any, tuple[Path, str]]:
        # Spawned dataloader workers open the files themselves.
        return ShardedStore, (self.folder, self.split)


def _open_shard(folder: Path, split: str, meta: dict[str, Any], name: str) -> np.ndarray:
    path = folder / SHARDS / name / split / "tokens.bin"
    tokens = np.memmap(path, np.dtype(meta["dtype"]), mode="r")
    if len(tokens) != (wanted := meta["splits"][split]["shards"][name]):
        raise ValueError(f"{path} is damaged: it holds {len(tokens)} tokens, expected {wanted}")
    return tokens


class PreparedData:
    """A finished folder of `prepare_corpus`, opened for reading.

    The sizes of all files are checked against the manifest, and the checksums of the small ones,
    which include the manifest of each shard.

    Attributes:
        train, held_out: the splits; `held_out` is None if nothing is held out.
        meta: the content of `meta.json`.

    Example: `data = PreparedData("tokens"); data.train.num_tokens`
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.meta = read_meta(self.folder)
        check_finished(self.folder)
        try:
            check_manifest(self.folder, most_bytes=0)
            check_manifest(self.folder, "*.json")
            check_object(self.meta, self.folder / META, _FIELDS)
            if self.meta["dtype"] not in DTYPES:
                raise ValueError(f"{self.folder / META} has dtype {self.meta['dtype']!r}")
            splits = [self._split(name) for name in SPLITS]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{error}; {_repair(self.folder)}") from error
        assert splits[0] is not None
        self.train: ShardedStore = splits[0]
        self.held_out: ShardedStore | None = splits[1]

    def _split(self, name: str) -> ShardedStore | None:
        has = name == "train" or name in self.meta["splits"]
        return ShardedStore(self.folder, name) if has else None

    def check(self) -> int:
        """Read all files and compare them with their checksums; return their number.

        Example: `PreparedData("tokens").check()`
        """
        try:
            return check_manifest(self.folder)
        except ManifestError as error:
            raise ValueError(f"{error}; {_repair(self.folder)}") from error

    def check_tokenizer(self, name: str, fingerprint: str, beginning: list[int]) -> None:
        """Raise ValueError unless this tokenizer made the tokens.

        Args:
            name: the user's name for the tokenizer.
            fingerprint, beginning: `hash` and `beginning` of its `Encoder`.
        """
        settings = self.meta["settings"]
        if settings["tokenizer"] != fingerprint:
            raise ValueError(
                f"prepared_data {self.folder} was tokenised by {self.meta['tokenizer']!r} "
                f"(fingerprint {settings['tokenizer'][:12]}), but tokenizer is {name!r} "
                f"({fingerprint[:12]}): set tokenizer to {self.folder / TOKENIZER}"
            )
        if settings["beginning"] != beginning:
            raise ValueError(
                f"documents in prepared_data {self.folder} start with the tokens "
                f"{settings['beginning']}, but the tokenizer of this run starts a text with "
                f"{beginning}: change add_bos_token, or prepare the data again"
            )


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta.json` of prepared data, finished or not."""
    path = folder / META
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no prepared data ({META} is missing): name a folder written by "
            "`frac data prepare`"
        )
    meta = read_record(path, {"settings": dict})
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {meta.get('format')}, but this flash-frac reads format {FORMAT}: "
            "prepare the data again"
        )
    return meta


def check_finished(folder: Path) -> None:
    """Raise ValueError if `prepare_corpus` was interrupted."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} is not finished: run the same `frac data prepare` command again, which "
            "continues after the finished shards"
        )


def fingerprint_of(folder: str | Path) -> str:
    """A hash of the checksums of all files of prepared data, which identifies its content.

    Example: `fingerprint_of("tokens")`
    """
    read_meta(Path(folder))
    check_finished(Path(folder))
    return hashlib.sha256((Path(folder) / MANIFEST).read_bytes()).hexdigest()


def _repair(folder: Path) -> str:
    return (
        f"copy {folder} again; or delete the damaged shard's folder and {folder / MANIFEST}, and "
        "run the same `frac data prepare` command again"
    )
