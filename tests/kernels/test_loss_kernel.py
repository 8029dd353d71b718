"""The loss with its kernel against plain torch in float64, with both gradients."""

from functools import partial

import pytest
import torch

from flash_frac.ops.loss.api import linear_cross_entropy
from flash_frac.ops.loss.kernels import cross_entropy_
from tests.errors import assert_all_as_good, widen, with_gradients
from tests.kernels.devices import DEVICE, DTYPES

# Vocabularies of less than a block, one, and a rest after one.
SHAPES = [(1, 8, 5), (33, 16, 64), (5, 8, 4097)]
SHAPES += [] if DEVICE == "cpu" else [(5000, 512, 32000), (300, 64, 50280)]


def draw(num_tokens, width, vocabulary, dtype=torch.float32):
    hidden, weight = torch.randn(num_tokens, width), torch.randn(vocabulary, width)
    labels = torch.randint(vocabulary, (num_tokens,)).to(DEVICE)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels


def loss_of(labels, backend, **options):
    return partial(linear_cross_entropy, labels=labels, backend=backend, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error(shape, dtype):
    *tensors, labels = draw(*shape, dtype=dtype)
    labels[:: max(2, shape[0] // 3)] = -100 if shape[0] > 1 else int(labels[0])
    options = {"labels": labels, "chunk_tokens": 13 if DEVICE == "cpu" else None}
    got = with_gradients(loss_of(backend="triton", **options), tensors)
    usual = with_gradients(loss_of(backend="torch", **options), tensors)
    exact = with_gradients(loss_of(backend="torch", **options), widen(tensors))
    assert_all_as_good(got, usual, exact)


@pytest.mark.parametrize("gradient", [False, True])
def test_logits_are_replaced_by_their_gradient(gradient):
    logits, labels = torch.randn(4, 10).to(DEVICE), torch.tensor([3, 0, -100, 9]).to(DEVICE)
    wanted = logits.double().softmax(-1)
    wanted[[0, 1, 3], [3, 0, 9]] -= 1
    wanted[2] = 0
    mine = logits.clone()
    losses = cross_entropy_(mine, labels, -100, gradient)
    found = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(losses.double(), found, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.double(), wanted if gradient else logits.double())


def test_sure_and_impossible_tokens():
    """-inf is a logit like any other, and a sure token keeps its small loss."""
    logits = torch.tensor([[0.0, -torch.inf, 30.0], [-torch.inf, -torch.inf, 5.0]]).to(DEVICE)
    exact = torch.nn.functional.cross_entropy(
        logits.double(), torch.tensor([2, 2], device=DEVICE), reduction="none"
    )
    losses = cross_entropy_(logits, torch.tensor([2, 2], device=DEVICE), -100, True)
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=1e-6)
    assert torch.isfinite(logits).all() and logits[1].eq(0).all()


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_outside_the_vocabulary_is_not_a_number(label):
    logits, labels = torch.randn(2, 10).to(DEVICE), torch.tensor([label, 3]).to(DEVICE)
    losses = cross_entropy_(logits, labels, -100, True)
    assert losses[0].isnan() and losses[1].isfinite()
    assert logits[0].isnan().all() and logits[1].isfinite().all()


def test_ignored_tokens_may_be_anything():
    hidden, weight, labels = draw(4, 8, 10)
    hidden[1], labels[1] = torch.nan, -100
    loss, dhidden, dweight = with_gradients(loss_of(labels, "triton"), [hidden, weight])
    assert all(x.isfinite().all() for x in (loss, dweight, dhidden[[0, 2, 3]]))
