"""Rows of a slot cache behave like separate sequences."""

import pytest
import torch

from flash_frac.inference.state import empty_cache, read_tokens
from flash_frac.models.slot_cache import SlotCache
from tests.models.hybrids import KINDS, close, make_kind


@pytest.fixture(params=KINDS)
def model(request):
    return make_kind(request.param)


def read_alone(model, ids):
    with torch.no_grad():
        return model(ids).logits[:, -1]


def test_rows_come_and_go(model, ids):
    """Prompts are read in one cache and decoded in another, at rows of other numbers.

    The host knows no lengths there: a fixed room serves all.
    """
    example = empty_cache(model, 1)
    staging, slots = SlotCache(example, 3, 41), SlotCache(example, 5, 64)
    mask = torch.ones_like(ids)
    mask[1, :30], ids[1, :30] = 0, 7
    view = staging.rows(3)
    read_tokens(model, view, ids, mask)
    for target, source, num in ((3, 0, 40), (0, 1, 10), (1, 2, 40)):
        slots.copy_row(target, staging, source, num)
    slots.copy_row(2, slots, 3, 40)
    staging.clear_row(0)
    first = slots.rows(3)
    first.fixed_room = 99
    tokens = torch.tensor([[5], [6], [7]])
    logits = read_tokens(model, first, tokens)
    assert first.room == (64 if first.full.layers else first.window if first.rings else 0)
    alone = [(ids[1:2, 30:], 5), (ids[2:], 6), (ids[:1], 7)]
    for row, (prompt, token) in enumerate(alone):
        whole = torch.cat([prompt, torch.tensor([[token]])], 1)
        close(logits[row : row + 1], read_alone(model, whole))


def test_a_fixed_room(model, ids):
    """Pieces of prompts of other lengths, as a graph reads them: by what the device knows alone."""
    cache = SlotCache(empty_cache(model, 1), 3, 64).rows(3)
    cache.fixed_room, mask = 48, torch.ones_like(ids)
    mask[1, :9], mask[2, :15] = 0, 0
    for piece in (slice(0, 10), slice(10, 17), slice(17, 40)):
        logits = read_tokens(model, cache, ids[:, piece], mask[:, piece])
    for row, begin in enumerate((0, 9, 15)):
        close(logits[row : row + 1], read_alone(model, ids[row : row + 1, begin:]))


def test_rows_share_memory(model, ids):
    """A view writes to the cache, claims nothing, and leaves other rows alone."""
    cache = SlotCache(empty_cache(model, 1), 4, 64)
    before = cache.claimed
    read_tokens(model, cache.rows(2), ids[:2])
    assert cache.claimed == before == sum(x.nbytes for x in tensors(cache))
    for mine, view in zip(tensors(cache), tensors(cache.rows(2)), strict=True):
        assert mine.data_ptr() == view.data_ptr() and view.is_contiguous()
        assert mine[:2].any() and not mine[2:].any()
    cache.clear_row(0)
    cache.clear_row(1)
    assert not any(x.any() for x in tensors(cache)) and not cache.lengths.any()


def tensors(cache):
    fixed = [x for x in cache.fixed() if x is not cache.lengths]
    return [*fixed, *(x for pair in cache.full.layers.values() for x in pair)]
