"""Reports of models are complete, finite, and equal to direct computations."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from flash_frac.data.tokenizer import byte_tokenizer
from flash_frac.inspect import (
    inspect_checkpoint,
    inspect_model,
    layer_kernel,
    layer_numbers,
    memory_statistics,
    write_report,
)
from flash_frac.inspect.figures import draw_layer
from flash_frac.inspect.statistics import visit_layers
from flash_frac.models import FracConfig, FracForCausalLM, regrid
from tests.tiny import tiny_config

from .conftest import tiny


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("changes", [{}, {"frac_dt_max": 50.0}, {"frac_bank": "per_head"}], ids=str)
def test_distributions_equal_a_direct_computation(changes):
    model, seen = tiny(frac_rho_eps=0.1, **changes).double(), []
    tokens = torch.randint(0, 32, (2, 50))
    for block in model.model.layers:
        block.mixer.dt_bias.data += 8
    visit_layers(model, tokens, lambda n, mixer, inner_x, u: seen.append((mixer, inner_x, u)))
    layer = inspect_model(model, tokens).layers[1]
    mixer, inner_x, u = seen[1]
    with torch.no_grad():
        dyn = mixer.dynamics(mixer.dyn_proj(inner_x))
        controls = mixer.controls(inner_x, u)
    tau = mixer.base_log_tau.double().exp()
    np.testing.assert_allclose([head.tau for head in layer.heads], tau.expand(2, -1))
    np.testing.assert_allclose(layer.tau, tau.expand(2, -1).log().mean(0).exp())
    assert (dyn.delta.max() > 1) == ("frac_dt_max" in changes)
    scale = tau / (dyn.delta * dyn.lam ** (1 / dyn.alpha))[..., None]
    values = {"delta": dyn.delta, "alpha": dyn.alpha, "lambda": dyn.lam, "timescale": scale}
    for name, found in values.items():
        for h, head in enumerate(layer.heads):
            one = np.log(found[:, :, h].flatten().numpy())
            expected = np.exp(np.quantile(one, [0.05, 0.25, 0.5, 0.75, 0.95]))
            np.testing.assert_allclose(head.distributions[name].quantiles, expected, rtol=1e-9)
            assert sum(head.distributions[name].counts) == len(one)
        assert sum(layer.distributions[name].counts) == found.numel()
        edges = np.array(layer.edges[name])
        assert len(edges) == 41 and edges[0] <= found.min() and found.max() <= edges[-1]
    np.testing.assert_allclose([h.read for h in layer.heads], controls.read.mean((0, 1)))
    np.testing.assert_allclose([h.write for h in layer.heads], controls.write.mean((0, 1)))


def test_clamps_agree_with_the_statistics():
    model, tokens = tiny(frac_rho_eps=0.1).double(), torch.randint(0, 32, (2, 50))
    for layer, known in zip(
        inspect_model(model, tokens).layers, memory_statistics(model, tokens), strict=True
    ):
        assert layer.clamped_fast > 0 and layer.clamped_slow > 0
        assert layer.clamped_fast + layer.clamped_slow == pytest.approx(known.clamped_share)
    free = inspect_model(tiny(frac_rho_eps=0.0), tokens).layers[0]
    assert (free.clamped_fast, free.clamped_slow) == (0, 0)


def test_shares_of_modes_sum_to_one(report):
    for layer in report.layers:
        for head in layer.heads:
            assert sum(head.read_share) == pytest.approx(1)
            assert sum(head.write_share) == pytest.approx(1)
            assert sum(head.read) == pytest.approx(1, rel=1e-5) and sum(head.write) < 1


def test_the_mean_response_is_that_of_the_heads(report):
    for layer in report.layers:
        heads = np.mean([head.response for head in layer.heads], 0)
        np.testing.assert_allclose(layer.response, heads)
    assert report.lags[0] == 0 and report.num_rows == 2
    assert all(layer.sources[:2] == [192, 190] for layer in report.layers)


@pytest.mark.parametrize(
    "changes",
    [{"frac_alpha_fixed": 0.7}, {"frac_rw_normalization": "none"}, {"frac_num_modes": 1}],
)
def test_odd_models_have_finite_reports(changes, tmp_path):
    report = inspect_model(tiny(**changes), torch.randint(0, 32, (1, 40)))
    assert all(math.isfinite(number) for number in numbers(report.as_dict()))
    draw_layer(tmp_path / "layer.svg", report, 1)


def test_written_report_is_complete_and_finite(report, tmp_path):
    page = write_report(report, tmp_path / "new" / "folder")
    names = {
        "report.json",
        "index.html",
        "alpha.svg",
        "horizon.svg",
        "responses.svg",
        "layer_00.svg",
        "layer_01.svg",
    }
    assert {path.name for path in page.parent.iterdir()} == names
    data = json.loads((page.parent / "report.json").read_text())
    assert data == report.as_dict() and all(math.isfinite(number) for number in numbers(data))
    assert len(data["layers"]) == 2 and len(data["layers"][0]["sources"]) == len(data["lags"])
    head = data["layers"][1]["heads"][1]
    assert len(head["response"]) == len(data["lags"]) and len(head["read"]) == 5
    assert set(head["horizon"]) == {"half", "ninety", "mean", "last_half"}
    assert set(head["distributions"]) == {"delta", "alpha", "lambda", "timescale"}
    assert {"exponent", "first", "last", "rms_log", "stretch"} <= set(head["power"])
    for path in page.parent.glob("*.svg"):
        assert path.read_text().rstrip().endswith("</svg>")


def test_a_checkpoint_with_its_tokenizer(tmp_path):
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    FracForCausalLM(FracConfig(vocab_size=259, **settings)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    passage = "To be, or not to be. " * 20
    report = inspect_checkpoint(
        tmp_path / "model", tmp_path / "out", text=passage, text_name="Hamlet", num_tokens=100
    )
    assert (report.num_tokens, report.text, len(report.layers)) == (100, "Hamlet", 1)
    assert report.name.endswith("/model") and (tmp_path / "out" / "index.html").exists()
    with pytest.raises(ValueError, match="text must have at least 16 tokens, got 5"):
        inspect_checkpoint(tmp_path / "model", tmp_path / "out", text="short")
    with pytest.raises(ValueError, match="num_tokens must be at least 16"):
        inspect_checkpoint(tmp_path / "model", tmp_path / "out", text=passage, num_tokens=4)


def test_errors_name_the_remedy():
    model, tokens = tiny(), torch.randint(0, 32, (1, 20))
    with pytest.raises(ValueError, match="pass the model inside"):
        inspect_model(nn.DataParallel(model), tokens)
    with pytest.raises(ValueError, match=r"pass ids\[None\]"):
        inspect_model(model, tokens[0])
    with pytest.raises(ValueError, match="at least 16 tokens per row"):
        inspect_model(model, tokens[:, :15])
    with pytest.raises(ValueError, match="factor must be above 1"):
        inspect_model(model, tokens, factor=0.9)


def test_layers_have_their_numbers_in_the_model():
    """In a mixed model too: what the configuration calls layer 2 is layer 2 everywhere."""
    types = ["frac", "attention", "frac", "delta"]
    mixed = FracForCausalLM(tiny_config(num_hidden_layers=4, mixer_types=types))
    tokens = torch.randint(3, 200, (1, 64))
    report = inspect_model(mixed, tokens)
    assert [(layer.number, layer.type) for layer in report.layers] == list(enumerate(types))
    assert layer_numbers(mixed) == [0, 2]
    numbers = []
    visit_layers(mixed, tokens, lambda n, mixer, inner_x, u: numbers.append((n, mixer)))
    assert numbers == [(n, mixed.model.layers[n].mixer) for n in (0, 2)]
    lags = np.arange(5)
    last = layer_kernel(mixed, -1, lags, tokens)
    assert np.array_equal(layer_kernel(mixed, 2, lags, tokens), last)
    with pytest.raises(ValueError, match=r"layer must be a Frac layer, one of \[0, 2\], got 1"):
        layer_kernel(mixed, 1, lags, tokens)
    table = str(regrid(mixed, num_modes=8)).splitlines()[2:-1]
    assert [int(line.split()[0]) for line in table] == [0, 2]


def test_a_mixed_report_is_complete_and_finite(mixed_report, tmp_path):
    write_report(mixed_report, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == mixed_report.as_dict() and all(math.isfinite(x) for x in numbers(data))
    frac, delta, sliding, full = data["layers"]
    assert [len(layer["heads"]) for layer in data["layers"]] == [2, 3, 2, 2]
    assert set(frac["distributions"]) == {"delta", "alpha", "lambda", "timescale"}
    assert set(delta["distributions"]) == set(delta["edges"]) == {"half_life", "beta"}
    assert delta["tau"] == [] and delta["clamped_fast"] is None and delta["distances"] is None
    for layer in (sliding, full):
        assert layer["distributions"] == {} and layer["heads"][0]["read"] is None
        assert len(layer["edges"]["distance"]) == len(layer["distances"]["shares"]) + 1
        for part in (layer, *layer["heads"]):
            assert sum(part["distances"]["shares"]) == pytest.approx(1, rel=1e-5)
    assert sliding["distances"]["beyond"] == {"16": 0, "64": 0}
    assert full["distances"]["beyond"]["16"] > 0.2
    texts = [path.read_text() for path in sorted(tmp_path.glob("layer_*.svg"))]
    assert len(texts) == 4 and all(text.rstrip().endswith("</svg>") for text in texts)
    for n, name in enumerate(("", ", delta", ", sliding attention", ", attention")):
        assert f"Memory of layer {n}{name}<" in texts[n]


def test_models_without_frac_layers(tmp_path):
    model = FracForCausalLM(tiny_config(mixer_types=["attention", "delta"]))
    tokens = torch.randint(3, 200, (1, 32))
    write_report(inspect_model(model, tokens), tmp_path)
    assert not (tmp_path / "alpha.svg").exists() and (tmp_path / "responses.svg").exists()
    assert memory_statistics(model, tokens) == []
    with pytest.raises(ValueError, match=r"layer must be a Frac layer, one of \[\], got -1"):
        layer_kernel(model, -1, np.arange(3), tokens)


def test_a_page_without_matplotlib(report, tmp_path, monkeypatch, caplog):
    """The page is there, and the log says what the figures need."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write_report(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "report.json"}
    assert f"{page} has no figures next to it" in caplog.text
    assert "pip install 'flash-frac[plot]'" in caplog.text


