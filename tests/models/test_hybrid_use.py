"""Hybrid models in use: generation, streams, regridding, and what the page on them says."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_frac.generation import Generator
from flash_frac.inspect import inspect_model
from flash_frac.layers import FracMixer
from flash_frac.models import (
    FracConfig,
    regrid,
)
from flash_frac.stream import FracStream
from flash_frac.train.monitor import forward_flops
from tests.models.conftest import SIZES
from tests.models.hybrids import LAYERS, OPTIONS, close, greedy_by_hand, make_hybrid


@pytest.fixture
def model():
    return make_hybrid()


@torch.no_grad()
def test_greedy(model, ids):
    expected = greedy_by_hand(model, ids, 12)
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=7, **OPTIONS), expected)


@torch.no_grad()
def test_batches_of_different_lengths(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    got = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **OPTIONS)
    for row in range(3):
        alone = greedy_by_hand(model, ids[row : row + 1, mask[row] == 1], 12)
        assert torch.equal(got[row, -12:], alone[0, -12:])


@torch.no_grad()
def test_beam_search_is_that_without_a_cache(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    options = {**OPTIONS, "num_beams": 4, "num_return_sequences": 2, "attention_mask": mask}
    got = model.generate(ids, **options)
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_going_on_from_a_cache(model, ids):
    expected = greedy_by_hand(model, ids, 12)
    cache = model(ids[:, :15], use_cache=True).past_key_values
    assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), expected)
    more = torch.cat([expected, ids[:, :5]], 1)
    got = model.generate(more, past_key_values=cache, **OPTIONS)
    assert torch.equal(got, greedy_by_hand(model, more, 12))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), expected)


def test_generator_is_generate(model, ids):
    generator = Generator(model)
    for batch in (ids, ids, ids[:1], ids[:, :7]):
        got = generator.generate(batch, max_new_tokens=12)
        assert torch.equal(got, model.generate(batch, **OPTIONS))
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    got = generator.generate(ids, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **OPTIONS))


def logits_of(model, sequences):
    """Of the next token after each, read alone and at once."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([x])).logits[:, -1] for x in sequences])


def test_streams(model, ids, tmp_path):
    """Fed in pieces, marked, forked, selected, joined, saved: as if read at once."""
    rows = [row.tolist() for row in ids]
    stream = FracStream(model, batch_size=3).feed([rows[0][:5], rows[1][:1], rows[2][:9]])
    stream.feed([rows[0][5:], rows[1][1:20], rows[2][9:10]])
    held = [rows[0], rows[1][:20], rows[2][:10]]
    close(stream.logits, logits_of(model, held))
    mark, other = stream.mark(), stream.fork()
    stream.feed([[5, 6], [7], [8, 9, 10]])
    close(stream.logits, logits_of(model, [[*held[0], 5, 6], [*held[1], 7], [*held[2], 8, 9, 10]]))
    close(stream.rollback(mark).logits, logits_of(model, held))
    stream.save(tmp_path / "hybrid.stream")
    loaded = FracStream.load(tmp_path / "hybrid.stream", model)
    for continued in (stream, other, loaded):
        fed = continued.feed([[4], [4], [4, 11]])
        close(fed.logits, logits_of(model, [[*held[0], 4], [*held[1], 4], [*held[2], 4, 11]]))
    part = other.select([2, 0])
    assert part.nbytes < other.nbytes
    joined = FracStream.cat([part, FracStream(model).feed([3, 4]), other.select(1)])
    after = joined.feed([[12], [12], [12], [12]]).logits
    held = [[*held[2], 4, 11, 12], [*held[0], 4, 12], [3, 4, 12], [*held[1], 4, 12]]
    close(after, logits_of(model, held))
    with pytest.raises(ValueError, match="advance needs a model without attention_layers"):
        joined.advance(3)
    tokens = torch.stack([*FracStream(model).feed(rows[0]).generate(max_new_tokens=12, eos=False)])
    assert torch.equal(tokens[:, 0], model.generate(ids[:1], **OPTIONS)[0, -12:])


def test_a_stream_without_tokens(model, tmp_path):
    FracStream(model).save(tmp_path / "empty.stream")
    loaded = FracStream.load(tmp_path / "empty.stream", model)
    joined = FracStream.cat([loaded, FracStream(model).feed([5, 6, 7])])
    close(joined.feed([[3, 4], [8]]).logits, logits_of(model, [[3, 4], [5, 6, 7, 8]]))


def test_a_stream_of_another_model_is_refused(model, tmp_path):
    FracStream(model).feed([3, 4]).save(tmp_path / "hybrid.stream")
    other = make_hybrid(attention_layers=[0, 3])
    with pytest.raises(ValueError, match=r"attention_layers is \[1, 3\] there and \[0, 3\] here"):
        FracStream.load(tmp_path / "hybrid.stream", other)


def test_regrid_and_inspect_see_frac_layers_only(model, ids):
    longer = regrid(model, tau_max=2.0**17, num_modes=9)
    assert len(longer.layers) == 2
    for old, new in zip(model.model.layers, longer.model.model.layers, strict=True):
        if not isinstance(getattr(old, "mixer", None), FracMixer):
            assert torch.equal(old.mlp.up_proj.weight, new.mlp.up_proj.weight)
    assert longer.model(ids).logits.shape == (3, 40, 61)
    assert len(inspect_model(model, ids).layers) == 2


def test_flops_are_those_of_matrix_products(model):
    """Of an attention layer two for each element of its matrices, as torch counts them, too."""
    counts = []
    for layers in (None, [1], [1, 3]):
        counts.append(forward_flops(FracConfig(**{**SIZES, **LAYERS, "attention_layers": layers})))
    frac = (counts[0] - 2 * 16 * 61) // 4
    block = model.model.layers[1]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for linear in (x for x in block.modules() if isinstance(x, torch.nn.Linear)):
            linear(linear.weight.new_zeros(40, linear.in_features))
    attention = counter.get_total_flops() // 40
    assert counts[0] - counts[1] == counts[1] - counts[2] == frac - attention


def test_the_document_runs():
    document = Path(__file__).parents[2] / "docs" / "hybrid.md"
    (block,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/hybrid.md", "exec"), names)
    assert torch.equal(names["text"], greedy_by_hand(names["model"], names["prompt"], 20))
