"""What attention and delta layers hold of earlier tokens, against weights and direct scans."""

import numpy as np
import pytest
import torch

from flash_frac.inspect import content, inspect_model
from flash_frac.inspect.content import ByDistance, attention_by_distance, delta_by_distance
from flash_frac.inspect.statistics import visit_layers
from flash_frac.layers import DeltaMixer
from flash_frac.models.attention import Attention
from flash_frac.ops import delta_scan

from .conftest import MIXED, tiny

TOKENS = torch.randint(0, 32, (2, 40), generator=torch.Generator().manual_seed(4))


def visited(model, tokens):
    """Layers that find tokens by content, with their inputs."""
    seen = []
    visit_layers(model, tokens, lambda *frac: None, visit_content=lambda *layer: seen.append(layer))
    return seen


def diagonals(weights):
    """Sums (H, T) of weights (B, H, T, T) by distance."""
    total = weights.sum(0)
    time = total.shape[-1]
    return torch.stack([total.diagonal(-n, -2, -1).sum(-1) for n in range(time)], -1).numpy()


@pytest.mark.parametrize("piece", [2**24, 500])
@pytest.mark.parametrize("positions", ["rope", "none"])
def test_attention_is_that_of_the_model(monkeypatch, positions, piece):
    """Of `output_attentions`: windows, temperature, positions, shared heads; in any pieces."""
    monkeypatch.setattr(content, "_PIECE", piece)
    model = tiny(**MIXED, attention_positions=positions)
    expected = model(TOKENS, output_attentions=True).attentions
    found = [x for x in visited(model, TOKENS) if isinstance(x[1], Attention)]
    assert [number for number, *_ in found] == [2, 3]
    for (_, attention, x, inputs), weights in zip(found, expected, strict=True):
        with torch.no_grad():
            q, k, _ = attention.project(x, inputs["position_embeddings"], inputs.get("query_scale"))
        every = attention_by_distance(attention, q, k, max_queries=40)
        np.testing.assert_allclose(every.sums, diagonals(weights.detach()), rtol=1e-5, atol=1e-6)
        assert every.counts.tolist() == [2 * (40 - n) for n in range(40)]
        some = attention_by_distance(attention, q, k, max_queries=3)
        rows = weights.detach()[:, :, [0, 20, 39]]
        near = sum(rows[:, :, i, t] for i, t in enumerate((0, 20, 39))).sum(0)
        np.testing.assert_allclose(some.sums[:, 0], near, rtol=1e-5)
        assert some.counts[[0, 1, 20, 21, 39]].tolist() == [6, 4, 4, 2, 2]


@torch.no_grad()
def test_delta_is_what_the_scan_answers_to_impulses():
    model = tiny(**MIXED).double()
    ((_, mixer, x, _),) = [x for x in visited(model, TOKENS) if isinstance(x[1], DeltaMixer)]
    q, k, v, beta, log_decay, _ = mixer.scan_inputs(x)
    weights = torch.zeros(2, 3, 40, 40, dtype=torch.float64)
    for s in range(40):
        impulse = torch.zeros_like(v)
        impulse[:, s] = 1
        y = delta_scan(q, k, impulse, beta, log_decay, backend="recurrent").y
        weights[:, :, :, s] = y[..., 0].transpose(1, 2)
    assert (weights < 0).any()
    found = delta_by_distance(mixer, x, max_queries=40)
    np.testing.assert_allclose(found.sums, diagonals(weights.abs()), rtol=1e-10, atol=1e-12)
    layer = inspect_model(model, TOKENS).layers[1]
    lives = np.log(2) / -log_decay.flatten(0, 1).numpy()
    for h, head in enumerate(layer.heads):
        near = np.exp(np.quantile(np.log(lives[:, h]), 0.5))
        assert head.distributions["half_life"].quantiles[2] == pytest.approx(near)
        assert head.response[0] == pytest.approx(found.sums[h, 0] / 80)
    low, high = layer.edges["beta"][0], layer.edges["beta"][-1]
    assert low <= beta.min() and beta.max() <= high


def test_responses_are_means_around_lags():
    sums = np.arange(24.0).reshape(2, 12)
    found = ByDistance(sums, 12 - np.arange(12))
    response, pairs = found.response(np.array([0, 1, 2, 5, 10]))
    # Around 5: from sqrt(2 * 5) to sqrt(5 * 10), that is distances 4 to 7.
    assert pairs == [12, 11, 10 + 9, 8 + 7 + 6 + 5, 4 + 3 + 2]
    np.testing.assert_allclose(response[0], [0, 1 / 11, 5 / 19, 22 / 26, 27 / 9])


def test_distances_of_known_weights():
    """Equal weights over 1,100 tokens: a median in the middle, and the shares of the bins."""
    edges, (one, mean) = ByDistance(np.ones((1, 1100)), np.ones(1100)).distances()
    assert edges[:4] == [0, 1, 2, 4] and edges[-2:] == [1024, 2048]
    assert one == mean and one.median == pytest.approx(550) and one.mean == pytest.approx(549.5)
    np.testing.assert_allclose(one.shares, [x / 1100 for x in [1, *(2**n for n in range(10)), 76]])
    assert set(one.beyond) == {"16", "64", "256", "1024"}
    assert one.beyond["1024"] == pytest.approx(76 / 1100)


def test_a_wrong_number_of_queries():
    with pytest.raises(ValueError, match="max_queries must be at least 1, got 0"):
        inspect_model(tiny(**MIXED), TOKENS, max_queries=0)
