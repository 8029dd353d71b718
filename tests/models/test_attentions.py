"""`output_attentions`: returned by hybrid models, refused by models without attention."""

import pytest
import torch

from flash_frac.models.cache import FracStaticCache
from tests.models.conftest import make_model
from tests.models.hybrids import OPTIONS, close, make_hybrid, make_kind


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attentions_of_a_hybrid_model(ids, implementation):
    """One for each attention layer, causal, of sum one; beside the logits of any implementation."""
    model = make_hybrid()
    model.set_attn_implementation(implementation)
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2 and len(out.hidden_states) == 5
    for weights in out.attentions:
        assert weights.shape == (3, 2, 40, 40)
        assert not weights.triu(1).any()
        close(weights.sum(-1), torch.ones(3, 2, 40))
    plain = model(ids)
    assert plain.attentions is None
    close(out.logits, plain.logits)
    generated = model.generate(ids, output_attentions=True, return_dict_in_generate=True, **OPTIONS)
    assert [len(step) for step in generated.attentions] == [2] * 12


@torch.no_grad()
def test_attentions_of_sliding_layers(ids):
    """In the order of the layers; of those that slide, nothing beyond the window."""
    model = make_kind("all", torch.float32)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    out = model(ids, attention_mask=mask, output_attentions=True)
    sliding, full = out.attentions
    real = mask[:, None, :, None] == 1
    assert (sliding.tril(-7) == 0).all() and (full.tril(-7)[:, :, 20:] > 0).any()
    for weights in (sliding, full):
        close(weights.sum(-1), torch.ones(3, 2, 40))
        assert not (weights * real)[1, ..., :9].any()
    close(out.logits[mask == 1], model(ids, attention_mask=mask).logits[mask == 1])


def test_attentions_that_are_not_there_are_refused(ids):
    with pytest.raises(ValueError, match="output_attentions must be False for a model without"):
        make_model()(ids, output_attentions=True)
    model = make_hybrid()
    with pytest.raises(ValueError, match="output_attentions with a static cache needs"):
        model.generate(
            ids,
            output_attentions=True,
            return_dict_in_generate=True,
            cache_implementation="static",
            **OPTIONS,
        )
    cache = FracStaticCache(model.config, max_cache_len=40)
    out = model(ids, past_key_values=cache, output_attentions=True)
    close(out.attentions[0][..., :40].sum(-1), torch.ones(3, 2, 40))
