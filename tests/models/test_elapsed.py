"""Time between tokens: given by the caller, or drawn in training."""

import math

import pytest
import torch

from flash_frac.models.inputs import random_elapsed
from tests.errors import assert_as_good
from tests.models.conftest import make_model, on_backend
from tests.models.hybrids import make_kind

close = torch.testing.assert_close


@torch.no_grad()
def test_given_times_reach_every_layer(model, ids):
    times = torch.rand(ids.shape) * 3 + 0.1
    whole = model(ids, elapsed=times, use_cache=True)
    assert not torch.allclose(whole.logits, model(ids).logits)
    first = model(ids[:, :25], elapsed=times[:, :25], use_cache=True)
    second = model(ids[:, 25:], elapsed=times[:, 25:], past_key_values=first.past_key_values)
    close(torch.cat([first.logits, second.logits], 1), whole.logits)
    one = model(ids[:, :1], elapsed=times[:, :1], use_cache=True)
    two = model(ids[:, 1:2], elapsed=times[:, 1:2], past_key_values=one.past_key_values)
    close(two.logits[:, 0], whole.logits[:, 1])


@torch.no_grad()
def test_delta_layers_know_time_and_attention_does_not(ids):
    """Of a delta layer it multiplies the decay: with twice the time, half the rate is the same."""
    times = torch.full(ids.shape, 2.0)
    attention, delta = make_kind("transformer"), make_kind("delta net")
    assert torch.equal(attention(ids, elapsed=times).logits, attention(ids).logits)
    slower = make_kind("delta net")
    for block in slower.model.layers:
        block.mixer.A_log.sub_(math.log(2))
    close(slower(ids, elapsed=times).logits, delta(ids).logits)
    assert not torch.allclose(delta(ids, elapsed=times).logits, delta(ids).logits)
    # In training all sequences draw a time, of which attention takes no notice.
    dilated = make_kind("transformer", frac_time_dilation=16.0).train()
    assert torch.equal(dilated(ids).logits, attention(ids).logits)


@torch.no_grad()
def test_training_draws_a_time_for_each_sequence(ids):
    model = make_model(frac_time_dilation=16.0)
    plain = make_model()
    close(model(ids).logits, plain(ids).logits)
    model.train()
    torch.manual_seed(1)
    drawn = model(ids).logits
    torch.manual_seed(1)
    times = random_elapsed(ids[..., None], None, 16.0)
    close(drawn, plain(ids, elapsed=times).logits)
    assert (times == times[:, :1]).all() and len(times[:, 0].unique()) == len(ids)


def test_times_are_log_uniform_and_follow_packed_sequences():
    times = random_elapsed(torch.zeros(4000, 1, 1), None, 256.0)[:, 0]
    assert times.min() >= 1 and times.max() <= 256
    assert abs(times.log().mean() - math.log(256) / 2) < 5 * math.log(256) / math.sqrt(12 * 4000)
    bounds = torch.tensor([0, 3, 3, 10])
    packed = random_elapsed(torch.zeros(1, 10, 1), bounds, 256.0)
    assert packed.shape == (1, 10)
    assert len(packed[0, :3].unique()) == len(packed[0, 3:].unique()) == 1
    assert packed[0, 0] != packed[0, 3]


def test_ranks_that_share_a_row_cannot_draw():
    model = make_model(frac_time_dilation=2.0)
    with pytest.raises(ValueError, match="group must be None for a model with frac_time_dilation"):
        model.set_context_group(object())


@torch.no_grad()
@pytest.mark.parametrize("time", [1e3, 1e7, 1e12])
def test_long_times_cost_no_digits(ids, time):
    """Every seventh token comes after a very long time; float32 against float64."""
    model = make_model(torch.float32)
    elapsed = torch.ones(ids.shape)
    elapsed[:, ::7] = time
    got = model(ids, elapsed=elapsed).logits
    usual = on_backend(model, "recurrent")(ids, elapsed=elapsed).logits
    exact = model.double()(ids, elapsed=elapsed.double()).logits
    assert_as_good(got, usual, exact.double(), "logits")
