"""`generate` for Frac and hybrid models: greedy, sampling, beams, padding, from a cache."""

import pytest
import torch
from transformers import DynamicCache

from flash_frac.models import FracCache
from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, OPTIONS, greedy_by_hand, make_kind


@pytest.fixture(params=["frac", *KINDS])
def model(request):
    return make_model() if request.param == "frac" else make_kind(request.param)


@torch.no_grad()
def test_greedy(model, ids):
    expected = greedy_by_hand(model, ids, 12)
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=7, **OPTIONS), expected)


@torch.no_grad()
def test_left_padded_batch(model, ids):
    """Each row as if it were alone."""
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    got = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **OPTIONS)
    for row in range(3):
        alone = greedy_by_hand(model, ids[row : row + 1, mask[row] == 1], 12)
        assert torch.equal(got[row, -12:], alone[0, -12:])


@torch.no_grad()
def test_going_on_from_a_cache(model, ids):
    """Many new tokens at once, and in one forward pass, given in full or with the mask of all."""
    expected = greedy_by_hand(model, ids, 12)
    calls = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args or (kwargs["input_ids"],))[0].shape[1]),
        with_kwargs=True,
    )
    cache = model(ids[:, :15], use_cache=True).past_key_values
    assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), expected)
    assert calls[:2] == [15, 25] and set(calls[2:]) == {1}
    hook.remove()
    cache = model(ids[:, :15], use_cache=True).past_key_values
    got = model.generate(
        ids[:, 15:], past_key_values=cache, attention_mask=torch.ones_like(ids), **OPTIONS
    )
    assert torch.equal(got[:, -12:], expected[:, -12:])
    # And on again, from where generate left it.
    more = torch.cat([expected, ids[:, :5]], 1)
    assert torch.equal(
        model.generate(more, past_key_values=cache, **OPTIONS), greedy_by_hand(model, more, 12)
    )


@torch.no_grad()
def test_beam_search_is_that_without_a_cache(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    options = {**OPTIONS, "num_beams": 4, "num_return_sequences": 2, "attention_mask": mask}
    got = model.generate(ids, **options)
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))
    assert not torch.equal(got[::2], greedy_by_hand(model, ids, 12))


@torch.no_grad()
def test_sampling_is_that_without_a_cache(model, ids):
    options = {
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
    }
    results = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        results.append(model.generate(ids, use_cache=use_cache, eos_token_id=None, **options))
    assert torch.equal(*results)


@torch.no_grad()
def test_generate_from_embeddings(model, ids):
    got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **OPTIONS)
    assert torch.equal(got, greedy_by_hand(model, ids, 12)[:, -12:])


@torch.no_grad()
def test_a_cache_can_be_reset(model, ids):
    cache = FracCache(model.config)
    first = model.generate(ids, past_key_values=cache, **OPTIONS)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), first)


def test_generate_does_not_compile_unasked(model):
    """Hugging Face compiles on a GPU whenever a cache says that it can be."""
    assert not FracCache(model.config).is_compileable


def test_a_cache_that_does_not_count_is_refused(model, ids):
    with pytest.raises(ValueError, match="past_key_values must be a FracCache, got DynamicCache"):
        model.generate(ids, past_key_values=DynamicCache(config=model.config), **OPTIONS)


def test_low_precision(ids):
    model = make_model(torch.bfloat16)
    assert model.generate(ids, **OPTIONS).shape == (3, 52)
