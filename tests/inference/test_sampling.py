"""Sampling against Hugging Face's processors, and draws against their distribution."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flash_frac.inference.sampling import SamplingSettings, adjust, choose

VOCABULARY = 50


def logits(batch=3):
    return 3 * torch.randn(batch, VOCABULARY, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_k": 99}, []),
        ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"temperature": 1.0, "top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ],
        ),
        (
            {"temperature": 0.9, "repetition_penalty": 1.3, "top_k": 7},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(0.9),
                TopKLogitsWarper(7),
            ],
        ),
    ],
)
def test_the_distribution_is_that_of_transformers(settings, warpers):
    ids = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(2))
    seen = torch.zeros(3, VOCABULARY, dtype=torch.bool).scatter(1, ids, True)
    expected = logits()
    for warper in warpers:
        expected = warper(ids, expected)
    got = adjust(logits(), SamplingSettings(**settings), seen=seen)
    torch.testing.assert_close(got, expected)


def test_greedy_with_a_penalty():
    seen = torch.zeros(1, 3, dtype=torch.bool)
    seen[0, 1] = True
    row = torch.tensor([[1.0, 1.5, -2.0]])
    assert choose(row, SamplingSettings(), seen=seen).tolist() == [1]
    assert choose(row, SamplingSettings(repetition_penalty=2.0), seen=seen).tolist() == [0]
    assert choose(row, SamplingSettings(repetition_penalty=2.0)).tolist() == [1]


def test_draws_follow_the_distribution():
    settings = SamplingSettings(temperature=1.3, top_k=6)
    row = logits(1)
    shares = adjust(row, settings).softmax(-1)[0]
    generator = torch.Generator().manual_seed(3)
    draws = choose(row.expand(200_000, -1), settings, generator=generator)
    found = torch.bincount(draws, minlength=VOCABULARY) / draws.numel()
    # Four standard deviations of each count.
    assert ((found - shares).abs() <= 4 * (shares * (1 - shares) / draws.numel()).sqrt()).all()
    assert not found[shares == 0].any()


def test_a_seed_repeats():
    settings = SamplingSettings(temperature=1.0)
    one, two = (
        choose(logits(100), settings, generator=torch.Generator().manual_seed(4)) for _ in range(2)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
    ],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SamplingSettings(**{name: value})


def test_filters_need_a_temperature():
    """Greedy choice would ignore them; a change of one setting may imply the other."""
    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1}.items():
        with pytest.raises(ValueError, match=r"need a temperature above 0.*set temperature=1.0"):
            SamplingSettings(**{name: value})
        found = SamplingSettings().changed({name: value})
        assert found.temperature == 1 and getattr(found, name) == value
        # Someone who asks for the likeliest token gets it.
        assert found.changed({"temperature": 0}) == SamplingSettings()
        assert found.changed({"repetition_penalty": 2.0}).temperature == 1
    assert SamplingSettings().changed({"temperature": 0, "top_p": 0.9}) == SamplingSettings()
