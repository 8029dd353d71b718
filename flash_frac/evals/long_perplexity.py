"""The suite "longppl": perplexity of long documents, as a function of the context length N.

Two ways of measuring have been published, and both are reported:

    whole    a document of at least N tokens, cut to N with the bos token that its tokenizer puts
             before it, if it does; every token but the first is scored (YaRN). "ppl" is exp of the
             mean loss of all tokens, which, all documents being of one length, is what YaRN's code
             prints; "ppl_documents" is the mean of the documents' own perplexities, which one bad
             document can rule.
    ends     windows of N tokens, without a beginning token, at up to about ten places spread over
             each document; of each window the last 100 tokens are scored (DeciMamba, LongMamba).

In `whole` a token has N / 2 tokens before it on the average, in `ends` nearly N. The paper gives
47.2, 28.4 and 11.3 for FRAC of 390M parameters on ProofPile, PG19 and GovReport at N = 16384, and
not how they were measured.

Frac models read in pieces and hand their memory on, so what they need does not grow with N; logits
of one piece at most are there at a time. Other models read a document in one forward pass.
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
# DeciMamba's windows: about so many in a document, and no closer than so many tokens.
NUM_WINDOWS = 10
MIN_STRIDE = 10
# YaRN's copies of the test sets, which hold the texts beside Llama-2's tokens of them.
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
        num_documents: how many were long enough.
        num_tokens: how many were scored.
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
        model: any causal language model of Hugging Face.
        documents: their tokens.
        length: N, the beginning token included.
        bos: token put before each document; not before windows.
        min_tokens: shorter documents are left out, N by default. Give the largest N to measure
            every length on the same documents.
        score_last: score the last so many tokens of windows (`ends`); else all tokens of the cut
            documents (`whole`).
        piece_tokens: tokens in one forward pass; 4096 for a Frac model and N for others, which
            need not be able to continue from a cache by more than one token.

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
    """Where windows of a document begin.

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
        score_last: how many; T - 1 by default.
        piece_tokens: tokens in one forward pass; with fewer than T - 1, the model must be able to
            continue from its cache by any number of tokens, as Frac models are.

    Returns:
        (T - 1,) or (score_last,), float64, on the CPU.
    """
    device = next(model.parameters()).device
    inputs, targets = tokens[None, :-1].to(device), tokens[1:].to(device)
    num_inputs = len(targets)
    first = 0 if score_last is None else num_inputs - score_last
    # Models that cannot leave logits out give them all.
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    losses, cache = [], None
    for start in range(0, num_inputs, piece_tokens):
        stop = min(start + piece_tokens, num_inputs)
        kept = stop - max(start, min(first, stop))
        options: dict[str, Any] = {"logits_to_keep": max(kept, 1)} if selects else {}
        if start:
            options["past_key_values"] = cache
        # Only a piece that another one follows has a memory to hand on.
        more = stop < num_inputs
        output = model(inputs[:, start:stop], use_cache=more, **options)
        cache = output.past_key_values if more else None
        if kept:
            logits = output.logits[0, -kept:].float()
            losses.append(F.cross_entropy(logits, targets[stop - kept : stop], reduction="none"))
    return torch.cat(losses).double().cpu()


def measure(request: Request) -> dict[str, Any]:
    """Both measures of a task's documents at the length of the request.

    For numbers of different lengths to be of the same documents, these are the first 50 that have
    as many tokens as the largest of the suite's lengths that any of them has.
    """
    length, task = request.unit.length, request.unit.task.name
    if length is None:
        raise ValueError("suite longppl is measured at lengths: give some by --lengths")
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
            f"no document of {task} has {length} tokens, the longest has {longest}: give shorter "
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
    """Write `data_dir/longppl/<name>.jsonl` from the hub where missing; the new files."""
    return prepare_from_hub(data_dir / "longppl", SOURCES)


def _check(
    length: int, min_tokens: int | None, score_last: int | None, piece_tokens: int | None
) -> None:
    if length < 2:
        raise ValueError(
            f"length must be at least 2, a token to see and one to score, got {length}"
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
    # The length is all there is: the beginning token counts.
    max_length=0,
    lengths=(2048, 4096, 8192, 16384),
    measure=measure,
    prepare=prepare,
    reads_files=True,
    own=_task,
)
