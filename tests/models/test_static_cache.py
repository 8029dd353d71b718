"""`cache_implementation` of `generate`: static caches, those that are not to be had, assistants."""

import pytest
import torch
from transformers import Qwen3ForCausalLM, StaticCache
from transformers.utils import logging

from flash_frac.models import FracCache
from flash_frac.models.cache import FracStaticCache
from tests.models.conftest import make_model
from tests.models.hybrids import OPTIONS, close, greedy_by_hand, make_hybrid

STATIC = {**OPTIONS, "cache_implementation": "static"}


@pytest.fixture(params=[make_model, make_hybrid])
def model(request):
    return request.param()


@torch.no_grad()
def test_static_is_dynamic(model, ids):
    """Also in pieces, for beams, and twice, the second time shorter."""
    expected = greedy_by_hand(model, ids, 12)
    out = model.generate(ids, return_dict_in_generate=True, **STATIC)
    assert torch.equal(out.sequences, expected)
    assert isinstance(out.past_key_values, StaticCache) and out.past_key_values.is_compileable
    assert out.past_key_values.get_seq_length() == 51
    assert torch.equal(model.generate(ids, prefill_chunk_size=7, **STATIC), expected)
    short = model.generate(ids[:, :20], **STATIC)
    assert torch.equal(short, greedy_by_hand(model, ids[:, :20], 12))
    beams = {"num_beams": 3}
    assert torch.equal(
        model.generate(ids, **STATIC, **beams), model.generate(ids, **OPTIONS, **beams)
    )


@torch.no_grad()
def test_static_behind_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    got = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **STATIC)
    assert torch.equal(
        got, model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **OPTIONS)
    )


@torch.no_grad()
def test_a_static_cache_by_hand(model, ids):
    """Filled in two calls, reset, filled again; then `generate` goes on from it."""
    cache, whole = FracStaticCache(model.config, max_cache_len=64), model(ids).logits
    for _ in range(2):
        first = model(ids[:, :15], past_key_values=cache, use_cache=True).logits
        second = model(ids[:, 15:], past_key_values=cache, use_cache=True).logits
        close(torch.cat([first, second], 1), whole)
        assert cache.get_seq_length() == 40
        cache.reset()
    model(ids[:, :15], past_key_values=cache, use_cache=True)
    got = model.generate(ids, past_key_values=cache, **OPTIONS)
    assert torch.equal(got, greedy_by_hand(model, ids, 12))


def test_a_static_cache_knows_no_padding(ids):
    model = make_hybrid()
    cache = FracStaticCache(model.config, max_cache_len=64)
    model(ids[:, :15], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"must cover all tokens, .* expected 40 columns, got 25"):
        model(ids[:, 15:], past_key_values=cache, attention_mask=torch.ones(3, 25))
    with pytest.raises(ValueError, match="cu_seqlens cannot be used with a static cache"):
        model(ids[:1], past_key_values=cache, cu_seqlens=torch.tensor([0, 9, 40]))


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "warning"),
    [("offloaded", "stays on its device"), ("quantized", "is not quantised"), ("dynamic", None)],
)
def test_other_implementations(ids, implementation, warning, caplog):
    model = make_model()
    logging.warning_once.cache_clear()
    out = model.generate(
        ids, cache_implementation=implementation, return_dict_in_generate=True, **OPTIONS
    )
    assert isinstance(out.past_key_values, FracCache)
    assert torch.equal(out.sequences, greedy_by_hand(model, ids, 12))
    assert (warning in caplog.text) if warning else "cache" not in caplog.text


def test_a_cache_and_an_implementation_exclude_each_other(model, ids):
    cache = FracCache(model.config)
    with pytest.raises(ValueError, match=r"cache_implementation \('static'\) and past_key_values"):
        model.generate(ids, past_key_values=cache, **STATIC)


def test_a_frac_model_is_no_assistant(model, ids):
    """It cannot take rejected tokens back, and says so before it decodes one."""
    target = Qwen3ForCausalLM(make_hybrid().config.attention_config())
    with pytest.raises(ValueError, match=r"cannot be an assistant_model: .* \(crop\)"):
        target.generate(ids[:1], assistant_model=model, **OPTIONS)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        model.generate(ids[:1], assistant_model=target, **OPTIONS)
    for cache in (FracCache(model.config), FracStaticCache(model.config, max_cache_len=9)):
        with pytest.raises(ValueError, match="tokens cannot be removed from the cache"):
            cache.crop(-1)


def test_a_compiled_step_is_compiled_once(ids):
    """A static cache counts in a tensor: no new graph for the next token."""
    model = make_hybrid(torch.float32, num_hidden_layers=2, attention_layers=[1])
    frames = []

    def compiler(graph, inputs):
        frames.append(graph)
        return graph

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=compiler)
    cache = FracStaticCache(model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache, use_cache=True)
        for n in range(30, 33):
            logits = step(ids[:, n : n + 1], past_key_values=cache, use_cache=True).logits
        assert len(frames) == 1
        close(logits[:, -1], model(ids[:, :33]).logits[:, -1])


@pytest.mark.gpu
@pytest.mark.parametrize("make", [make_model, make_hybrid])
def test_static_on_a_gpu_is_compiled(make, ids):
    """transformers compiles a step by itself there, with our kernels in it as operators."""
    model, ids = make(torch.float32).cuda(), ids.cuda()
    expected = model.generate(ids, **OPTIONS)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **STATIC), expected)
    assert hasattr(model, "_compiled_call")
