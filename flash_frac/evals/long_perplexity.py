"""The suite "longppl": perplexity of long documents as a function of the context length N.

Two protocols have been published, and both are reported:

    whole    A document of at least N tokens is cut to N, including the bos token if its tokenizer
             adds one; every token but the first is scored (YaRN). "ppl" is exp of the mean loss
             over all tokens, which is what YaRN's code prints, because all documents have the same
             length. "ppl_documents" is the mean of the documents' perplexities, which one bad
             document can dominate.
    ends     Windows of N tokens, without a bos token, start at about ten positions or fewer spread
             over each document; the last 100 tokens of each are scored (DeciMamba, LongMamba).

A token has N / 2 tokens of context on average in `whole`, and nearly N in `ends`. The paper reports
47.2, 28.4 and 11.3 for FRAC with 390M parameters on ProofPile, PG19 and GovReport at N = 16384, but
not how they were measured.

Frac models read in pieces and carry their state over, so their memory does not grow with N; at most
one piece of logits is in memory. Other models read a document in one forward pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.beginning import beginning
from flash_frac.evals.examples import Source, prepare_from_hub, read_records
from flash_frac.evals.perplexity import BATCH_TOKENS
from flash_frac.evals.suites import Metric, Request, Suite, Task
from flash_frac.models import FracPreTrainedModel
from flash_frac.models.evaluating import evaluating

NUM_DOCUMENTS = 50
SCORE_LAST = 100
# DeciMamba's windows: about this many per document, at least this many tokens apart.
NUM_WINDOWS = 10
MIN_STRIDE = 10
# YaRN's copies of the test sets, which hold the texts and their Llama-2 tokens.
SOURCES = {
    "proofpile": Source(dataset="emozilla/proofpile-test-tokenized", text="text"),
    "pg19": Source(dataset="emozilla/pg19-test-tokenized", text="text"),
    "govreport": Source(dataset="emozilla/govreport-test-tokenized", text="input"),
}


@dataclass(frozen=True, kw_only=True)
class LongPerplexity:
    """Perplexity at one context length.

    Args:
        ppl: exp of the mean loss of all scored tokens.
        ppl_documents: mean over documents of exp of their mean loss.
        num_documents: number of documents that were long enough.
        num_tokens: number of scored tokens.
    """

    ppl: float
    ppl_documents: float
    num_documents: int
    num_tokens: int


def long_perplexity(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    length: int,
    *,
    bos: int | None = None,
    min_tokens: int | None = None,
    score_last: int | None = None,
    piece_tokens: int | None = None,
) -> LongPerplexity:
    """Perplexity of documents in a context of `length` tokens.

    Args:
        model: any Hugging Face causal language model.
        documents: the tokens of each document.
        length: N, including the bos token.
        bos: token to put before each document, but not before windows.
        min_tokens: leave out shorter documents; N by default. Pass the largest N to measure every
            length on the same documents.
        score_last: score this many tokens at the end of windows (`ends`); by default all tokens of
            the cut documents (`whole`).
        piece_tokens: tokens per forward pass; by default 4096 for a Frac model and N for others,
            which may not be able to continue a cache by more than one token.

    Example:
        >>> long_perplexity(model, documents, 16384).ppl
        28.4
    """
    _check(length, min_tokens, score_last, piece_tokens)
    if piece_tokens is None:
        piece_tokens = BATCH_TOKENS if isinstance(model, FracPreTrainedModel) else length
    least = max(length, min_tokens or 0)
    long_enough = [document for document in documents if len(document) >= least]
    if not long_enough:
        raise ValueError(
            f"none of {len(documents)} documents has {least} tokens, the longest has "
            f"{max(map(len, documents), default=0)}: use a smaller length, or longer documents"
        )
    losses = []
    with evaluating(model):
        for document in long_enough:
            tokens = torch.tensor(document)
            if score_last is None:
                begun = tokens if bos is None else torch.cat([tokens.new_tensor([bos]), tokens])
                parts = [token_losses(model, begun[:length], piece_tokens=piece_tokens)]
            else:
                parts = [
                    token_losses(
                        model,
                        tokens[start : start + length],
                        score_last=score_last,
                        piece_tokens=piece_tokens,
                    )
                    for start in window_starts(len(document), length)
                ]
            losses.append(torch.cat(parts))
    return LongPerplexity(
        ppl=math.exp(torch.cat(losses).mean().item()),
        ppl_documents=sum(math.exp(loss.mean().item()) for loss in losses) / len(losses),
        num_documents=len(losses),
        num_tokens=sum(map(len, losses)),
    )


def window_starts(num_tokens: int, length: int) -> range:
    """The positions where windows of a document start.

    Example: `list(window_starts(1100, 1000))[:3] == [0, 10, 20]`
    """
    slack = num_tokens - length
    return range(0, max(slack, 1), max(MIN_STRIDE, slack // NUM_WINDOWS))


def token_losses(
    model: Any, tokens: Tensor, *, score_last: int | None = None, piece_tokens: int
) -> Tensor:
    """Negative log-likelihood, in nats, of each token but the first, or of the last few.

    Args:
        model: a causal language model, in evaluation mode.
        tokens: (T,).
        score_last: number of tokens to score at the end; T - 1 by default.
        piece_tokens: tokens per forward pass; below T - 1, the model must be able to continue its
            cache by any number of tokens, as Frac models can.

    Returns:
        (T - 1,) or (score_last,), float64, on the CPU.
    """
    device = next(model.parameters()).device
    inputs, targets = tokens[None, :-1].to(device), tokens[1:].to(device)
    num_inputs = len(targets)
    first = 0 if score_last is None else num_inputs - score_last
    # Models without logits_to_keep return all logits.
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    losses, cache = [], None
    for start in range(0, num_inputs, piece_tokens):
        stop = min(start + piece_tokens, num_inputs)
        kept = stop - max(start, min(first, stop))
        options: dict[str, Any] = {"logits_to_keep": max(kept, 1)} if selects else {}
        if start:
            options["past_key_values"] = cache
        # The last piece needs no cache.
        more = stop < num_inputs
        output = model(inputs[:, start:stop], use_cache=more, **options)
        cache = output.past_key_values if more else None
        if kept:
            logits = output.logits[0, -kept:].float()
            losses.append(F.cross_entropy(logits, targets[stop - kept : stop], reduction="none"))
    return torch.cat(losses).double().cpu()


def measure(request: Request) -> dict[str, Any]:
    """Both perplexities of a task's documents at the length of the request.

    To use the same documents at all lengths, take the first 50 that reach the largest of the
    suite's lengths that any document reaches.
    """
    length, task = request.unit.length, request.unit.task.name
    if length is None:
        raise ValueError("suite longppl needs lengths: set them with --lengths")
    enough = max(length, *request.suite.lengths)
    documents, names, num_long = [], [], 0
    for record in read_records(request, SOURCES.get(task)):
        tokens = request.lm.tokenizer(record["text"], add_special_tokens=False)["input_ids"]
        documents.append(tokens)
        names.append(record.get("name") or f"document {len(documents)}")
        num_long += len(tokens) >= enough
        if num_long == NUM_DOCUMENTS:
            break
    longest = max(map(len, documents))
    if longest < length:
        raise ValueError(
            f"no document of {task} has {length} tokens, the longest has {longest}: use shorter "
            "--lengths, or longer documents"
        )
    least = max(n for n in (length, *request.suite.lengths) if n <= longest)
    long_enough = [n for n, document in enumerate(documents) if len(document) >= least]
    chosen = long_enough[:NUM_DOCUMENTS]
    kept = [documents[n] for n in chosen]
    model, start = request.lm.model, beginning(request.lm.tokenizer)
    whole = long_perplexity(model, kept, length, bos=start[-1] if start else None)
    ends = long_perplexity(model, kept, length, score_last=min(SCORE_LAST, length - 1))
    return {
        "ppl": whole.ppl,
        "ppl_documents": whole.ppl_documents,
        "ppl_last": ends.ppl,
        "num_examples": whole.num_documents,
        "num_left_out": len(documents) - whole.num_documents,
        "left_out": [
            f"{names[n]} ({len(document):,} tokens, fewer than {least:,})"
            if n not in long_enough
            else f"{names[n]} (after the first {NUM_DOCUMENTS})"
            for n, document in enumerate(documents)
            if n not in chosen
        ],
        "min_tokens": least,
        "num_tokens": whole.num_tokens,
        "num_tokens_last": ends.num_tokens,
        "tokens_read": (length - 1)
        * sum(1 + len(window_starts(len(document), length)) for document in kept),
    }


def prepare(data_dir: Path) -> list[Path]:
    """Download missing `data_dir/longppl/<name>.jsonl` from the hub; return the new files."""
    return prepare_from_hub(data_dir / "longppl", SOURCES)


def _check(
    length: int, min_tokens: int | None, score_last: int | None, piece_tokens: int | None
) -> None:
    if length < 2:
        raise ValueError(
            f"length must be at least 2 (one token of context, one to score), got {length}"
        )
    if min_tokens is not None and min_tokens < length:
        raise ValueError(f"min_tokens must be at least length = {length}, got {min_tokens}")
    if score_last is not None and not 1 <= score_last < length:
        raise ValueError(
            f"score_last must be from 1 to length - 1 = {length - 1}, got {score_last}"
        )
    if piece_tokens is not None and piece_tokens < 1:
        raise ValueError(f"piece_tokens must be at least 1, got {piece_tokens}")


def _metric(key: str, column: str, unit: str) -> Metric:
    return Metric(
        key=key, column=column, unit=unit, scale=1.0, higher_is_better=False, averaged=False
    )


def _task(name: str, column: str | None = None) -> Task:
    column = column or name
    metrics = (_metric("ppl", column, "ppl"), _metric("ppl_last", column, "last 100"))
    return Task(name=name, metrics=metrics)


_COLUMNS = {"proofpile": "ProofPile", "pg19": "PG19", "govreport": "GovReport"}

SUITE = Suite(
    name="longppl",
    title="Long-document perplexity",
    tasks=tuple(_task(name, column) for name, column in _COLUMNS.items()),
    # Nothing is added to the length, which includes the bos token.
    max_length=0,
    lengths=(2048, 4096, 8192, 16384),
    measure=measure,
    prepare=prepare,
    reads_files=True,
    own=_task,
)
