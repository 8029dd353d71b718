"""`Generator` equals `model.generate` token for token, whatever the batch and its padding."""

import numpy as np
import pytest
import torch

import flash_frac.inference.generator
from flash_frac.inference import Engine, Generator, Request, SamplingSettings, StopStrings
from flash_frac.inference.sampling import SlotSettings, choose_each, seeds_of_rows
from tests.models.conftest import make_model
from tests.models.hybrids import close, make_hybrid

LENGTH = 20


both = pytest.mark.parametrize("model", [make_model, make_hybrid], indirect=True)


@pytest.fixture
def model(request):
    return getattr(request, "param", make_model)()


def hugging_face(model, ids, **options):
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": LENGTH} | options
    return model.generate(ids, **options)


@both
@torch.no_grad()
def test_prefill(model, ids):
    logits = Generator(model).prefill(ids)
    close(logits, model(ids).logits[:, -1])


@both
def test_greedy(model, ids):
    """Twice, because what a length does the second time may come from a graph."""
    generator = Generator(model)
    for batch in (ids, ids, ids[:1], ids[:, :7], ids):
        got = generator.generate(batch, max_new_tokens=LENGTH)
        assert torch.equal(got, hugging_face(model, batch))


@both
def test_left_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    padded = ids.masked_fill(mask == 0, 0)
    got = Generator(model).generate(padded, attention_mask=mask, max_new_tokens=LENGTH)
    assert torch.equal(got, hugging_face(model, padded, attention_mask=mask))


@both
def test_pieces(model, ids, monkeypatch):
    expected = Generator(model).generate(ids, max_new_tokens=LENGTH)
    monkeypatch.setattr(flash_frac.inference.generator, "PIECE", 7)
    assert torch.equal(Generator(model).generate(ids, max_new_tokens=LENGTH), expected)


late = pytest.mark.parametrize("late", [False, True])


@late
def test_ending(model, ids, late):
    """Sequences end one by one, are filled up, and nothing follows the last end."""
    free = hugging_face(model, ids)[:, ids.shape[1] :]
    generator = Generator(model, late=late)
    for eos in {int(free[0, 3]), int(free[1, 9]), int(free[2, 0])}:
        options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": LENGTH}
        assert torch.equal(generator.generate(ids, **options), hugging_face(model, ids, **options))
    options["eos_token_id"] = [int(free[0, 3]), int(free[1, 9])]
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


@late
@torch.no_grad()
def test_sampling(model, ids, late):
    """Token by token what a plain loop draws with the seeds of the rows."""
    sampling = SamplingSettings(temperature=1.2, top_k=30, top_p=0.95, repetition_penalty=1.2)
    generator = Generator(model, late=late)
    got = generator.generate(ids, max_new_tokens=LENGTH, sampling=sampling, seed=7)
    settings, expected = SlotSettings.empty(3), ids
    settings.set_rows(range(3), [sampling] * 3, seeds_of_rows(7, 3))
    seen = torch.zeros(3, model.config.vocab_size, dtype=torch.bool).scatter(1, ids, True)
    for _ in range(LENGTH):
        token, _ = choose_each(model(expected).logits[:, -1], settings, seen=seen)
        expected = torch.cat([expected, token[:, None]], 1)
    assert torch.equal(got, expected)
    options = {"max_new_tokens": LENGTH, "sampling": sampling}
    assert torch.equal(generator.generate(ids, seed=7, **options), got)
    assert not torch.equal(generator.generate(ids, seed=8, **options), got)
    assert not torch.equal(generator.generate(ids, **options), generator.generate(ids, **options))


def test_draws_are_those_of_the_engine(model, ids):
    """Of the first sequence, whatever is beside it; the others have draws of their own."""
    sampling = SamplingSettings(temperature=1.0)
    options = {"max_new_tokens": LENGTH, "sampling": sampling, "seed": 3}
    same = ids[:1].expand(3, -1)
    new = Generator(model).generate(same, **options)[:, ids.shape[1] :].tolist()
    alone = Generator(model).generate(ids[:1], **options)[0, ids.shape[1] :].tolist()
    updates = Engine(model, slots=2).stream(Request(prompt=ids[0], **options))
    assert new[0] == alone == [token for update in updates for token in update.tokens]
    assert new[0] != new[1] != new[2] != new[0]


