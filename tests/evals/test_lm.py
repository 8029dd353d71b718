"""The suite "lm": a model that guesses gets the expected scores."""

import json
import math
import re

import pytest

from flash_frac.evals.language_model import FracLM
from flash_frac.evals.report import average
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.evals.suites import SUITES
from tests.evals.known import SAMPLES

VOCABULARY = 259


def rows(task):
    lines = (SAMPLES / "lm" / f"{task}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def results(uniform, tmp_path_factory):
    settings = Settings(suites=("lm",), data_dir=SAMPLES)
    report = evaluate(str(uniform), tmp_path_factory.mktemp("out"), settings)
    return {unit["task"]: unit["results"] for unit in report["units"]}


def num_bytes(text):
    return len(text.encode())


def test_every_task_ran_on_all_examples(results):
    assert {name: r["num_examples"] for name, r in results.items()} == {
        task.name: len(rows(task.name)) for task in SUITES["lm"].tasks
    }


def test_perplexity_of_lambada(results):
    """V to the power of the mean number of bytes in a last word and the space before it."""
    lengths = [num_bytes(" " + row["text"].split(" ")[-1]) for row in rows("lambada_openai")]
    expected = VOCABULARY ** (sum(lengths) / len(lengths))
    assert results["lambada_openai"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)
    assert results["lambada_openai"]["acc,none"] == 0


def test_perplexity_of_wikitext(results):
    """Every byte of the page as it is read, per word of the page as it is stored."""
    words = sum(len(re.split(r"\s+", row["page"])) for row in rows("wikitext"))
    loss = math.log(results["wikitext"]["word_perplexity,none"]) * words
    read = loss / math.log(VOCABULARY)
    stored = sum(num_bytes(row["page"]) for row in rows("wikitext"))
    assert read == pytest.approx(round(read), abs=1e-2) and 0.9 * stored < read < stored


def accuracy(choices_and_golds, *, normed=False):
    """Of a model to which each byte costs the same: the shortest choice, or, when its cost is per
    letter, the one over which the space before it is spread most thinly."""
    right = 0
    for choices, gold in choices_and_golds:
        costs = [num_bytes(" " + c) / (len(c) if normed else 1) for c in choices]
        right += costs.index(min(costs)) == gold
    return right / len(choices_and_golds)


@pytest.mark.parametrize("task", ["arc_easy", "arc_challenge", "openbookqa"])
def test_questions_with_choices(results, task):
    known = [
        (row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))
        for row in rows(task)
    ]
    assert results[task]["acc,none"] == accuracy(known)
    assert results[task]["acc_norm,none"] == accuracy(known, normed=True)


def test_pairs(results):
    known = [([row["sol1"], row["sol2"]], row["label"]) for row in rows("piqa")]
    assert results["piqa"]["acc,none"] == accuracy(known)
    # "no" is shorter than "yes".
    share = sum(row["label"] == 0 for row in rows("boolq")) / len(rows("boolq"))
    assert results["boolq"]["acc,none"] == share
    # Both choices are followed by the same words, so the first is taken.
    share = sum(row["answer"] == "1" for row in rows("winogrande")) / len(rows("winogrande"))
    assert results["winogrande"]["acc,none"] == share


def test_the_paper_averages_what_we_average():
    """Its last column follows from the others, to the digit that it shows."""
    for name in ("lm", "longbench", "recall"):
        suite = SUITES[name]
        for row, numbers in suite.paper.items():
            ours = average(suite, numbers[:-1])
            assert ours == pytest.approx(numbers[-1], abs=0.1), (name, row)


def test_default_length_comes_from_the_suite(uniform, tmp_path, capsys):
    lm = FracLM(str(uniform), max_length=7)
    settings = Settings(suites=("lm",), tasks=("arc_easy",), data_dir=SAMPLES, limit=1)
    report = evaluate(str(uniform), tmp_path, settings, lm=lm)
    assert lm.max_length == report["units"][0]["conditions"]["max_length"] == 2048
    assert "lm/arc_easy: at most 2,048 tokens" in capsys.readouterr().out
