"""`Generator`: token for token what `model.generate` gives, whatever the batch and its padding."""

import pytest
import torch

import flash_frac.inference.generator
from flash_frac.inference import Generator, StopStrings
from flash_frac.inference.sampling import SamplingSettings, choose
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
    monkeypatch.setattr(flash_frac.inference.generator, "PIECE", 7)
    assert torch.equal(Generator(model).generate(ids, max_new_tokens=LENGTH), expected)


@pytest.mark.parametrize("look_every", [1, 7, 100])
def test_ending(model, ids, monkeypatch, look_every):
    """Sequences end one by one, are filled up, and nothing follows the last end."""
    monkeypatch.setattr(flash_frac.inference.generator, "LOOK_EVERY", look_every)
    free = hugging_face(model, ids)[:, ids.shape[1] :]
    generator = Generator(model)
    for eos in {int(free[0, 3]), int(free[1, 9]), int(free[2, 0])}:
        options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": LENGTH}
        assert torch.equal(generator.generate(ids, **options), hugging_face(model, ids, **options))


def test_repetition_penalty(model, ids):
    sampling = SamplingSettings(repetition_penalty=1.5)
    got = Generator(model).generate(ids, max_new_tokens=LENGTH, sampling=sampling)
    assert torch.equal(got, hugging_face(model, ids, repetition_penalty=1.5))
    assert not torch.equal(got, hugging_face(model, ids))


def test_padding_is_not_seen(model, ids):
    """A prompt gives the same alone and padded, whatever token the padding is."""
    sampling = SamplingSettings(repetition_penalty=2.0)
    generator = Generator(model)
    alone = generator.generate(ids[:1, 20:], max_new_tokens=LENGTH, sampling=sampling)
    mask = torch.ones_like(ids[:1])
    mask[:, :20] = 0
    for filler in alone[0, -5:].tolist():
        padded = ids[:1].masked_fill(mask == 0, filler)
        options = {"attention_mask": mask, "max_new_tokens": LENGTH, "sampling": sampling}
        assert torch.equal(generator.generate(padded, **options)[:, 20:], alone)


@torch.no_grad()
def test_sampling(model, ids):
    """Token by token what a plain loop draws with the same numbers."""
    sampling = SamplingSettings(temperature=1.2, top_k=30, top_p=0.95, repetition_penalty=1.2)
    generator = Generator(model)
    got = generator.generate(ids, max_new_tokens=LENGTH, sampling=sampling, seed=7)
    random, expected = torch.Generator().manual_seed(7), ids
    seen = torch.zeros(3, model.config.vocab_size, dtype=torch.bool)
    for _ in range(LENGTH):
        seen.scatter_(1, expected, True)
        token = choose(model(expected).logits[:, -1], sampling, seen=seen, generator=random)
        expected = torch.cat([expected, token[:, None]], 1)
    assert torch.equal(got, expected)
    options = {"max_new_tokens": LENGTH, "sampling": sampling}
    assert torch.equal(generator.generate(ids, seed=7, **options), got)
    assert not torch.equal(generator.generate(ids, seed=8, **options), got)
    assert not torch.equal(generator.generate(ids, **options), generator.generate(ids, **options))


def test_streaming(model, ids):
    generator = Generator(model)
    whole = generator.generate(ids, max_new_tokens=LENGTH)[:, ids.shape[1] :]
    assert torch.equal(torch.stack([*generator.stream(ids, max_new_tokens=LENGTH)], 1), whole)
    eos = int(whole[0, 3])
    options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": LENGTH}
    expected = generator.generate(ids, **options)[:, ids.shape[1] :]
    assert torch.equal(torch.stack([*generator.stream(ids, **options)], 1), expected)
    uses = (
        lambda: generator.prefill(ids),
        lambda: generator.generate(ids, max_new_tokens=2),
        lambda: generator.generate(ids[:1], max_new_tokens=2),
    )
    for use in uses:
        running = generator.stream(ids, max_new_tokens=LENGTH)
        next(running)
        use()
        with pytest.raises(RuntimeError, match="used again while this stream was running"):
            next(running)


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(chr(32 + i) for i in ids)


def test_stop_strings(model, ids):
    generator = Generator(model)
    free = generator.generate(ids, max_new_tokens=LENGTH)[:, ids.shape[1] :]
    texts = [Letters().decode(row) for row in free.tolist()]
    words = [texts[0][4:7], texts[1][10:12]]
    stop = StopStrings(Letters(), words)
    got = generator.generate(ids, max_new_tokens=LENGTH, stop=stop, pad_token_id=0)
    new = got[:, ids.shape[1] :]
    ends = [
        min([text.find(w) + len(w) for w in words if w in text], default=LENGTH) for text in texts
    ]
    assert min(ends) < LENGTH and new.shape[1] == max(ends)
    for row, expected, end in zip(new, free, ends, strict=True):
        assert torch.equal(row[:end], expected[:end]) and not row[end:].any()
    with pytest.raises(ValueError, match="texts must be a list of texts"):
        StopStrings(Letters(), "abc")


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
