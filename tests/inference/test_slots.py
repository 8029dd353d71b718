"""Sampling with per-slot settings: against `adjust` and `choose`, and draw frequencies."""

import random

import pytest
import torch

from flash_frac.inference.sampling import (
    GREEDY,
    SamplingSettings,
    SlotSettings,
    adjust,
    choose,
    choose_each,
)
from flash_frac.ops.sample.reference import fields, lowest_kept

VOCABULARY = 60


def settings_of(*rows, seeds=None):
    made = SlotSettings.empty(len(rows))
    made.set_rows(range(len(rows)), rows, seeds or range(len(rows)))
    return made


def unseen(logits):
    return torch.zeros_like(logits, dtype=torch.bool)


def normal(*shape):
    return 3 * torch.randn(*shape)


def draw(logits, settings, count):
    """Tokens of many seeds from one row of logits."""
    rows = logits.expand(count, -1)
    return choose_each(rows, settings_of(*[settings] * count), seen=unseen(rows))[0]


def any_settings(generator):
    return SamplingSettings(
        temperature=generator.choice([0.1, 0.7, 1.0, 2.5]),
        top_k=generator.choice([0, 1, 2, 7, 59, 60, 61, 10_000]),
        top_p=generator.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        min_p=generator.choice([0.0, 1e-4, 0.05, 0.5, 0.999]),
        repetition_penalty=generator.choice([1.0, 1.0, 0.5, 1.3, 2.0]),
    )


def adjust_each(logits, settings, seen):
    rows = zip(logits, settings, seen, strict=True)
    return torch.cat([adjust(row[None], each, seen=mask[None]) for row, each, mask in rows])


@pytest.mark.parametrize("seed", range(4))
def test_keeps_what_adjust_keeps(seed):
    generator = random.Random(seed)
    given = [any_settings(generator) for _ in range(200)]
    logits = normal(200, VOCABULARY)
    logits[::5, ::7] = -torch.inf
    seen = torch.rand(200, VOCABULARY) < 0.3
    slots = settings_of(*given)
    penalties = [SamplingSettings(repetition_penalty=x.repetition_penalty) for x in given]
    penalised = adjust_each(logits, penalties, seen)
    kept = (penalised >= lowest_kept(penalised, fields(slots.table))) & (penalised > -torch.inf)
    expected = adjust_each(logits, given, seen) > -torch.inf
    assert torch.equal(kept, expected)
    tokens, _ = choose_each(logits, slots, seen=seen)
    assert expected.gather(1, tokens[:, None]).all()


def test_filters_keep_equal_logits_together():
    """Where `adjust` keeps ties of top-k too, and of top-p some in no certain order."""
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for filters in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}, {"top_k": 2, "top_p": 0.01}):
        settings = SamplingSettings(temperature=1.0, **filters)
        assert draw(row, settings, 200).unique().tolist() == [1, 2, 3]
    equal = torch.zeros(1, 5)
    for filters in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.99}):
        settings = SamplingSettings(temperature=1.0, **filters)
        assert draw(equal, settings, 300).unique().tolist() == [0, 1, 2, 3, 4]


def test_greedy_is_that_of_choose():
    logits, seen = normal(50, VOCABULARY), torch.rand(50, VOCABULARY) < 0.5
    # Ties, as the logits of a model in bfloat16 have: the first one.
    logits = logits.bfloat16().float()
    for penalty in (1.0, 1.7):
        settings = SamplingSettings(repetition_penalty=penalty)
        expected = choose(logits, settings, seen=seen)
        tokens, _ = choose_each(logits, settings_of(*[settings] * 50), seen=seen.clone())
        assert torch.equal(tokens, expected)
    for cold in (SamplingSettings(temperature=1e-40), SamplingSettings(temperature=1, top_k=1)):
        distinct = normal(50, VOCABULARY)
        tokens, _ = choose_each(distinct, settings_of(*[cold] * 50), seen=unseen(distinct))
        assert torch.equal(tokens, distinct.argmax(1))


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=1.7, top_k=9, min_p=0.01),
        SamplingSettings(temperature=0.8, top_p=0.9),
        SamplingSettings(temperature=1e39),
    ],
)
def test_draws_follow_the_distribution(settings):
    """Chi-square over seeds: exceeded by one of a thousand."""
    row, count = normal(1, VOCABULARY), 20_000
    shares = adjust(row, settings).softmax(-1)[0].double()
    found = torch.bincount(draw(row, settings, count), minlength=VOCABULARY)
    assert not found[shares == 0].any()
    expected = (shares * count)[shares > 0]
    usual = expected >= 5
    # Rare tokens are counted together.
    expected = torch.cat([expected[usual], expected[~usual].sum()[None]])
    found = found[shares > 0]
    found = torch.cat([found[usual], found[~usual].sum()[None]])
    distance = ((found - expected) ** 2 / expected.clamp(min=1)).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty's approximation of the quantile.
    most = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert distance < most


