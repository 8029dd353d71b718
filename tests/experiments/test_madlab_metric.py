"""Macro and micro accuracy against their slow definition, and against known answers."""

import numpy as np
import pytest
import torch

from experiments.madlab.metric import Accuracy, confusion
from experiments.madlab.tasks import IGNORE, TASKS, generate


def slow_macro(predicted, target, num_classes):
    recalls = []
    for v in range(num_classes):
        of_class = [p for p, t in zip(predicted, target, strict=True) if t == v]
        guessed = any(p == v and t != IGNORE for p, t in zip(predicted, target, strict=True))
        if of_class:
            recalls.append(sum(p == v for p in of_class) / len(of_class))
        elif guessed:
            recalls.append(0.0)
    return sum(recalls) / len(recalls) if recalls else 0.0


def slow_micro(predicted, target):
    right = [p == t for p, t in zip(predicted, target, strict=True) if t != IGNORE]
    return sum(right) / len(right) if right else 0.0


def some_batches(num_classes, seed):
    generator = torch.Generator().manual_seed(seed)
    for size in (8, 8, 3):
        target = torch.randint(num_classes // 2, num_classes, (size, 5), generator=generator)
        guess = torch.randint(num_classes, (size, 5), generator=generator)
        right = torch.rand(size, 5, generator=generator) < 0.6
        ignored = torch.rand(size, 5, generator=generator) < 0.4
        yield torch.where(right, target, guess), target.masked_fill(ignored, IGNORE)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_classes", [2, 7, 40])
def test_against_the_definition(num_classes, seed):
    accuracy, everything, means = Accuracy(num_classes), [], []
    for predicted, target in some_batches(num_classes, seed):
        accuracy.update(predicted, target)
        pair = predicted.flatten().tolist(), target.flatten().tolist()
        everything.append(pair)
        means.append((len(target), slow_macro(*pair, num_classes)))
    predicted, target = (
        [x for part in parts for x in part] for parts in zip(*everything, strict=True)
    )
    assert accuracy.macro() == pytest.approx(slow_macro(predicted, target, num_classes), rel=1e-6)
    assert accuracy.micro() == pytest.approx(slow_micro(predicted, target), rel=1e-6)
    weighted = sum(size * mean for size, mean in means) / sum(size for size, _ in means)
    assert accuracy.batch_mean() == pytest.approx(weighted, rel=1e-6)


def test_a_class_guessed_but_never_asked_for_counts_as_zero():
    accuracy = Accuracy(4)
    accuracy.update(torch.tensor([[0, 0, 0, 3]]), torch.tensor([[0, 0, 0, 0]]))
    assert accuracy.macro() == pytest.approx(0.75 / 2)
    assert accuracy.micro() == pytest.approx(0.75)


def test_guesses_at_ignored_tokens_count_nowhere():
    accuracy = Accuracy(4)
    accuracy.update(torch.tensor([[0, 3, 2]]), torch.tensor([[0, IGNORE, IGNORE]]))
    assert accuracy.macro() == accuracy.micro() == accuracy.batch_mean() == 1.0
    assert accuracy.counts.sum() == 1


def test_batches_do_not_add_up_to_the_whole():
    """The official mean over batches hides a class that only one batch has."""
    accuracy = Accuracy(2)
    accuracy.update(torch.tensor([[0, 0]]), torch.tensor([[0, 0]]))
    accuracy.update(torch.tensor([[0, 0]]), torch.tensor([[0, 1]]))
    assert accuracy.batch_mean() == pytest.approx((1 + 0.5) / 2)
    assert accuracy.macro() == pytest.approx((1 + 0) / 2)


@pytest.fixture(scope="module")
def fuzzy_targets():
    return torch.from_numpy(generate(TASKS["fuzzy-in-context-recall"], 12345).test_targets)


@pytest.mark.parametrize(
    ("low", "high", "macro", "micro"),
    [(7, 15, 12.2, 12.2), (0, 15, 3.6, 6.7)],
    ids=["uniform over the values", "uniform over all plain ids"],
)
def test_guessing_in_fuzzy_recall(fuzzy_targets, low, high, macro, micro):
    accuracy = Accuracy(16)
    rng = np.random.default_rng(0)
    for batch in fuzzy_targets.split(128):
        accuracy.update(torch.from_numpy(rng.integers(low, high, tuple(batch.shape))), batch)
    assert 100 * accuracy.macro() == pytest.approx(macro, abs=0.8)
    assert 100 * accuracy.micro() == pytest.approx(micro, abs=0.8)


def test_few_wrong_tokens_can_halve_macro_accuracy(fuzzy_targets):
    """2% of errors, on ids that are never asked for: macro accuracy 52%."""
    rng = np.random.default_rng(0)
    wrong = torch.from_numpy(rng.random(tuple(fuzzy_targets.shape)) < 0.02)
    keys = torch.from_numpy(rng.integers(0, 7, tuple(fuzzy_targets.shape)))
    accuracy = Accuracy(16)
    accuracy.update(torch.where(wrong, keys, fuzzy_targets), fuzzy_targets)
    assert 100 * accuracy.macro() == pytest.approx(52, abs=0.5)
    assert 100 * accuracy.micro() == pytest.approx(98, abs=0.5)


def test_confusion_is_by_target_then_prediction():
    counts = confusion(torch.tensor([1, 1, 0]), torch.tensor([0, 0, IGNORE]), 2)
    assert counts.tolist() == [[0, 2], [0, 0]]


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="num_classes must be at least 1"):
        Accuracy(0)
    accuracy = Accuracy(4)
    for measure in (accuracy.macro, accuracy.micro, accuracy.batch_mean):
        with pytest.raises(ValueError, match="call update first"):
            measure()
    with pytest.raises(ValueError, match="take the argmax of logits first"):
        accuracy.update(torch.zeros(2, 3, 4), torch.zeros(2, 3))
