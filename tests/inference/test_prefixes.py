"""Prefix states: a prompt that begins like one before costs its new tokens, and none is changed."""

import pytest
import torch

from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.state import empty_cache, read_tokens
from tests.models.hybrids import KINDS, make_kind

PLENTY = 2**24


def read(model, cache, row, ids):
    """Read ids on into one row of a cache, in a cache of its own; logits (V,)."""
    from flash_frac.models.buffers import BufferedCache

    alone = BufferedCache.cat([cache], [row])
    alone.reserve(len(ids))
    logits = read_tokens(model, alone, torch.tensor([ids]))
    alone.took([len(ids)])
    for mine, new in zip(cache.fixed(), alone.fixed(), strict=True):
        mine[row] = new[0]
    for n, pair in cache.full.layers.items():
        for mine, new in zip(pair, alone.full.layers[n], strict=True):
            mine[row, :, : alone.longest] = new[0, :, : alone.longest]
    cache.counts[row] += len(ids)
    return logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_the_whole(kind, ids):
    model = make_kind(kind)
    prefixes = PrefixStates(device_bytes=PLENTY).bind(model)
    cache = empty_cache(model, 3)
    cache.reserve(64)
    first = ids[0].tolist()
    assert prefixes.longest(first) is None
    read(model, cache, 1, first[:17])
    assert prefixes.put(first[:17], cache, 1)
    expected = read(model, cache, 1, first[17:])
    found = prefixes.longest(first)
    assert found is not None and found.num_tokens == 17
    found.restore(cache, 2)
    assert torch.equal(read(model, cache, 2, first[17:]), expected)
