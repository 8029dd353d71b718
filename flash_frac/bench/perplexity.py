"""Held-out perplexity of a checkpoint, with its own and with 8-bit weights."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from flash_frac.bench.models import machine
from flash_frac.bench.rows import MADE_WITH
from flash_frac.data.encoding import Encoder
from flash_frac.data.prepared import PreparedData
from flash_frac.data.store import Store
from flash_frac.data.tokenizer import load_tokenizer
from flash_frac.evals.perplexity import loss_by_length, scored_tokens
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

COLUMNS = (
    *("checkpoint", "parameters", "dtype", "weights", "length", "tokens"),
    *("loss", "perplexity", "change_percent"),
    *MADE_WITH,
)


def print_perplexities(rows: Iterable[Mapping]) -> None:
    for row in rows:
        print(
            f"{row['weights']:10} loss {row['loss']:.5f}, perplexity {row['perplexity']:.4f}, "
            f"{row['change_percent']:+.4f}%",
            flush=True,
        )


def perplexity_rows(
    checkpoint: str | Path,
    store: Store,
    *,
    kinds: Sequence[str],
    length: int,
    max_tokens: int | None = None,
) -> Iterator[dict]:
    """A row for the checkpoint, and one for each kind of weights with its change in percent.

    Args:
        store: held-out tokens, from the checkpoint's tokenizer.
        kinds: "int8", "fp8" or both.
        length: window length in tokens.
        max_tokens: most tokens to score.

    Example: `[row["perplexity"] for row in perplexity_rows(folder, store, kinds=["int8"], ...)]`
    """
    device, _, dtype = machine()
    num_tokens, before = scored_tokens(store, [length], max_tokens=max_tokens), None
    for kind in (None, *kinds):
        model = load_model(checkpoint, dtype=dtype, quantize=kind).to(device).eval()
        loss = loss_by_length(model, store, [length], max_tokens=max_tokens)[length]
        before = loss if before is None else before
        yield {
            "checkpoint": Path(checkpoint).name,
            "parameters": model.num_parameters(),
            "dtype": str(dtype).removeprefix("torch."),
            "weights": kind or str(dtype).removeprefix("torch."),
            "length": length,
            "tokens": num_tokens,
            "loss": round(loss, 6),
            "perplexity": round(math.exp(loss), 4),
            "change_percent": round(100 * math.expm1(loss - before), 4),
        }
        del model
        gc.collect()
        torch.cuda.empty_cache()


def held_out_tokens(checkpoint: str, folder: Path, tokenizer: str | None = None) -> Store:
    """The held-out part of prepared data; ValueError unless it has the checkpoint's tokens.

    Args:
        tokenizer: as in `load_tokenizer`, for a checkpoint without one; None for its own.
    """
    data = PreparedData(folder)
    if data.held_out is None:
        raise ValueError(f"{folder} has no held-out documents")
    found = find_checkpoint(checkpoint)
    encoder = Encoder(find_tokenizer(found) if tokenizer is None else load_tokenizer(tokenizer))
    data.check_tokenizer(tokenizer or checkpoint, encoder.hash, encoder.beginning)
    return data.held_out
