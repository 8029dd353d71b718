"""Streams in files: saved streams load bit-identically, and anything else is rejected."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flash_frac.inference import FracStream, storage
from flash_frac.inference.storage import fingerprint
from tests.inference.conftest import assert_same, take
from tests.models.conftest import make_model
from tests.models.hybrids import close, make_hybrid


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_save_and_load(tmp_path, ids, dtype):
    model, path = make_model(dtype), tmp_path / "a.stream"
    stream = FracStream(model, batch_size=3).feed(ids)
    stream.save(path)
    loaded = FracStream.load(path, model)
    assert_same(loaded, stream)
    assert torch.equal(take(loaded, 9), take(stream, 9))
    # Over the old file, and with nothing left beside it.
    stream.advance(2).save(path)
    assert_same(FracStream.load(path, model), stream)
    FracStream(model).save(path)
    assert_same(FracStream.load(path, model), FracStream(model))
    assert [file.name for file in tmp_path.iterdir()] == ["a.stream"]


def test_a_failed_save_leaves_the_old_file(tmp_path, stream, monkeypatch):
    path = tmp_path / "a.stream"
    stream.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("flash_frac.files.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        stream.advance(1).save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def rewrite(path, facts=None, change=None):
    """The same file with other facts, or a changed tensor."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if change is not None:
        content["1.recurrent"].view(-1)[change] += 1
    save_file(content, path, metadata | (facts or {}))


def test_damaged_files(tmp_path, stream):
    path = tmp_path / "a.stream"
    stream.save(path)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"something else", whole[:8] + whole[20:]):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"a.stream is not a complete safetensors file.*cut short"
        ):
            FracStream.load(path, stream.model)
    for changes in ({"change": 5}, {"facts": {"lengths": "[41, 40, 40]"}}):
        path.write_bytes(whole)
        rewrite(path, **changes)
        with pytest.raises(ValueError, match="is damaged: its content does not match its checksum"):
            FracStream.load(path, stream.model)
    path.write_bytes(whole)
    rewrite(path, {"version": "2"})
    with pytest.raises(ValueError, match=r"has format version 2, but .* reads version 1"):
        FracStream.load(path, stream.model)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"does not hold a stream, but other tensors \(weight\)"):
        FracStream.load(path, stream.model)
    with pytest.raises(FileNotFoundError):
        FracStream.load(tmp_path / "absent", stream.model)


def test_files_of_other_models(tmp_path, stream):
    path = tmp_path / "a.stream"
    stream.save(path)
    more = make_model(frac_num_modes=4)
    with pytest.raises(ValueError, match=r"another model: frac_num_modes is 8 there and 4 here\."):
        FracStream.load(path, more)
    with pytest.raises(ValueError, match=r"dt_max is 1.0 there and 0.5 here\."):
        FracStream.load(path, make_model(frac_dt_max=0.5))
    with pytest.raises(ValueError, match=r"dtype is torch.float64 there and torch.float32 here"):
        FracStream.load(path, make_model(torch.float32))
    with pytest.raises(ValueError, match=r"its tensors have other names, shapes or dtypes"):
        FracStream.load(path, make_model(frac_conv_bias=False))
    other = make_model()
    FracStream.load(path, other)
    with torch.no_grad():
        other.model.layers[1].mixer.out_proj.weight += 1e-9
    with pytest.raises(ValueError, match=r"it has the same shape but other weights"):
        FracStream.load(path, other)


def test_fingerprint_follows_the_weights(model):
    """Whether a tensor is written, replaced or large."""
    seen = {fingerprint(model)["weights"]}
    assert {fingerprint(model)["weights"], fingerprint(make_model())["weights"]} == seen
    with torch.no_grad():
        model.model.layers[0].mixer.dt_bias[0] += 1
    seen.add(fingerprint(model)["weights"])
    model.lm_head.weight.data = model.lm_head.weight * 2
    seen.add(fingerprint(model)["weights"])
    assert len(seen) == 3


MIXED = {"mixer_types": ["frac", "attention"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("there", "here", "problem"),
    [
        (
            {"attention_layers": [1, 3]},
            {"attention_layers": [0, 3]},
            r"attention_layers is \[1, 3\] there and \[0, 3\] here",
        ),
        ({"attention_layers": [1, 3]}, {}, r"attention_layers is \[1, 3\] there and None here"),
        (MIXED, {**MIXED, "attention_positions": "none"}, "is rope there and none here"),
        ({**MIXED, "attention_temperature_length": 8}, MIXED, "length is 8 there and None here"),
        ({**MIXED, "mlp_intermediate_size": 24}, MIXED, "intermediate_size is 24 there and None"),
        (
            {**MIXED, "mixer_types": ["frac", "sliding_attention"], "sliding_window": 7},
            {**MIXED, "mixer_types": ["frac", "sliding_attention"], "sliding_window": 8},
            "sliding_window is 7 there and 8 here",
        ),
        (
            {**MIXED, "mixer_types": ["frac", "sliding_attention"], "sliding_window": 7},
            {**MIXED, "mixer_types": ["attention", "sliding_attention"], "sliding_window": 7},
            r"mixer_types is \['frac', 'sliding_attention', .* there and \['attention'",
        ),
    ],
)
def test_files_of_other_mixed_models(tmp_path, there, here, problem):
    sizes = {"num_hidden_layers": 4}
    path = tmp_path / "a.stream"
    FracStream(make_model(**{**sizes, **there})).feed([3, 4]).save(path)
    with pytest.raises(ValueError, match=problem):
        FracStream.load(path, make_model(**{**sizes, **here}))


def test_older_files_of_hybrid_models(tmp_path, ids):
    """They had padding between keys, which `real` told apart, and one setting left out."""
    model, path = make_hybrid(), tmp_path / "a.stream"
    lengths = (40, 20, 10)
    stream = FracStream(model, batch_size=3)
    stream.feed([row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]).save(path)
    facts, tensors = storage.read_file(path, storage.STREAM)
    real = torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]
    for name, x in tensors.items():
        if name.endswith(("keys", "values")):
            rows = [x[n].roll(40 - length, 1) for n, length in enumerate(lengths)]
            tensors[name] = torch.stack(rows)
    settings = json.loads(facts["settings"]) | {"attention_intermediate_size": None}
    older = facts | {"settings": json.dumps(settings)}
    storage.write_file(path, storage.STREAM, older, tensors | {"real": real})
    loaded = FracStream.load(path, model)
    assert_same(loaded, stream)
    more = [[5], [6, 7], [8]]
    close(loaded.feed(more).logits, stream.feed(more).logits)
