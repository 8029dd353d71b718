"""Summarise prepared data for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flash_frac.data.prepared import TOKENIZER, PreparedData, ShardedStore
from flash_frac.data.tokenizer import load_tokenizer
from flash_frac.files import folder_size

# Width of the longest bar in the histogram.
BAR = 40
# Tokens decoded per sample, and characters shown.
SAMPLE_TOKENS, SAMPLE_LETTERS = 100, 200


def summary(data: PreparedData) -> Iterator[str]:
    """Lines on the source, tokenizer, counts and sizes.

    Example: `print(*summary(PreparedData("tokens")), sep="\\n")`
    """
    settings = data.meta["settings"]
    names = [fact["name"] for fact in settings["source"]]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    yield f"Source: {names[0]}{more}, field {settings['text_field']!r}"
    begin = settings["beginning"]
    yield (
        f"Tokenizer: {data.meta['tokenizer']}, fingerprint {settings['tokenizer'][:12]}; documents "
        f"start with {f'the tokens {begin}' if begin else 'no special token'} and end with eos"
    )
    yield f"Train: {_counts(data.train)}"
    yield f"Held out: {_counts(data.held_out) if data.held_out else 'nothing'}{_rule(data)}"
    if dropped := data.meta["dropped_documents"]:
        yield f"Left out: {dropped:,} copies of held-out documents"
    shards = {*data.train.shards, *(data.held_out.shards if data.held_out else ())}
    yield (
        f"On disk: {len(shards):,} shards, {folder_size(data.folder):,} bytes, "
        f"{np.dtype(data.meta['dtype']).itemsize} per token"
    )


def _counts(store: ShardedStore) -> str:
    return f"{store.num_documents:,} documents, {store.num_tokens:,} tokens"


def _rule(data: PreparedData) -> str:
    settings = data.meta["settings"]
    if settings["held_out_documents"]:
        return f" (the first {settings['held_out_documents']:,} documents)"
    if settings["held_out"]:
        return f" (a fraction of {settings['held_out']} by hash, seed {settings['seed']})"
    return ""


def lengths(store: ShardedStore) -> Iterator[str]:
    """Lines with mean, median and maximum document length in tokens, and a histogram.

    Example: `print(*lengths(PreparedData("tokens").train), sep="\\n")`
    """
    sizes = np.diff(np.asarray(store.starts))
    yield (
        f"Tokens per document (with eos): mean {sizes.mean():,.1f}, median "
        f"{np.median(sizes):,.0f}, maximum {sizes.max():,}"
    )
    # Bins start at powers of four: 1, 4, 16, ...
    powers = 4 ** np.arange(32)
    bins = np.searchsorted(powers, sizes, side="right") - 1
    counts = np.bincount(bins)
    first = int(np.flatnonzero(counts)[0])
    for number in range(first, len(counts)):
        name = f"{powers[number]:,} to {powers[number + 1] - 1:,}"
        bar = "#" * int(np.ceil(BAR * counts[number] / counts.max()))
        yield f"{name:>26} {counts[number]:>13,} {bar}"


def sample(data: PreparedData, count: int, *, seed: int) -> Iterator[str]:
    """The decoded beginnings of some training documents, one per line.

    Example: `print(*sample(PreparedData("tokens"), 3, seed=0), sep="\\n")`
    """
    tokenizer = load_tokenizer(str(data.folder / TOKENIZER))
    store = data.train
    count = min(count, store.num_documents)
    chosen = np.random.default_rng(seed).choice(store.num_documents, count, replace=False)
    for number in sorted(chosen.tolist()):
        start, stop = (int(x) for x in store.starts[number : number + 2])
        ids = store.tokens(start, min(stop, start + SAMPLE_TOKENS))
        text = " ".join(str(tokenizer.decode(ids)).split())[:SAMPLE_LETTERS]
        yield f"Document {number:,} ({stop - start:,} tokens): {text}"