def test_two_checkpoints_are_compared(tmp_path):
    """The first needs no tokenizer; files of the report are those of the second."""
    before, after, out = tmp_path / "before", tmp_path / "after", tmp_path / "out"
    FracForCausalLM(tiny_config()).save_pretrained(before)
    FracForCausalLM(tiny_config(initializer_range=0.2)).save_pretrained(after)
    byte_tokenizer().save_pretrained(after)
    report = inspect_checkpoint(after, out, before=before, text="a text " * 20)
    stored = {name: json.loads((out / f"{name}.json").read_text()) for name in ("report", "before")}
    assert stored["report"] == report.as_dict() and stored["before"]["name"].endswith("before")
    assert stored["before"]["lags"] == stored["report"]["lags"]
    drawing = (out / "before_after.svg").read_text()
    for words in ("before: ", "after: ", "Median Δ", "Median α", "Median λ", "Memory of layers"):
        assert f"{words}" in drawing, words
    page = (out / "index.html").read_text()
    assert '"before":{"name"' in page


def test_nothing_stays_of_an_earlier_report(report, tmp_path, monkeypatch):
    """Neither a comparison nor the figures of a deeper model; other files are left alone."""
    for name in ("before.json", "before_after.svg", "layer_07.svg", "layer_x.svg", "notes.txt"):
        (tmp_path / name).write_text("earlier")
    write_report(report, tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert not found & {"before.json", "before_after.svg", "layer_07.svg"}
    assert found >= {"layer_00.svg", "responses.svg", "layer_x.svg", "notes.txt"}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(report, tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"index.html", "report.json", "layer_x.svg", "notes.txt"}


def test_checkpoints_that_cannot_be_compared(report, mixed_report, tmp_path):
    with pytest.raises(
        ValueError, match=r"cannot be compared: .*the same layers and heads; inspect"
    ):
        write_report(mixed_report, tmp_path, before=report)
    other = dataclasses.replace(report, lags=report.lags[:-1])
    with pytest.raises(ValueError, match="a comparison needs the same number of tokens"):
        write_report(report, tmp_path, before=other)
    assert not list(tmp_path.iterdir())
