"""Streams and generators of mixed models equal reading everything at once."""

import copy
import logging

import pytest
import torch

import flash_frac.inference.state
from flash_frac.inference import FracStream, Generator
from flash_frac.inference.state import mixers
from flash_frac.layers import DeltaMixer, FracMixer
from flash_frac.models import buffered_attention, buffers
from flash_frac.models.buffers import rounded
from tests.errors import assert_as_good
from tests.inference.conftest import assert_same, take
from tests.models.hybrids import KINDS, OPTIONS, close, make_hybrid, make_kind


@pytest.fixture(params=KINDS)
def model(request):
    return make_kind(request.param)


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
    assert_same(loaded, stream)
    for continued in (stream, other, loaded):
        fed = continued.feed([[4], [4], [4, 11]])
        close(fed.logits, logits_of(model, [[*held[0], 4], [*held[1], 4], [*held[2], 4, 11]]))
    part = other.select([2, 0])
    assert part.nbytes < other.nbytes
    joined = FracStream.cat([part, FracStream(model).feed([3, 4]), other.select(1)])
    after = joined.feed([[12], [12], [12], [12]]).logits
    held = [[*held[2], 4, 11, 12], [*held[0], 4, 12], [3, 4, 12], [*held[1], 4, 12]]
    close(after, logits_of(model, held))
    tokens = take(FracStream(model).feed(rows[0]), 12)
    assert torch.equal(tokens, model.generate(ids[:1], **OPTIONS)[:, -12:])


@pytest.mark.parametrize("piece", [1, 7])
def test_pieces(model, ids, monkeypatch, piece):
    """Short pieces, buffers that grow many times, and masks of a few queries at a time."""
    monkeypatch.setattr(flash_frac.inference.state, "PIECE", piece)
    monkeypatch.setattr(buffers, "LEAST_ROOM", 8)
    monkeypatch.setattr(buffered_attention, "MASK_ELEMENTS", 64)
    stream = FracStream(model, batch_size=3).feed(ids)
    close(stream.logits, logits_of(model, ids.tolist()))
    stream.feed([[5, 6, 7], [8], [9] * 30])
    held = [[*row, *new] for row, new in zip(ids.tolist(), ([5, 6, 7], [8], [9] * 30), strict=True)]
    close(stream.logits, logits_of(model, held))


def test_a_future_that_was_left(model, ids):
    """A mark holds no keys and values, and what was written after it disturbs nobody."""
    stream = FracStream(model, batch_size=3).feed(ids)
    mark, fork = stream.mark(), stream.fork()
    expected = take(fork.fork(), 9)
    take(stream.feed(ids), 3)
    take(fork.feed(ids.flip(1)), 3)
    assert torch.equal(take(stream.rollback(mark), 9), expected)
    assert torch.equal(take(fork.rollback(mark), 9), expected)
    assert torch.equal(take(stream.rollback(mark), 9), expected)


def test_an_interrupted_feed(model, ids):
    stream = FracStream(model, batch_size=3).feed(ids)
    expected = take(stream.fork(), 9)

    def interrupt(*_):
        raise KeyboardInterrupt

    for inputs in (ids, ids[:, :1]):
        hook = model.model.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.feed(inputs)
        hook.remove()
    assert torch.equal(take(stream, 9), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_generator(model, ids, monkeypatch, padded):
    """Prompts in pieces and padded, with room that ends on the way: tokens of `generate`."""
    monkeypatch.setattr("flash_frac.inference.generator.PIECE", 17)
    monkeypatch.setattr(buffers, "LEAST_ROOM", 8)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :13], mask[2, :39] = 0, 0
    made = Generator(model).generate(ids, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(made, model.generate(ids, attention_mask=mask, **OPTIONS))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["attention", "all"])
def test_low_precision_on_a_gpu(ids, monkeypatch, kind):
    """Prompts in pieces without a mask in memory, and tokens by our kernel: as good as one pass."""
    monkeypatch.setattr("flash_frac.inference.generator.PIECE", 13)
    ids, sizes = ids.cuda(), {"hidden_size": 32, "num_attention_heads": 4, "attention_head_dim": 16}
    model = make_kind(kind, torch.bfloat16, **sizes).cuda()
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        once, best = (x(ids).logits[:, -1] for x in (model, exact))
        assert_as_good(Generator(model).prefill(ids), once, best, dtype=torch.bfloat16)
        stream = FracStream(model, batch_size=3).feed(ids[:, :20])
        for token in ids[:, 20:].split(1, 1):
            stream.feed(token)
    assert_as_good(stream.logits, once, best, dtype=torch.bfloat16)


