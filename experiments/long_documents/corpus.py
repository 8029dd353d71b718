"""A corpus as token ids in one small folder, readable without a tokenizer or `datasets`.

- `train.xz`, `held_out.xz`: little-endian uint16, each document followed by its eos token.
- `corpus.json`: counts, the vocabulary, and the sentence of `recall` in tokens.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.long_documents.recall import Phrases, find_phrases
from flash_frac.files import read_object

# A token is two bytes; the coder then keeps separate statistics for each.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lp": 1, "pb": 1, "dict_size": 1 << 26}]
_TOKEN = np.dtype("<u2")
_PIECE = 1 << 22


class Corpus(NamedTuple):
    """Token ids for training and held-out ones, of concatenated documents.

    Fields:
        train, held_out: (S,) uint16 each.
        held_out_documents: number of held-out documents.
        vocab_size: V.
        phrases: the sentence of `recall`.
    """

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    held_out_documents: int
    vocab_size: int
    phrases: Phrases


def write_corpus(folder: Path, corpus: Corpus) -> None:
    """Write the folder; corpus.json comes last, so its presence means that all files are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "held_out"):
        tokens = np.ascontiguousarray(getattr(corpus, name), _TOKEN)
        with lzma.open(folder / f"{name}.xz", "wb", filters=_FILTERS) as file:
            for start in range(0, len(tokens), _PIECE):
                file.write(tokens[start : start + _PIECE].tobytes())
    facts = {
        "train": len(corpus.train),
        "held_out": len(corpus.held_out),
        "held_out_documents": corpus.held_out_documents,
        "vocab_size": corpus.vocab_size,
        "phrases": corpus.phrases._asdict(),
    }
    (folder / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")


def read_corpus(folder: Path) -> Corpus:
    """Read a corpus from a folder written by `write_corpus`."""
    if not (folder / "corpus.json").exists():
        raise ValueError(
            f"folder must hold corpus.json, got {folder}; run python -m "
            "experiments.long_documents.prepare"
        )
    counts = dict.fromkeys(("train", "held_out", "held_out_documents", "vocab_size"), int)
    facts = read_object(folder / "corpus.json", {**counts, "phrases": dict})
    parts = {}
    for name in ("train", "held_out"):
        with lzma.open(folder / f"{name}.xz") as file:
            parts[name] = np.frombuffer(file.read(), _TOKEN)
        if len(parts[name]) != facts[name]:
            raise ValueError(
                f"{folder / name}.xz must hold {facts[name]} tokens, got {len(parts[name])}; "
                "make or copy it again"
            )
    phrases = Phrases(**facts["phrases"])
    return Corpus(**parts, phrases=phrases, **{k: facts[k] for k in Corpus._fields[2:4]})


def toy_corpus() -> Corpus:
    """Random letters for smoke tests: a byte vocabulary of 259, as many documents as needed."""
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(35, 100, size, _TOKEN.type) for size in (8192, 4096))
    phrases = find_phrases(lambda text: [3 + byte for byte in text.encode()])
    return Corpus(train, held_out, 1, 259, phrases)


def training_rows(tokens: NDArray[np.uint16], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, length), int32, of consecutive rows; an incomplete one is dropped."""
    num = (len(tokens) - 1) // length
    if num < 1:
        raise ValueError(
            f"length must be below the {len(tokens)} tokens, got {length}; use more text"
        )
    ids = torch.from_numpy(tokens[: num * length + 1].astype(np.int32))
    return ids[:-1].view(num, length), ids[1:].view(num, length)


def windows(
    tokens: NDArray[np.uint16], length: int, *, longest: int, max_tokens: int | None = None
) -> Tensor:
    """Windows (N, length + 1), int64, whose targets are the same tokens for any length.

    The targets are tokens 1 to S, for the largest S that is a multiple of `longest`. Each window
    predicts from its first token on; its last target is the first token of the next window.

    Args:
        longest: a multiple of every length to compare.
        max_tokens: most tokens to score; all if None.
    """
    if longest % length:
        raise ValueError(f"length must divide longest ({longest}), got {length}")
    usable = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
    num = usable // longest * longest // length
    if num < 1:
        raise ValueError(
            f"longest must be at most the {usable} tokens to score, got {longest}; use shorter "
            "lengths, a larger max_tokens, or more text"
        )
    ids = torch.from_numpy(tokens[: num * length + 1].astype(np.int64))
    return ids.unfold(0, length + 1, length)


def batches(rows: Tensor, tokens_at_once: int) -> Iterator[Tensor]:
    """Split rows (N, T) into parts of about this many tokens, at least one row each."""
    yield from rows.split(max(1, tokens_at_once // rows.shape[1]))
