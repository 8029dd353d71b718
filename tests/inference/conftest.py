import pytest
import torch

from flash_frac.inference import FracStream
from flash_frac.inference.state import states_of
from flash_frac.models import FracCache
from tests.models.conftest import make_model


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def ids():
    return torch.randint(3, 61, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stream(model, ids):
    return FracStream(model, batch_size=3).feed(ids)


@torch.no_grad()
def one_pass(model, ids):
    """States and next logits of ids (B, T), without a stream."""
    cache = FracCache(model.config)
    logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    return states_of(cache), logits


def tensors(states):
    return [x for state in states for x in (state.recurrent, state.conv)]


def assert_same(stream, other):
    """To the bit."""
    assert stream.lengths == other.lengths
    pairs = zip(tensors(stream.state), tensors(other.state), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert (stream.logits is None) == (other.logits is None)
    assert stream.logits is None or torch.equal(stream.logits, other.logits)
    assert torch.equal(stream._now.seen, other._now.seen)
    assert stream._now.tails == other._now.tails


def assert_holds(stream, ids):
    """The state of a stream is, in float64, that of these ids (B, T)."""
    states, logits = one_pass(stream.model, ids)
    for x, y in zip(tensors(stream.state), tensors(states), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)
    # The model gives float32.
    torch.testing.assert_close(stream.logits, logits, rtol=1e-6, atol=1e-6)
    seen = torch.zeros_like(stream._now.seen).scatter(1, ids, True)
    assert torch.equal(stream._now.seen, seen)


def take(stream, number, **options):
    """Ids (B, number) from `generate`."""
    options = {"eos": False, "max_new_tokens": number} | options
    return torch.stack(list(stream.generate(**options)), 1)
