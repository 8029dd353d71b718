"""`Generator`: token for token what `model.generate` gives, whatever the batch and its padding."""

import pytest
import torch

import flash_frac.generation
from flash_frac.generation import Generator
from tests.models.conftest import make_model

LENGTH = 40


@pytest.fixture
def model():
    return make_model().eval()


@pytest.fixture
def ids():
    return torch.randint(3, 61, (3, 40), generator=torch.Generator().manual_seed(0))


def hugging_face(model, ids, **options):
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": LENGTH} | options
    return model.generate(ids, **options)


@torch.no_grad()
def test_prefill(model, ids):
    logits = Generator(model).prefill(ids)
    torch.testing.assert_close(logits, model(ids).logits[:, -1])


def test_greedy(model, ids):
    """Twice, because what a length does the second time may come from a graph."""
    generator = Generator(model)
    for batch in (ids, ids, ids[:1], ids[:, :7], ids):
        got = generator.generate(batch, max_new_tokens=LENGTH)
        assert torch.equal(got, hugging_face(model, batch))


def test_left_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    padded = ids.masked_fill(mask == 0, 0)
    got = Generator(model).generate(padded, attention_mask=mask, max_new_tokens=LENGTH)
    assert torch.equal(got, hugging_face(model, padded, attention_mask=mask))


def test_pieces(model, ids, monkeypatch):
    expected = Generator(model).generate(ids, max_new_tokens=LENGTH)
    monkeypatch.setattr(flash_frac.generation, "PIECE", 7)
    assert torch.equal(Generator(model).generate(ids, max_new_tokens=LENGTH), expected)


@pytest.mark.parametrize("look_every", [1, 7, 100])
def test_ending(model, ids, monkeypatch, look_every):
    """Sequences end one by one, are filled up, and nothing follows the last end."""
    monkeypatch.setattr(flash_frac.generation, "LOOK_EVERY", look_every)
    free = hugging_face(model, ids)[:, ids.shape[1] :]
    generator = Generator(model)
    for eos in {int(free[0, 3]), int(free[1, 9]), int(free[2, 0])}:
        options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": LENGTH}
        assert torch.equal(generator.generate(ids, **options), hugging_face(model, ids, **options))


def test_errors(model, ids):
    with pytest.raises(ValueError, match=r"model must be in eval mode; call model.eval\(\)"):
        Generator(model.train())
    generator = Generator(model.eval())
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, T\) and a token"):
        generator.prefill(ids[0])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(3, 40\)"):
        generator.prefill(ids, ids[:, 1:])
    with pytest.raises(ValueError, match=r"pad on the left"):
        generator.prefill(ids, torch.ones_like(ids).index_fill(1, torch.tensor([39]), 0))
    with pytest.raises(ValueError, match=r"max_new_tokens must be at least 1, got 0"):
        generator.generate(ids, max_new_tokens=0)
