"""Quantised weights in streams, generators and engines: recorded like plain ones, and saved."""

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

from flash_frac.inference import Engine, FracStream, Generator, Request, graphs
from flash_frac.inference.storage import fingerprint
from flash_frac.ops.sample import reference
from tests.inference.tape import Tape
from tests.models.conftest import make_model


def quantised(config=None, **changes):
    model = make_model(torch.float32, hidden_size=64, num_hidden_layers=2, **changes)
    quantize_(model.model, config or Int8WeightOnlyConfig())
    return model


@pytest.fixture
def recorded(monkeypatch):
    """Functions of graphs that were made since, on tapes."""
    made, make = [], Tape.__init__

    def counted(graph, function, *rest, **options):
        made.append(function)
        make(graph, function, *rest, **options)

    monkeypatch.setattr(Tape, "__init__", counted)
    monkeypatch.setattr(graphs, "Graph", Tape)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(reference, "_may_hold", lambda condition: True)
    return made


def without_graphs(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "DEVICES", ())
        return function()


IDS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(5))


def test_steps_are_recorded(recorded, monkeypatch):
    model = quantised()
    generator = Generator(model)
    expected = without_graphs(monkeypatch, lambda: Generator(model).generate(IDS, max_new_tokens=6))
    assert not recorded
    assert torch.equal(generator.generate(IDS, max_new_tokens=6), expected)
    assert recorded


def test_other_weights_are_recorded_again(recorded):
    """A graph reads values and scales where they were."""
    model, other = quantised(), make_model(torch.float32, hidden_size=64, num_hidden_layers=2)
    with torch.no_grad():
        for linear in (x for x in other.model.modules() if isinstance(x, torch.nn.Linear)):
            linear.weight.mul_(-1)
    quantize_(other.model, Int8WeightOnlyConfig())
    generator = Generator(model)
    generator.generate(IDS, max_new_tokens=6)
    expected = Generator(other).generate(IDS, max_new_tokens=6)
    made = len(recorded)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = other.model.get_submodule(name).weight
    assert torch.equal(generator.generate(IDS, max_new_tokens=6), expected)
    assert len(recorded) > made


def test_layouts_that_kernels_do_not_read_are_named(recorded, monkeypatch):
    warnings = []
    monkeypatch.setattr(graphs.logger, "warning_once", warnings.append)
    model = quantised(Int8WeightOnlyConfig(granularity=PerGroup(32)))
    Generator(model).generate(IDS, max_new_tokens=6)
    assert not recorded
    assert "model.layers.0.mixer.in_proj.weight is a Int8Tensor" in warnings[0]
    assert "Int8WeightOnlyConfig()" in warnings[0]


def test_streams_are_saved_with_their_model(tmp_path):
    model = quantised()
    stream = FracStream(model).feed(IDS[:1])
    stream.save(tmp_path / "a.stream")
    loaded = FracStream.load(tmp_path / "a.stream", model)
    assert torch.equal(loaded.logits, stream.logits)
    plain = make_model(torch.float32, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ValueError, match="its tensors have other names, shapes or dtypes"):
        FracStream.load(tmp_path / "a.stream", plain)


@torch.no_grad()
def test_a_fingerprint_knows_the_values_and_the_scales():
    model = quantised()
    before = fingerprint(model)
    weight = model.model.layers[1].mixer.out_proj.weight
    weight.scale.mul_(2)
    after = fingerprint(model)
    assert after["weights"] != before["weights"] and after["structure"] == before["structure"]
    weight.qdata.neg_()
    assert fingerprint(model)["weights"] != after["weights"]


def test_an_engine_answers_as_a_generator():
    model = quantised()
    expected = Generator(model).generate(IDS[:1], max_new_tokens=6)[0, IDS.shape[1] :].tolist()
    request = Request(prompt=IDS[0].tolist(), max_new_tokens=6)
    answer = [x for update in Engine(model, slots=2).stream(request) for x in update.tokens]
    assert answer == expected
