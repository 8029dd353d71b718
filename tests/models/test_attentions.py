"""`output_attentions`: of hybrid models, refused where there are none."""

import pytest
import torch

from flash_frac.models.cache import FracStaticCache
from tests.models.conftest import make_model
from tests.models.hybrids import OPTIONS, close, make_hybrid


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
