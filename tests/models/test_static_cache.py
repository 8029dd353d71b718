"""`cache_implementation` of `generate`: static caches, unsupported ones, assistants."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import Qwen3ForCausalLM, StaticCache
from transformers.utils import logging

from flash_frac.models import FracCache
from flash_frac.models.cache import FracStaticCache
from tests.models.conftest import make_model
from tests.models.hybrids import (
    KINDS,
    OPTIONS,
    OWN_LOOP,
    close,
    greedy_by_hand,
    make_hybrid,
    make_kind,
)

STATIC = {**OPTIONS, "cache_implementation": "static"}


@pytest.fixture(params=["frac", *KINDS])
def model(request):
    return make_model() if request.param == "frac" else make_kind(request.param)


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
    """Filled in pieces behind padding, reset, filled again; then `generate` goes on from it."""
    cache, mask = FracStaticCache(model.config, max_cache_len=64), torch.ones_like(ids)
    mask[1, :4] = 0
    whole, cuts = model(ids, attention_mask=mask).logits, [0, 3, 15, 16, 40]
    for _ in range(2):
        parts = [
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for start, end in pairwise(cuts)
        ]
        close(torch.cat(parts, 1)[mask == 1], whole[mask == 1])
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


def test_windows_of_a_static_cache_know_no_padding_inside(ids):
    """Theirs are the last columns, whatever is in them; a dynamic cache counts real tokens."""
    model, mask = make_kind("sliding"), torch.ones_like(ids)
    mask[1, 20:25] = 0
    with pytest.raises(ValueError, match=r"must have padding on the left only, .* pad on the left"):
        model.generate(ids, attention_mask=mask, **STATIC)
    with pytest.raises(ValueError, match="must have padding on the left only"):
        cache = FracStaticCache(model.config, max_cache_len=64)
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)


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
    """A static cache counts in a tensor: no new graph for the next token.

    transformers' sliding layers count in an int, of which torch.compile makes a symbol: two graphs.
    """
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
@pytest.mark.parametrize("kind", ["frac", *KINDS])
def test_static_on_a_gpu_is_compiled(kind, ids):
    """transformers compiles a step by itself there, with our kernels in it as operators."""
    make = partial(make_kind, kind) if kind in KINDS else make_model
    model, ids = make(torch.float32).cuda(), ids.cuda()
    expected = model.generate(ids, **OPTIONS, **OWN_LOOP)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **STATIC), expected)
    assert hasattr(model, "_compiled_call")
