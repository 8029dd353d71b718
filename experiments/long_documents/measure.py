"""Measurements of a trained language model: perplexity by context, recall by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.language_model import CausalModel, read_pieces, token_losses
from experiments.long_documents.corpus import Corpus, batches, windows
from experiments.long_documents.recall import draw_questions, plant, recall
from flash_frac.models.evaluating import evaluating

# Tokens read at once, over all rows: 8 GB of logits with a vocabulary of 32,000.
TOKENS_AT_ONCE = 2**16
# Seed of the questions, which are the same for all models.
QUESTION_SEED = 1_000_003


def loss_of_windows(
    model: CausalModel, rows: Tensor, *, tokens_at_once: int = TOKENS_AT_ONCE
) -> float:
    """Mean loss in nats over all tokens of rows (N, T) but the first of each."""
    total = 0.0
    for part in batches(rows, tokens_at_once):
        # Longer rows are read in pieces.
        losses = token_losses(model, part, tokens_at_once)
        total += losses.double().sum().item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def last_logits(model: CausalModel, tokens: Tensor, count: int) -> Tensor:
    """Logits (N, count, V) in float32 that predict the last `count` tokens of rows (N, T)."""
    weight = model.lm_head.weight
    with evaluating(model):
        ends: list[Tensor] = []
        for hidden, _ in read_pieces(model, tokens, tokens.shape[1]):
            # A last piece may be shorter than `count`.
            ends = [*ends[-1:], hidden[:, -count:]]
        last = torch.cat(ends, 1)[:, -count:]
        with torch.autocast(weight.device.type, enabled=False):
            return F.linear(last.float(), weight.float())


def perplexity_rows(
    model: CausalModel, corpus: Corpus, lengths: Sequence[int], *, max_tokens: int | None
) -> list[Mapping[str, object]]:
    """Loss of the same held-out tokens for each window length."""
    found = []
    for length in lengths:
        rows = windows(corpus.held_out, length, longest=max(lengths), max_tokens=max_tokens)
        loss = loss_of_windows(model, rows)
        found.append(
            {
                "measurement": "perplexity",
                "length": length,
                "loss": round(loss, 5),
                "perplexity": round(math.exp(min(loss, 50.0)), 4),
                "scored": rows.shape[0] * length,
            }
        )
    return found


def recall_rows(
    model: CausalModel, corpus: Corpus, distances: Sequence[int], *, num_questions: int
) -> list[Mapping[str, object]]:
    """Loss and accuracy of a planted value, and of the control, for each distance."""
    if not distances:
        return []
    questions = draw_questions(
        num_questions,
        num_names=len(corpus.phrases.questions),
        text_length=len(corpus.held_out),
        longest=max(distances),
        seed=QUESTION_SEED,
    )
    device, found = model.lm_head.weight.device, []
    for distance in distances:
        scores = {}
        for control in (False, True):
            rows = plant(
                corpus.held_out, corpus.phrases, questions, distance=distance, control=control
            )
            scores[control] = recall(
                lambda part, count: last_logits(model, part, count),
                torch.from_numpy(rows).to(device),
                rows_at_once=max(1, TOKENS_AT_ONCE // rows.shape[1]),
            )
        found.append(
            {
                "measurement": "recall",
                "length": distance,
                "loss": round(scores[False].loss, 5),
                "accuracy": round(scores[False].accuracy, 5),
                "exact": round(scores[False].exact, 5),
                "control_loss": round(scores[True].loss, 5),
                "control_accuracy": round(scores[True].accuracy, 5),
                "scored": questions.values.size,
            }
        )
    return found
