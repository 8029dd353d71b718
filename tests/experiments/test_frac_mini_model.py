"""frac-mini from tokens to a model card, on a tiny text; and typical use of the result."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flash_frac.models  # noqa: F401
from experiments.frac_mini import card, ngram, run
from experiments.frac_mini.clean import Document
from experiments.frac_mini.fetch import DATA
from experiments.frac_mini.models import make_config, make_model
from experiments.frac_mini.prepare import read_corpus, write_corpus
from flash_frac.files import read_table
from tests.commands import frac

pytest.importorskip("matplotlib")

OPTIONS = ["--smoke", "--length", "32", "--batch-size", "2", "--measurements", "3", "--epochs", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of `prepare` and `ngram`, of a text of a few words."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = ["the", "old", "man", "said", "that", "evening", "came", "and", "went", "home"]
    splits = ["train"] * 6 + ["validation", "test"]
    texts = [" ".join(rng.choice(words, 150)) + "\n" for _ in splits]
    pairs = zip(splits, texts, strict=True)
    write_corpus(folder, [Document(f"sotu/{n}", s, t) for n, (s, t) in enumerate(pairs)], 270)
    ngram.main(["--data", str(folder)])
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of `run`."""
    folder = tmp_path_factory.mktemp("run")
    run.main(["--data", str(data), "--out", str(folder), *OPTIONS])
    return folder


@pytest.fixture(scope="module")
def model_folder(data, trained, tmp_path_factory):
    """The folder of `card`."""
    folder = tmp_path_factory.mktemp("models") / "frac-mini"
    options = ["--data", str(data), "--out", str(folder)]
    card.main([str(trained), *options, "--new-tokens", "5", "--memory-tokens", "64"])
    return folder


def test_the_best_weights_are_kept(data, trained):
    found = json.loads((trained / "results.json").read_text())
    _, rows = read_table(trained / "curve.csv")
    assert len(rows) == 6
    for name, facts in found["models"].items():
        own = {int(row["step"]): float(row["validation"]) for row in rows if row["model"] == name}
        assert facts["best_step"] == min(own, key=own.__getitem__)
        assert math.isclose(facts["validation"], min(own.values()), abs_tol=1e-5)
        # It learns: a model that knows nothing needs log2(270) bits a token.
        assert facts["test"] < own[min(own)] < math.log2(270)
    # What is measured is what is saved.
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    assert model.dtype == torch.bfloat16
    for split in ("validation", "test"):
        again = run.bits_per_byte(run.LibraryModel(model), read_corpus(data), split, 32)
        assert math.isclose(again, found["models"]["frac_mini"][split], rel_tol=1e-6)
    assert found["finished"]


def test_a_run_that_is_cut_off_leaves_its_best_model(data, tmp_path, monkeypatch):
    """Interrupted at the last validation, after two of each model."""
    append = run.Table.append

    def cut_off(table, rows):
        if len(table.rows) == 4:
            raise KeyboardInterrupt
        append(table, rows)

    monkeypatch.setattr(run.Table, "append", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run.main(["--data", str(data), "--out", str(tmp_path), *OPTIONS, "--epochs", "0.4"])
    found = json.loads((tmp_path / "results.json").read_text())
    assert not found["finished"] and found["models"].keys() == {"frac_mini", "gated_deltanet"}
    _, rows = read_table(tmp_path / "curve.csv")
    assert found["models"]["frac_mini"]["best_step"] == int(rows[-2]["step"])
    model, corpus = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), read_corpus(data)
    again = run.bits_per_byte(run.LibraryModel(model), corpus, "test", 32)
    assert math.isclose(again, found["models"]["frac_mini"]["test"], rel_tol=1e-6)
    counted = json.loads((data / "ngram.json").read_text())["bits_per_byte"]
    assert "until the run was cut off" in card.card(found, counted, corpus, ["", "", ""])


def test_bits_per_byte_count_every_token_once(data):
    corpus = read_corpus(data)
    model = make_model(make_config("frac_mini", 270, smoke=True), seed=0).eval()
    ids = torch.from_numpy(np.concatenate([[run.EOS], corpus.test]).astype(np.int64))
    losses = torch.nn.functional.cross_entropy(
        model(ids[None, :-1])[0], ids[1:], reduction="sum"
    ).item()
    expected = losses / math.log(2) / corpus.facts["splits"]["test"]["bytes"]
    whole = run.bits_per_byte(model, corpus, "test", len(ids) - 1)
    assert math.isclose(whole, expected, rel_tol=1e-5)
    assert math.isclose(run.bits_per_byte(model, corpus, "test", 10**6), expected, rel_tol=1e-5)
    # Shorter windows forget, and leave nothing out.
    parts = run.bits_per_byte(model, corpus, "test", 7)
    assert parts != whole and math.isclose(parts, whole, rel_tol=0.2)


