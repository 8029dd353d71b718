"""The whole quickstart, on shortened addresses and for a few steps."""

import json
import math
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from flash_frac import quickstart
from flash_frac.data import byte_tokenizer
from flash_frac.inspect import inspect_model
from flash_frac.models import FracForCausalLM
from flash_frac.quickstart import corpus, figures
from flash_frac.train import load_recipe

SMALL = ["--sequence_length=16", "--max_steps=6", "--logging_steps=2", "--eval_steps=3"]


@pytest.fixture
def short_addresses(monkeypatch):
    whole = corpus.load()
    short = [corpus.Address(a.year, a.name, a.text[:500]) for a in whole]
    monkeypatch.setattr(corpus, "load", lambda: short)
    monkeypatch.setattr(quickstart, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(quickstart, "MEMORY_TOKENS", 400)


def test_everything_is_there(short_addresses, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "quickstart"
    drawn = mock.Mock(wraps=figures.draw_memory)
    monkeypatch.setattr(figures, "draw_memory", drawn)
    results = quickstart.run(str(folder), overrides=[*SMALL, "--disable_tqdm=true"])
    assert json.loads((folder / "results.json").read_text()) == results
    assert list(results["bits_per_byte"]) == ["16", "64", "256", "1024"]
    # Ten addresses of 500 characters and an end each.
    assert results["validation_bytes"] == 4 * 1024 and results["steps"] == 6
    # Hardly trained, it is near 8 bits; the trigram has counted.
    assert all(5 < bits < 8.5 for bits in results["bits_per_byte"].values())
    assert 2 < results["trigram_bits_per_byte"] < 5
    for name in ("loss.svg", "context.svg", "memory.svg", "recipe.yaml", "log.jsonl"):
        assert (folder / name).stat().st_size > 0
    printed = capsys.readouterr().out
    assert "trigram" in printed and str(folder) in printed and results["sample"] in printed
    for command in (f"chat {folder}/final", f"inspect {folder}/final", f"train {folder}/recipe"):
        assert f"  frac {command}" in printed

    model = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    ids = tokenizer("My fellow Americans", return_tensors="pt").input_ids
    assert ids.shape == (1, 19)
    with torch.no_grad():
        assert math.isfinite(model(ids, labels=ids).loss)
    assert_memory_is_measured(model, *drawn.call_args.args[1:])


def assert_memory_is_measured(model, lags, trained, untrained):
    """The numbers of the figure are what `inspect_model` gives, now and before training."""
    first = next(a.text for a in corpus.load() if a.year == corpus.FIRST_HELD_OUT_YEAR)
    ids = byte_tokenizer()(first[: quickstart.MEMORY_TOKENS], return_tensors="pt").input_ids
    torch.manual_seed(0)
    for network, drawn in ((model, trained), (FracForCausalLM(model.config), untrained)):
        report = inspect_model(network, ids)
        assert lags.tolist() == report.lags[1:]
        assert list(drawn) == list(range(model.config.num_hidden_layers))
        for layer in report.layers:
            heads = np.array([head.response for head in layer.heads])
            np.testing.assert_allclose(drawn[layer.number], heads[:, 1:] / heads[:, :1], rtol=1e-6)
    assert not np.allclose(trained[0], untrained[0], rtol=1e-3)


def test_another_run_is_left_alone(short_addresses, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("max_steps: 5\n")
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="already holds something else, so nothing was written"):
        quickstart.run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "recipe.yaml"]
    assert (tmp_path / "config.json").read_text() == "mine"
    with pytest.raises(ValueError, match=r"output_dir .* cannot be written to: .* is a file"):
        quickstart.run(tmp_path / "config.json" / "run")


def test_minutes_decide_on_the_steps(short_addresses, tmp_path, capsys):
    steps = yaml.safe_load((quickstart.HERE / "recipe.yaml").read_text())["max_steps"]
    for minutes, expected in ((quickstart.MINUTES, steps), (1.0, round(steps / 3)), (1e-9, 1)):
        recipe = load_recipe(quickstart._prepare(tmp_path, minutes))
        assert recipe.training.max_steps == expected
    # Complete: it names the model, the text and the folder by itself.
    assert recipe.data.data_files == [str(tmp_path / "data" / "train.jsonl")]
    other = load_recipe(tmp_path / "recipe.yaml", ["--output_dir", "longer", "--max_steps", "9"])
    assert (other.training.output_dir, other.training.max_steps) == ("longer", 9)
    with pytest.raises(ValueError, match="minutes must be positive"):
        quickstart.run(tmp_path, 0.0)