def test_a_sequence_of_draws_follows_the_distribution():
    """The count goes on, so that the draws of one seed differ."""
    row, slots = normal(1, 8), settings_of(SamplingSettings(temperature=1.0))
    seen, counts = unseen(row), torch.zeros(8)
    for _ in range(2000):
        counts[choose_each(row, slots, seen=seen)[0]] += 1
    shares = row.softmax(-1)[0]
    assert slots.drawn.tolist() == [2000]
    # Four standard deviations of each count.
    assert ((counts / 2000 - shares).abs() <= 4 * (shares * (1 - shares) / 2000).sqrt()).all()


def test_a_draw_depends_on_seed_count_and_logits_alone():
    given = [any_settings(random.Random(n)) for n in range(12)]
    logits, seen = normal(12, 2500), torch.rand(12, 2500) < 0.2
    slots = settings_of(*given)
    whole = [choose_each(logits, slots, seen=seen.clone()) for _ in range(3)]
    for order in ([3], [7, 0, 3], list(reversed(range(12)))):
        for step, (tokens, logprobs) in enumerate(whole):
            part = SlotSettings.empty(len(order))
            for row, n in enumerate(order):
                part.set(row, given[n], n, drawn=step)
            found = choose_each(logits[order], part, seen=seen[order])
            assert torch.equal(found[0], tokens[order])
            assert torch.equal(found[1], logprobs[order])


def test_log_probabilities_are_those_of_the_raw_logits():
    logits = normal(12, VOCABULARY)
    given = [any_settings(random.Random(n)) for n in range(12)]
    tokens, logprobs = choose_each(logits, settings_of(*given), seen=torch.ones(12, VOCABULARY) > 0)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_marks_what_it_chose():
    settings = settings_of(GREEDY, SamplingSettings(repetition_penalty=10.0))
    row, seen = torch.tensor([3.0, 2.0, 1.0]), torch.zeros(2, 3, dtype=torch.bool)
    found = [choose_each(row.expand(2, 3), settings, seen=seen)[0].tolist() for _ in range(3)]
    assert found == [[0, 0], [0, 1], [0, 2]]
    assert seen.tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize("settings", [GREEDY, SamplingSettings(temperature=1.0, top_p=0.9)])
def test_a_row_without_a_distribution_is_told_and_harms_no_other(settings):
    logits = normal(6, VOCABULARY)
    expected = choose_each(logits, settings_of(*[settings] * 6), seen=unseen(logits))
    logits[1, 4] = torch.nan
    logits[3] = -torch.inf
    logits[4, 9] = torch.inf
    slots, seen = settings_of(*[settings] * 6), unseen(logits)
    tokens, logprobs = choose_each(logits, slots, seen=seen)
    bad = torch.tensor([False, True, False, True, True, False])
    assert (tokens[bad] == -1).all() and logprobs[bad].isnan().all() and not seen[bad].any()
    assert torch.equal(tokens[~bad], expected[0][~bad])
    assert torch.equal(logprobs[~bad], expected[1][~bad])
    assert slots.drawn.tolist() == [1] * 6


def test_settings_go_in_and_out():
    slots = SlotSettings.empty(5)
    assert slots.temperature.tolist() == [0.0] * 5 and slots.top_p.tolist() == [1.0] * 5
    mine = SamplingSettings(
        temperature=0.75, top_k=40, top_p=0.5, min_p=0.25, repetition_penalty=1.5
    )
    slots.set(4, mine, -(2**63), drawn=7)
    slots.move(4, 1)
    slots.set(4, SamplingSettings(temperature=1.0, top_k=2**40), 2**63 - 1)
    first = slots.rows(2)
    assert len(first) == 2 and first.table.data_ptr() == slots.table.data_ptr()
    row = [getattr(first, name)[1].item() for name in vars(mine)]
    assert row == list(vars(mine).values())
    assert first.seed.tolist() == [0, -(2**63)] and first.drawn.tolist() == [0, 7]
    assert slots.seed[4] == 2**63 - 1 and slots.drawn[4] == 0 and slots.top_k[4] == 2**30


def test_errors():
    slots = SlotSettings.empty(3)
    with pytest.raises(ValueError, match="row must be from 0 to 2, got 3"):
        slots.set(3, GREEDY, 0)
    with pytest.raises(ValueError, match="row must be from 0 to 2, got -1"):
        slots.move(0, -1)
    with pytest.raises(ValueError, match=r"count must be from 1 to 3 \(slots\), got 4"):
        slots.rows(4)
    with pytest.raises(ValueError, match="seed must be a signed 64-bit integer, got 9"):
        slots.set(0, GREEDY, 2**63)
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"table must be a contiguous \(2, 10\)"):
        choose_each(logits, slots, seen=unseen(logits))