def test_epochs_differ_in_where_rows_begin():
    _, plan = run.parse(["--out", "x", *OPTIONS])
    starts = run.random_starts(1000, plan)
    assert starts.shape == (31, 2) and starts.min() >= 0 and starts.max() + 33 <= 1000
    rows = (1000 - 1) // 32 - 1
    first, second = starts.flatten()[:rows], starts.flatten()[rows : 2 * rows]
    assert len(first.unique()) == rows and len((first % 32).unique()) == 1
    assert first[0] % 32 != second[0] % 32
    with pytest.raises(SystemExit, match="--batch-size 2 rows of --length 32 need more than"):
        run.random_starts(80, plan)


def test_epochs_are_as_many_as_fit(data, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PACE_STEPS", 2)
    _, plan = run.parse(["--out", str(tmp_path), *OPTIONS])
    corpus, cpu = read_corpus(data), torch.device("cpu")
    assert run.epochs_that_fit(plan, 60, corpus, cpu) == plan.epochs == 2
    with pytest.raises(SystemExit, match=r"--minutes 0.001 is too short for one epoch"):
        run.epochs_that_fit(plan, 0.001, corpus, cpu)


def test_a_run_is_not_overwritten(data, trained):
    with pytest.raises(SystemExit, match=r"curve.csv exists; choose another folder with --out"):
        run.main(["--data", str(data), "--out", str(trained), *OPTIONS])


def test_the_card_has_numbers_and_samples(data, trained, model_folder, tmp_path):
    text = (model_folder / "README.md").read_text()
    found = json.loads((trained / "results.json").read_text())["models"]
    for name in ("frac_mini", "gated_deltanet"):
        assert f"{found[name]['test']:.3f}" in text
    counted = json.loads((data / "ngram.json").read_text())["bits_per_byte"]
    assert f"{counted['test']:.3f}" in text
    assert text.count(card.PROMPT) == 1 + 3 and "Seed 2" in text
    # Every placeholder has a value, and lines of prose fit.
    assert not [name for name in ("[DATA]", "[TEST]", "[SAMPLES]", "[COMMAND]") if name in text]
    assert max(len(x) for x in text.split("\n") if not x.startswith("|")) <= 120
    for figure in ("curves.svg", "memory.svg"):
        assert f"]({figure})" in text and (model_folder / figure).read_text().startswith("<?xml")
    with pytest.raises(SystemExit, match=r"results.json must exist; run experiments.frac_mini.run"):
        card.main([str(tmp_path), "--data", str(data)])


def test_weights_too_large_for_a_repository_are_refused(trained, monkeypatch):
    monkeypatch.setattr(card, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"model.safetensors must have at most 1,000 bytes, got"):
        card.check_weights(trained / "model" / "model.safetensors")


def test_samples_come_from_the_cpu_on_any_machine(model_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert card.open_stream(model_folder).model.device.type == "cpu"
    monkeypatch.undo()
    assert len(card.samples(model_folder, 2)) == len(card.SEEDS)


def use(folder, out):
    """What users do with a folder of `card`; what `frac generate` writes by the seed 1."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the old man", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("the old man")
    assert answer.shape[1] > ids.shape[1]
    talk = frac("chat", folder, "--max-new-tokens", "3", stdin=b"the old man\n")
    assert talk.returncode == 0 and talk.stdout.strip(), talk.stderr
    seen = frac("inspect", folder, "--out", out, "--tokens", "64")
    assert seen.returncode == 0 and (out / "index.html").exists(), seen.stderr
    options = ["--prompt", card.PROMPT, "--seed", "1", "--max-new-tokens", "5"]
    written = frac("generate", folder, *options)
    assert written.returncode == 0, written.stderr
    return written.stdout


def test_users_load_and_ask_it(model_folder, tmp_path):
    written = use(model_folder, tmp_path / "memory")
    # The sample of that seed in the card.
    shown = (model_folder / "README.md").read_text().partition("Seed 1:\n\n```text\n")[2]
    assert "".join(written.split()) == "".join(shown.partition("```")[0].split())


def test_the_data_folder_is_ignored_by_git():
    ignored = (DATA.parents[1] / ".gitignore").read_text().split()
    assert "/data/" in ignored and "/models/" not in ignored and "models/" not in ignored