def test_seeds_of_rows():
    """Of neighbouring seeds no row is the same."""
    seeds = [seed for first in range(-50, 50) for seed in seeds_of_rows(first, 20)]
    assert len(set(seeds)) == 2000 and seeds_of_rows(5, 20)[:3] == seeds_of_rows(5, 3)
    assert seeds_of_rows(None, 3) != seeds_of_rows(None, 3)


@both
@late
def test_streaming(model, ids, late):
    generator = Generator(model, late=late)
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


@late
@pytest.mark.parametrize("number", [1, 2, 5])
def test_no_step_is_computed_in_vain(model, ids, late, number):
    """The last token is chosen and not read; late, one more step than the end needs is computed."""
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(None))
    new = Generator(model, late=late).generate(ids[:1], max_new_tokens=number)[0, ids.shape[1] :]
    assert len(calls) == number
    del calls[:]
    options = {"eos_token_id": int(new[-1]), "max_new_tokens": LENGTH}
    made = Generator(model, late=late).generate(ids[:1], **options)
    assert len(calls) == made.shape[1] - ids.shape[1] + late


@both
def test_logits_that_are_no_numbers(model, ids):
    """An error, after which the generator goes on."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = Generator(model)
    expected = generator.generate(ids, max_new_tokens=5)
    unused = next(n for n in range(3, 61) if n not in expected)
    with torch.no_grad():
        model.model.embed_tokens.weight[unused] = torch.nan
    bad = ids.clone()
    bad[1, 9] = unused
    with pytest.raises(RuntimeError, match="logits of sequence 1 are not finite"):
        generator.generate(bad, max_new_tokens=5)
    assert torch.equal(generator.generate(ids, max_new_tokens=5), expected)


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
    with pytest.raises(ValueError, match="texts must be a list of non-empty texts"):
        StopStrings(Letters(), "abc")


def test_errors(model, ids):
    with pytest.raises(ValueError, match=r"model must be in eval mode; call model.eval\(\)"):
        Generator(model.train())
    generator = Generator(model.eval())
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, T\) with T ≥ 1"):
        generator.prefill(ids[0])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(3, 40\)"):
        generator.prefill(ids, ids[:, 1:])
    with pytest.raises(ValueError, match=r"attention_mask must be 1 at tokens and 0 at padding"):
        generator.prefill(ids, -torch.ones(ids.shape))
    with pytest.raises(ValueError, match=r"pad on the left"):
        generator.prefill(ids, torch.ones_like(ids).index_fill(1, torch.tensor([39]), 0))
    with pytest.raises(ValueError, match=r"max_new_tokens must be at least 1, got 0"):
        generator.generate(ids, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"eos_token_id must be a token id, a list .* got \['a'\]"):
        generator.generate(ids, max_new_tokens=2, eos_token_id=["a"])
    with pytest.raises(ValueError, match=r"stop must be StopStrings\(tokenizer, texts\), got"):
        generator.generate(ids, max_new_tokens=2, stop=["a"])


def test_ends_of_other_libraries(model, ids):
    """They end sequences as whole numbers of Python do; an empty list ends none."""
    generator, options = Generator(model.eval()), {"max_new_tokens": 12, "pad_token_id": 0}
    free = generator.generate(ids, **options)
    end = int(free[0, ids.shape[1] + 3])
    expected = generator.generate(ids, eos_token_id=end, **options)
    assert not torch.equal(expected, free)
    for given in (np.int64(end), torch.tensor(end), np.array([end]), torch.tensor([end])):
        assert torch.equal(generator.generate(ids, eos_token_id=given, **options), expected)
    assert torch.equal(generator.generate(ids, eos_token_id=[], **options), free)
