"""Streams of hybrid models, whose keys and values grow: as if all had been read at once."""

import pytest
import torch

from flash_frac.inference import FracStream
from tests.models.hybrids import OPTIONS, close, make_hybrid


@pytest.fixture
def model():
    return make_hybrid()


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
