"""Random numbers of the sampler, and inputs that `sample` refuses."""

import pytest
import torch

from flash_frac.ops import sample
from flash_frac.ops.sample.reference import GROUP, WIDTH, _noise, fields, philox

# From Random123, the library of the authors of Philox: counter, key, words.
KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (4 * " ffffffff", 2 * " ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_is_that_of_its_authors(counter, key, expected):
    assert philox(words(counter), words(key)) == words(expected)


def noise(seed, drawn, size):
    settings = fields(torch.zeros(1, WIDTH, dtype=torch.int32))
    settings.seed.fill_(seed)
    settings.drawn.fill_(drawn)
    return _noise(settings, size)[0]


def test_noise_is_gumbel():
    values = noise(5, 0, 500_000).double()
    assert values.isfinite().all()
    expected = torch.exp(-torch.exp(-values.sort().values))
    found = (torch.arange(len(values)) + 0.5) / len(values)
    # Kolmogorov and Smirnov: exceeded by one seed of a thousand.
    assert (found - expected).abs().max() < 1.95 / len(values) ** 0.5


def test_noise_depends_on_seed_count_and_token_alone():
    first = noise(1, 0, 3 * GROUP + 5)
    assert torch.equal(noise(1, 0, GROUP - 7), first[: GROUP - 7])
    assert first.unique().numel() > 0.99 * len(first)
    others = [(2, 0), (1, 1), (1 + 2**32, 0), (1, 2**32), (-1, 0), (0, 1)]
    for seed, drawn in others:
        assert (noise(seed, drawn, len(first)) == first).float().mean() < 0.01


def test_errors():
    logits = torch.zeros(2, 5)
    table, seen = torch.zeros(2, WIDTH, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"logits must have shape \(B, V\), got \(5,\)"):
        sample(logits[0], table, seen)
    with pytest.raises(ValueError, match=r"table must be a contiguous \(2, 10\) of torch.int32, g"):
        sample(logits, table[:1], seen)
    with pytest.raises(ValueError, match=r"seen must have the shape \(2, 5\) of the logits and dt"):
        sample(logits, table, seen.float())