def test_memory(ids, monkeypatch):
    """Layers that see all tokens grow, in steps; sliding ones do not."""
    monkeypatch.setattr(buffers, "LEAST_ROOM", 8)
    sizes = {}
    for kind in KINDS:
        stream = FracStream(make_kind(kind), batch_size=3)
        sizes[kind] = [stream.nbytes, stream.feed(ids).nbytes, stream.feed(ids).nbytes]
        if "attention" in stream.model.config.mixer_types:
            empty, once, twice = sizes[kind]
            assert twice - once == once - empty > 0
            assert stream._now.cache.full.size == rounded(80) == 80
        else:
            assert len(set(sizes[kind])) == 1
    assert sizes["sliding"][0] > sizes["mlp"][0] // 2


def test_room():
    assert [rounded(n) for n in (1, 256, 257, 320, 321, 1000, 1025)] == [
        *(256, 256, 320, 320, 384, 1024, 1280)
    ]
    found = {rounded(n) for n in range(257, 65537)}
    assert len(found) == 32 and all(rounded(n) == n for n in found)


def test_max_length(ids):
    model = make_hybrid()
    made = Generator(model, max_length=50)
    assert torch.equal(
        made.generate(ids, max_new_tokens=10), model.generate(ids, **OPTIONS)[:, :50]
    )
    assert made._slots.cache.full.size == 50
    with pytest.raises(ValueError, match=r"max_length \(50\) must be at least 51, for prompts of"):
        made.generate(ids, max_new_tokens=11)
    with pytest.raises(ValueError, match="max_length must be None or at least 1, got 0"):
        Generator(model, max_length=0)


def test_no_room_is_an_error(ids):
    """Buffers are never overrun in silence."""
    model = make_hybrid()
    cache = flash_frac.inference.state.empty_cache(model, 3)
    with pytest.raises(ValueError, match=r"room for 0 tokens and hold 0; call reserve\(40\)"):
        model(ids, past_key_values=cache)


def keys_and_values(stream):
    cache = stream._now.cache
    return [x for pair in (*cache.rings.values(), *cache.full.layers.values()) for x in pair]


def test_advance_moves_what_can_fade(ids, caplog):
    """And leaves keys and values, which it says once."""
    model = make_kind("all")
    stream = FracStream(model, batch_size=3).feed(ids)
    kept = [x.clone() for x in keys_and_values(stream)]
    before = [state.clone() for state in stream.state]
    # warning_once remembers messages for as long as the process lives.
    flash_frac.inference.state.logger.warning_once.cache_clear()
    logging.getLogger("flash_frac.inference").propagate = True
    with caplog.at_level(logging.WARNING):
        stream.advance(2.5).advance(1)
    assert caplog.text.count("advance leaves the attention layers [2, 3] unchanged") == 1
    for mixer, old, new in zip(mixers(model), before, stream.state, strict=True):
        factor = torch.exp(3.5 * mixer.idle_log_decay())[..., None]
        torch.testing.assert_close(new.recurrent, factor * old.recurrent, rtol=1e-12, atol=0)
        assert (factor < 1).all() and not new.conv.any()
    assert [type(mixer) for mixer in mixers(model)] == [FracMixer, DeltaMixer]
    assert all(torch.equal(x, y) for x, y in zip(kept, keys_and_values(stream), strict=True))
    assert stream.logits is None and stream.feed([[5], [6], [7]]).lengths == (41, 41, 41)


def test_a_stream_without_tokens(model, tmp_path):
    FracStream(model).save(tmp_path / "empty.stream")
    loaded = FracStream.load(tmp_path / "empty.stream", model)
    joined = FracStream.cat([loaded, FracStream(model).feed([5, 6, 7])])
    close(joined.feed([[3, 4], [8]]).logits, logits_of(model, [[3, 4], [5, 6, 7, 8]]))
