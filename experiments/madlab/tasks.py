"""The six tasks of MADLab: inputs and targets as pure functions of settings and a seed.

One generator np.random.default_rng(seed) draws the training and then the test sequences, in the
order of the official generators, so that the arrays equal the official ones. Targets are IGNORE
where nothing is scored. Letters: N sequences, T time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings that define a task.

    Attributes:
        kind: one of GENERATORS.
        vocab_size: ids 0 .. vocab_size - 1, special and noise ids included.
        seq_len: tokens of a sequence; the two recall tasks with pairs lose one by their shift.
        num_train, num_test: numbers of sequences.
        noise_vocab, noise: number of noise ids, and probability that a pair is noise (recall).
        num_copied: content tokens of selective copying.
        motif: most ids in a key or value of fuzzy recall.
    """

    kind: str
    vocab_size: int
    seq_len: int
    num_train: int = 12800
    num_test: int = 1280
    noise_vocab: int = 0
    noise: float = 0.0
    num_copied: int = 16
    motif: int = 3

    def __post_init__(self) -> None:
        if self.kind not in GENERATORS:
            raise ValueError(f"kind must be one of {', '.join(GENERATORS)}, got {self.kind!r}")
        for name in ("num_train", "num_test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.noise < 1 or (self.noise > 0 and self.noise_vocab < 1):
            raise ValueError(
                f"noise must be in [0, 1) and needs noise_vocab >= 1 when it is positive, "
                f"got noise {self.noise} and noise_vocab {self.noise_vocab}"
            )
        shortest = {"copying": 2 * self.num_copied + 2, "fuzzy": 4 * self.motif + 1}
        least = shortest.get(self.kind, 2)
        if self.seq_len < least:
            raise ValueError(f"seq_len must be at least {least} here, got {self.seq_len}")
        if self.kind in ("recall", "memorization") and self.seq_len % 2:
            raise ValueError(f"seq_len must be even, because tokens pair up, got {self.seq_len}")


class Data(NamedTuple):
    """int64 arrays (N, T)."""

    train_inputs: Tokens
    train_targets: Tokens
    test_inputs: Tokens
    test_targets: Tokens


class Streams(NamedTuple):
    """Random generators of one data set; `copying` uses the second."""

    rng: np.random.Generator
    blanks: np.random.RandomState
    seed: int


def generate(settings: TaskSettings, seed: int) -> Data:
    """Training and test sequences of a task.

    Example:
        >>> data = generate(TASKS["selective-copying"], seed=12345)
        >>> data.test_inputs.shape
        (1280, 256)
    """
    # The official runs seed numpy's global state; a local state gives the same numbers.
    streams = Streams(np.random.default_rng(seed), np.random.RandomState(seed), seed)
    make = GENERATORS[settings.kind]
    train = make(settings, settings.num_train, streams, training=True)
    test = make(settings, settings.num_test, streams, training=False)
    return Data(*train, *test)


def recall(
    settings: TaskSettings, num: int, streams: Streams, *, training: bool
) -> tuple[Tokens, Tokens]:
    """In-context recall: pairs of key and value, and a known key in the last pair.

    Half of the plain ids are keys, half values. A key is uniform; its value is drawn at its first
    use in the sequence and then fixed. With probability `noise` a pair is two noise ids instead,
    except for one pair of the sequence. Tests score the value of every key seen before; training
    scores every token. Targets are next tokens: T = seq_len - 1.
    """
    rng, pairs = streams.rng, settings.seq_len // 2
    plain = settings.vocab_size - settings.noise_vocab
    num_keys, num_values = plain // 2, plain - plain // 2
    tokens = np.empty((num, pairs, 2), np.int64)
    scored = np.zeros((num, pairs), bool)
    for n in range(num):
        value_of: dict[int, int] = {}
        spared = rng.integers(pairs)
        for i in range(pairs - 1):
            if settings.noise > 0 and i != spared and rng.random() < settings.noise:
                tokens[n, i] = plain + rng.integers(settings.noise_vocab, size=2)
                continue
            key = int(rng.integers(num_keys))
            scored[n, i] = key in value_of
            if key not in value_of:
                value_of[key] = num_keys + int(rng.integers(num_values))
            tokens[n, i] = key, value_of[key]
        # Keys keep the order of their first use.
        key = list(value_of)[rng.integers(len(value_of))]
        tokens[n, -1], scored[n, -1] = (key, value_of[key]), True
    targets = np.full_like(tokens, IGNORE)
    targets[..., 1][scored] = tokens[..., 1][scored]
    tokens, targets = tokens.reshape(num, -1), targets.reshape(num, -1)
    return tokens[:, :-1], (tokens if training else targets)[:, 1:]


def fuzzy(
    settings: TaskSettings, num: int, streams: Streams, *, training: bool
) -> tuple[Tokens, Tokens]:
    """Fuzzy in-context recall: keys and values are motifs, ordered tuples of distinct ids.

    Sizes are uniform from 1 to `motif`, except that keys in tests have size `motif`. A probe, key
    and value, occurs somewhere in the sequence and again at its end; tests score its value there,
    and every value whose key was seen before. Pads (the last id) fill up the left.
    """
    tokens = np.full((num, settings.seq_len + 1), settings.vocab_size - 1, np.int64)
    targets = np.full_like(tokens, IGNORE)
    plain = settings.vocab_size - 1
    sizes = range(1, settings.motif + 1)
    key_sizes = list(sizes) if training else [settings.motif]
    motifs = _Motifs(
        keys={size: _permutations(0, plain // 2, size) for size in key_sizes},
        values={size: _permutations(plain // 2, plain, size) for size in sizes},
    )
    for n in range(num):
        sequence, scores = _fuzzy_sequence(settings, motifs, streams.rng)
        tokens[n, -len(sequence) :] = sequence
        targets[n, -len(scores) :] = scores
    return tokens[:, :-1], (tokens if training else targets)[:, 1:]


Motif = tuple[int, ...]


class _Motifs(NamedTuple):
    """All motifs by their size."""

    keys: dict[int, list[Motif]]
    values: dict[int, list[Motif]]

    def shuffled(self, rng: np.random.Generator) -> _Motifs:
        """Shuffled, as the official generator does for every sequence."""
        return _Motifs(*({s: _shuffled(m, rng) for s, m in kind.items()} for kind in self))


def _permutations(low: int, high: int, size: int) -> list[Motif]:
    return list(permutations(range(low, high), size))


def _shuffled(items: list, rng: np.random.Generator) -> list:
    order = np.arange(len(items))
    rng.shuffle(order)
    return [items[i] for i in order]


def _fuzzy_sequence(
    settings: TaskSettings, motifs: _Motifs, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Tokens of one sequence without pads, and which of them a test scores."""
    motifs = motifs.shuffled(rng)
    key_sizes = list(motifs.keys)

    def sizes() -> tuple[int, int]:
        # With a single key size, no size is drawn.
        key = key_sizes[rng.integers(len(key_sizes))] if len(key_sizes) > 1 else key_sizes[0]
        return key, 1 + int(rng.integers(settings.motif))

    def one_of(items: list[Motif]) -> Motif:
        return items[rng.integers(len(items))]

    key_size, value_size = sizes()
    probe, answer = one_of(motifs.keys[key_size]), one_of(motifs.values[value_size])
    length = len(probe) + len(answer)
    due = rng.integers(settings.seq_len - 2 * length)
    placed = False
    value_of: dict[Motif, Motif] = {}
    tokens: list[int] = []
    scores: list[int] = []
    while len(tokens) < settings.seq_len - length - 2 * settings.motif:
        key_size, value_size = sizes()
        if len(tokens) >= due and not placed:
            key, value, seen, placed = probe, answer, False, True
        else:
            key = one_of(motifs.keys[key_size])
            seen = key in value_of
            if key == probe:
                value, placed = answer, True
            else:
                value = value_of[key] if seen else one_of(motifs.values[value_size])
        value_of[key] = value
        tokens += key + value
        scores += [IGNORE] * len(key) + (list(value) if seen else [IGNORE] * len(value))
    return [*tokens, *probe, *answer], [*scores, *([IGNORE] * len(probe)), *answer]


def memorization(
    settings: TaskSettings, num: int, streams: Streams, *, training: bool
) -> tuple[Tokens, Tokens]:
    """Memorization: pairs of a key and the last id, where the target is the key's value.

    The values of the keys are drawn once from the seed, the same in training and test.
    """
    asked, num_keys = settings.vocab_size - 1, (settings.vocab_size - 1) // 2
    own = np.random.default_rng(streams.seed)
    keys = np.array(_shuffled(list(range(num_keys)), own))
    values = np.array(_shuffled(list(range(num_keys, asked)), own))[:num_keys]
    tokens = np.full((num, settings.seq_len // 2, 2), asked, np.int64)
    targets = np.full_like(tokens, IGNORE)
    for n in range(num):
        # The official generator draws which pair must not be noise, though there is no noise.
        streams.rng.integers(settings.seq_len // 2)
        chosen = streams.rng.integers(num_keys, size=settings.seq_len // 2)
        tokens[n, :, 0], targets[n, :, 1] = keys[chosen], values[chosen]
    return tokens.reshape(num, -1), targets.reshape(num, -1)


def compression(
    settings: TaskSettings, num: int, streams: Streams, *, training: bool
) -> tuple[Tokens, Tokens]:
    """Compression: uniform ids, then the last id, from whose state all must be recovered."""
    last = settings.vocab_size - 1
    tokens = np.full((num, settings.seq_len), last, np.int64)
    tokens[:, :-1] = streams.rng.integers(last, size=(num, settings.seq_len - 1))
    return tokens, tokens.copy()


def copying(
    settings: TaskSettings, num: int, streams: Streams, *, training: bool
) -> tuple[Tokens, Tokens]:
    """Selective copying: content among blanks, the copy id, then blanks for the answers, in order.

    Each blank goes before a uniformly drawn content token; none goes after the last. Positions of
    blanks come from the second generator, numpy's global one in the official code.
    """
    copied = settings.num_copied
    blank, copy = settings.vocab_size - 2, settings.vocab_size - 1
    content = streams.rng.integers(blank, size=(num, copied))
    before = streams.blanks.randint(0, copied, (num, settings.seq_len - 2 * copied - 1))
    # A content token follows the earlier ones, and all blanks put before it or them.
    blanks = (before[:, :, None] == np.arange(copied)).sum(1).cumsum(1)
    tokens = np.full((num, settings.seq_len), blank, np.int64)
    np.put_along_axis(tokens, np.arange(copied) + blanks, content, 1)
    tokens[:, -copied - 1] = copy
    targets = np.full_like(tokens, IGNORE)
    targets[:, -copied:] = content
    return tokens, targets


Generator = Callable[..., tuple[Tokens, Tokens]]
GENERATORS: dict[str, Generator] = {
    "recall": recall,
    "fuzzy": fuzzy,
    "memorization": memorization,
    "compression": compression,
    "copying": copying,
}

TASKS = {
    "compression": TaskSettings(kind="compression", vocab_size=16, seq_len=32),
    "in-context-recall": TaskSettings(kind="recall", vocab_size=16, seq_len=128),
    "noisy-in-context-recall": TaskSettings(
        kind="recall", vocab_size=32, seq_len=128, noise_vocab=16, noise=0.2
    ),
    "fuzzy-in-context-recall": TaskSettings(kind="fuzzy", vocab_size=16, seq_len=128),
    "memorization": TaskSettings(kind="memorization", vocab_size=256, seq_len=32, num_train=256),
    "selective-copying": TaskSettings(kind="copying", vocab_size=16, seq_len=256),
}
"""The baseline settings of the suite, which the paper uses."""
