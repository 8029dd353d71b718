"""Rows of experiments/evaluation for tiny models, beside scores by chance."""

import csv
import json

import pytest

from experiments.evaluation import run, summary, texts
from experiments.evaluation.chance import chance_of
from experiments.evaluation.one_sample import time_one_sample
from experiments.evaluation.toy import toy_checkpoint, toy_data
from flash_frac.evals import long_perplexity, niah
from flash_frac.evals.suites import SUITES
from flash_frac.recipes import find_config

SHAPE = find_config("frac-tiny")


def read(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint `tiny` and local files `data`."""
    folder = tmp_path_factory.mktemp("evaluation")
    toy_checkpoint(folder / "tiny")
    toy_data(folder / "data")
    return folder


def test_smoke(tmp_path):
    run.main(["--smoke", "--commit", "abc", "--out", str(tmp_path)])
    rows = {(row["suite"], row["task"], row["metric"]): row for row in read(tmp_path)}
    assert set(rows) == {
        *(("niah", f"niah_single_{n}", "accuracy") for n in (1, 2, 3)),
        ("longppl", "river", "ppl"),
        ("longppl", "river", "ppl_last"),
        ("lm", "piqa", "acc"),
    }
    assert {row["commit"] for row in rows.values()} == {"abc"}
    assert {row["name"] for row in rows.values()} == {"tiny"}
    assert rows["lm", "piqa", "acc"]["chance"] == "50"
    assert rows["niah", "niah_single_1", "accuracy"]["chance"] == "0"
    # Weights at their start know nothing: all 259 tokens are about as likely.
    row = rows["longppl", "river", "ppl"]
    assert row["chance"] == "259" and float(row["value"]) == pytest.approx(259, rel=0.05)
    assert all(int(row["tokens_read"]) > 0 and row["samples"] for row in rows.values())


def test_the_readme_has_the_numbers_of_the_tables(capsys):
    text = (run.HERE / "README.md").read_text()
    summary.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 2 + 9 + 2 + 7 + 2
    for line in lines:
        assert line in text


def test_a_share_has_the_error_of_a_coin():
    """sqrt(p (1 - p) / n), also where the README writes it beside a score."""
    assert summary.share_error(50.0, 100) == pytest.approx(5)
    text = (run.HERE / "README.md").read_text()
    (row,) = [row for row in read(run.HERE) if row["task"] == "hellaswag"]
    error = summary.share_error(float(row["value"]), int(row["samples"]))
    assert f"{float(row['value']):.2f} ± {error:.2f}" in text and f"{error:.2f}" == "0.44"


def test_rows_are_of_what_was_asked_for(place, tmp_path, monkeypatch):
    """A finished run is not measured again, and lengths of other runs are left out."""
    arguments = [str(place / "tiny"), "--data-dir", str(place / "data"), "--suites", "longppl"]
    arguments += ["--work", str(tmp_path / "work"), "--lengths"]
    run.main([*arguments, "64", "128", "--name", "a", "--out", str(tmp_path)])
    before = read(tmp_path)
    assert [row["length"] for row in before] == ["64", "64", "128", "128"]
    monkeypatch.setattr(long_perplexity, "long_perplexity", None)
    run.main([*arguments, "128", "--name", "b", "--out", str(tmp_path / "other")])
    assert [row | {"name": "a"} for row in read(tmp_path / "other")] == before[2:]


def test_chance_counts_the_choices_of_the_very_examples(tmp_path):
    """Half of the questions have two choices, half have four; then only the first."""
    rows = [
        {
            "question": "Which?",
            "choices": {"text": list("abcd")[:num], "label": list("ABCD")[:num]},
            "answerKey": "A",
        }
        for num in (2, 4)
    ]
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "arc_easy.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    suite = SUITES["lm"]
    unit = suite.units(("arc_easy",))[0]
    common = {"data_dir": tmp_path, "vocab_size": 10}
    metric = unit.task.metrics[0]
    assert chance_of(suite, unit, metric, limit=None, **common) == (1 / 2 + 1 / 4) / 2
    assert chance_of(suite, unit, metric, limit=1, **common) == 1 / 2
    lambada = suite.units(("lambada_openai",))[0]
    values = [chance_of(suite, lambada, m, limit=None, **common) for m in lambada.task.metrics]
    assert values == [None, 0.0]


def test_one_sample(tmp_path):
    run.main(["--shape", str(SHAPE), "--one-sample", "1024", "--out", str(tmp_path)])
    (row,) = read(tmp_path)
    assert (row["name"], row["task"], row["length"]) == ("frac-tiny-shape", "niah_single_1", "1024")
    assert row["metric"] == "seconds" and float(row["value"]) > 0 and row["chance"] == ""
    taken = time_one_sample(SHAPE, 1024, "bytes")
    # With the beginning of the answer, which RULER does not count, and 128 tokens to write.
    assert 700 < taken.tokens_read < 1024 and taken.tokens_written == niah.ANSWER_TOKENS
    assert 0 < taken.prompt_seconds < taken.seconds


@pytest.mark.parametrize(
    "arguments", [[], ["--shape", "x"], ["folder"], ["--one-sample", "512", "--data-dir", "x"]]
)
def test_what_is_missing_is_told(arguments, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert "--shape" in capsys.readouterr().err


def test_texts_are_not_of_the_sample(tmp_path, monkeypatch, capsys):
    """Numbers 4n + 3 are never trained on: 3 is to be read, 7 and 11 make the haystack."""
    monkeypatch.setattr(texts, "LONG", (3,))
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    prose = [" ".join(words[i : i + 60]) + "." for i in (0, 20, 40)]
    bodies = {
        1: " ".join(words[:30]),
        3: " ".join(words[:38]),
        4: prose[2],
        7: f"1. Title\n\n{prose[0]}\n\n{prose[0]} Copyright {prose[1]}\n\n    x = 17;  " * 2,
        11: f"{prose[1]}\n\n{prose[0]}\n\nToo short.",
    }
    lines = [json.dumps({"name": f"rfc{n}", "text": text}) + "\n" for n, text in bodies.items()]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    texts.main([str(tmp_path / "all.jsonl"), str(tmp_path / "data")])
    (line,) = (tmp_path / "data/longppl/rfc.jsonl").read_text().splitlines()
    assert json.loads(line) == {"text": bodies[3]}
    found = (tmp_path / "data/niah/paragraphs.txt").read_text()
    assert found == f"{prose[1]}\n\n{prose[0]}\n"
    # 23 runs of 16 words, of which the 15 in the first 30 words are in rfc1, too.
    assert "rfc3: 65.2% of its runs of 16 words" in capsys.readouterr().out
    (tmp_path / "all.jsonl").write_text(lines[0])
    with pytest.raises(SystemExit):
        texts.main([str(tmp_path / "all.jsonl"), str(tmp_path / "data")])
    assert "documents must hold all RFCs" in capsys.readouterr().err
