"""The sampling kernels against the torch form: the same draws, marks and kept sets."""

import random

import pytest
import torch

from flash_frac.inference.sampling import SamplingSettings, SlotSettings, adjust
from flash_frac.ops import sample
from flash_frac.ops.sample.reference import fields, lowest_kept
from flash_frac.ops.sample.triton import sample_op
from tests.kernels.devices import DEVICE, DTYPES

# Rows that fill less than a block, one exactly, one and a rest, and several.
SIZES = [5, 16, 1024, 1500, 4099]


def normal(*shape, dtype=torch.float32):
    return (3 * torch.randn(*shape)).to(DEVICE, dtype)


def any_settings(generator, size):
    penalty = generator.choice([1.0, 1.0, 0.5, 1.3, 2.0])
    temperature = generator.choice([0.0, 0.1, 0.7, 1.0, 2.5, 1e-40, 1e39])
    if temperature == 0:
        return SamplingSettings(repetition_penalty=penalty)
    return SamplingSettings(
        temperature=temperature,
        top_k=generator.choice([0, 0, 1, 2, 3, 7, size - 1, size, size + 1]),
        top_p=generator.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        min_p=generator.choice([0.0, 1e-4, 0.05, 0.5, 0.999]),
        repetition_penalty=penalty,
    )


def slots(settings, drawn=0):
    made = SlotSettings.empty(len(settings), DEVICE)
    count = len(settings)
    seeds = [3 * n - 2**40 for n in range(count)]
    made.set_rows(range(count), settings, seeds, drawn=[drawn] * count)
    return made


def run(backend, logits, settings, seen, drawn=0):
    made, marks = slots(settings, drawn), seen.clone()
    tokens, logprobs = sample(logits, made.table, marks, backend)
    return tokens, logprobs, marks, made.drawn


def assert_same(logits, settings, seen, drawn=0):
    got, expected = (run(name, logits, settings, seen, drawn) for name in ("triton", "torch"))
    for n in (0, 2, 3):
        assert torch.equal(got[n], expected[n])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6, equal_nan=True)


def unseen(logits):
    return torch.zeros(logits.shape, dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_tokens(size, dtype):
    generator = random.Random(size)
    settings = [any_settings(generator, size) for _ in range(24)]
    logits = normal(24, size, dtype=dtype)
    logits[::5, ::3] = -torch.inf
    assert_same(logits, settings, torch.rand(24, size, device=DEVICE) < 0.3, drawn=2**32 - 1)


@pytest.mark.parametrize("size", SIZES)
def test_the_same_noise(size):
    """Of flat logits, where the noise alone decides."""
    flat = torch.zeros(8, size, device=DEVICE)
    assert_same(flat, [SamplingSettings(temperature=1.0)] * 8, unseen(flat), drawn=7)


def kept_sets(logits, settings, seen):
    """Of the kernel, and of the torch form."""
    penalties = [SamplingSettings(repetition_penalty=x.repetition_penalty) for x in settings]
    rows = zip(logits, penalties, seen, strict=True)
    scores = torch.cat([adjust(row[None], each, seen=mask[None]) for row, each, mask in rows])
    made = slots(settings)
    expected = scores >= lowest_kept(scores, fields(made.table))
    *_, facts = sample_op(logits, made.table, seen.clone())
    real = scores > -torch.inf
    return (scores >= facts[:, 1:2]) & real, expected & real


@pytest.mark.parametrize("kind", ["distinct", "ties", "far", "equal"])
def test_the_same_kept_sets(kind):
    generator, size = random.Random(1), 2100
    settings = [any_settings(generator, size) for _ in range(24)]
    settings = [s for s in settings if s.temperature > 0]
    logits = normal(len(settings), size)
    if kind == "ties":
        logits = logits.round()
    elif kind == "far":
        # Masks of -inf, and as people write them: from the largest to the lowest float32.
        logits[:, ::3], logits[:, 1::7], logits[:, 2::90] = -torch.inf, -1e30, -3.4e38
    elif kind == "equal":
        logits = torch.full_like(logits, -2.5)
    got, expected = kept_sets(logits, settings, unseen(logits))
    assert torch.equal(got, expected) and got.any(1).all()


def test_a_row_without_a_distribution():
    logits = normal(8, 1100)
    logits[1, 4], logits[2] = torch.nan, torch.nan
    logits[3], logits[4, 1099] = -torch.inf, torch.inf
    for settings in (SamplingSettings(), SamplingSettings(temperature=0.8, top_k=4, top_p=0.9)):
        tokens, logprobs, marks, _ = run("triton", logits, [settings] * 8, unseen(logits))
        assert tokens[1:5].tolist() == [-1] * 4 and logprobs[1:5].isnan().all()
        assert not marks[1:5].any() and logprobs[5:].isfinite().all()
        assert_same(logits, [settings] * 8, unseen(logits))


def test_rows_that_are_apart():
    settings = [any_settings(random.Random(n), 40) for n in range(4)]
    wide, marks = normal(4, 64), torch.rand(4, 64, device=DEVICE) < 0.3
    expected = run("triton", wide[:, :40].contiguous(), settings, marks[:, :40].contiguous())
    made, seen = slots(settings), marks.clone()
    got = sample(wide[:, :40], made.table, seen[:, :40], "triton")
    turned = sample(wide.mT.contiguous().mT[:, :40], slots(settings).table, marks[:, :40], "triton")
    for tokens, logprobs in (got, turned):
        assert torch.equal(tokens, expected[0]) and torch.equal(logprobs, expected[1])
    assert torch.equal(seen[:, :40], expected[2])
    with pytest.raises(ValueError, match="seen must have contiguous rows, got strides"):
        sample(wide, made.table, marks.mT.contiguous().mT, "triton")


def test_operator():
    settings = [SamplingSettings(temperature=1.0, top_p=0.9), SamplingSettings()]
    logits = normal(2, 30)
    torch.library.opcheck(sample_op.registered, (logits, slots(settings).table, unseen(logits)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [50_280, 151_936])
def test_a_large_vocabulary(size, dtype):
    generator = random.Random(size)
    settings = [any_settings(generator, size) for _ in range(64)]
    logits = normal(64, size, dtype=dtype)
    assert_same(logits, settings, torch.rand(64, size, device=DEVICE) < 0.3)


@pytest.mark.gpu
def test_a_graph_goes_on_drawing():
    """Replays count up and mark, and settings may change between them."""
    logits = normal(4, 50_280)
    first, second = ([any_settings(random.Random(n + m), 50) for n in range(4)] for m in (0, 9))
    made, seen = slots(first), unseen(logits)
    sample(logits, made.table, seen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample(logits, made.table, seen)
    found = []
    for settings in (first, second):
        made.table.copy_(slots(settings).table)
        seen.zero_()
        for _ in range(3):
            graph.replay()
            found.append(tokens.clone())
    expected = []
    for settings in (first, second):
        plain, marks = slots(settings), unseen(logits)
        expected += [sample(logits, plain.table, marks)[0] for _ in range(3)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
