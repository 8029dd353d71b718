"""Recall of a fact that was planted in a text a known number of tokens earlier.

    ... The access code of Corwick is 48213. ... text ... The access code of Corwick is 48213

The row ends with the value, whose tokens are scored. Name, value and the text around the question
are the same at all distances, so rows differ only in the distance. In the control the sentence
states the value of another row: a model's score there comes from the wording of the question and
from digit statistics, not from memory.

Letters: N rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

NUM_DIGITS = 5
"""Digits of a value, one token each."""
LEAD = 64
"""Tokens of a row before the stated value: the sentence, preceded by text."""
NAMES = tuple(
    first + last
    for first, last in product(
        ("Bal", "Cor", "Den", "Fal", "Gar", "Hel", "Mor", "Nar", "Tor", "Vel"),
        ("dan", "mere", "nix", "ost", "rick", "son", "tham", "ven", "wick", "zar"),
    )
)

# The logits (N, count, V) that predict the last `count` tokens of rows (N, T).
Answers = Callable[[Tensor, int], Tensor]


class Phrases(NamedTuple):
    """The sentence in token ids.

    Fields:
        questions: for each name, the sentence up to its value.
        ending: what follows the value.
        digits: ids of the digits 0 to 9.
    """

    questions: Sequence[Sequence[int]]
    ending: Sequence[int]
    digits: Sequence[int]


class Questions(NamedTuple):
    """N questions: indices of their names (N,), values (N, NUM_DIGITS) in 0 to 9, and the text
    positions where their rows end (N,)."""

    names: NDArray[np.int64]
    values: NDArray[np.int64]
    ends: NDArray[np.int64]


class Recall(NamedTuple):
    """Mean loss of the digits in nats, and accuracy of digits and of whole values.

    A digit is right if it is the most likely token of the vocabulary, given the digits before it.
    """

    loss: float
    accuracy: float
    exact: float


def find_phrases(encode: Callable[[str], Sequence[int]], names: Sequence[str] = NAMES) -> Phrases:
    """The sentence, tokenised by `encode`, which must map each digit to its own token."""

    def sentence(name: str, digit: int) -> list[int]:
        return list(encode(f"\n\nThe access code of {name} is {str(digit) * NUM_DIGITS}.\n\n"))

    questions, digits, ending = [], [], []
    for name in names:
        zeros, ones = sentence(name, 0), sentence(name, 1)
        differ = [i for i, pair in enumerate(zip(zeros, ones, strict=False)) if len({*pair}) == 2]
        start = differ[0] if differ else 0
        if len(zeros) != len(ones) or differ != list(range(start, start + NUM_DIGITS)):
            raise ValueError(
                "encode must map each digit to its own token, as the tokenizers of Llama, "
                f"Mistral v1 or bytes do; got {zeros} and {ones} for zeros and ones"
            )
        questions.append(zeros[:start])
        ending = zeros[start + NUM_DIGITS :]
        digits = [sentence(name, digit)[start] for digit in range(10)]
    return Phrases(questions, ending, digits)


def draw_questions(
    num: int, *, num_names: int, text_length: int, longest: int, seed: int
) -> Questions:
    """Questions whose rows fit into the text at every distance up to `longest`."""
    needed = row_length(longest)
    if text_length < needed:
        raise ValueError(
            f"text_length must be at least {needed} for a distance of {longest}, got "
            f"{text_length}; use shorter distances or more text"
        )
    if num < 2:
        raise ValueError(f"num must be at least 2, because the control swaps values, got {num}")
    rng = np.random.default_rng(seed)
    return Questions(
        rng.integers(num_names, size=num),
        rng.integers(10, size=(num, NUM_DIGITS)),
        rng.integers(needed, text_length + 1, size=num),
    )


def row_length(distance: int) -> int:
    """T, tokens of a row."""
    return LEAD + distance + NUM_DIGITS


def plant(
    text: NDArray[np.integer],
    phrases: Phrases,
    questions: Questions,
    *,
    distance: int,
    control: bool = False,
) -> NDArray[np.int64]:
    """Rows (N, T) of the text, with the fact `distance` tokens before the answer.

    Args:
        text: (S,) token ids.
        distance: from the first stated digit to the first digit of the answer.
        control: whether each sentence states the value of the next row instead of its own.
    """
    length = row_length(distance)
    digits, ending = np.asarray(phrases.digits), np.asarray(phrases.ending)
    answers = digits[questions.values]
    stated = np.roll(answers, -1, axis=0) if control else answers
    rows = np.stack([text[end - length : end] for end in questions.ends]).astype(np.int64)
    for row, name, value, answer in zip(rows, questions.names, stated, answers, strict=True):
        question = np.asarray(phrases.questions[name])
        fact = np.concatenate([question, value, ending])
        if len(question) > LEAD or distance < len(fact):
            raise ValueError(
                f"distance must be at least {len(fact)}, the tokens of the sentence, and its "
                f"words at most {LEAD} tokens; got a distance of {distance} and "
                f"{len(question)} tokens"
            )
        row[LEAD - len(question) :][: len(fact)] = fact
        row[length - NUM_DIGITS - len(question) :] = np.concatenate([question, answer])
    return rows


@torch.no_grad()
def recall(answers: Answers, rows: Tensor, *, rows_at_once: int) -> Recall:
    """How well the last NUM_DIGITS tokens of rows (N, T) are predicted from those before."""
    losses, right = [], []
    for part in rows.split(rows_at_once):
        logits, values = answers(part, NUM_DIGITS).float(), part[:, -NUM_DIGITS:]
        losses.append(F.cross_entropy(logits.flatten(0, 1), values.flatten(), reduction="none"))
        right.append(logits.argmax(-1) == values)
    all_right = torch.cat(right)
    return Recall(
        torch.cat(losses).mean().item(),
        all_right.float().mean().item(),
        all_right.all(-1).float().mean().item(),
    )
