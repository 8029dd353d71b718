"""Tasks of lm-eval, with local examples or examples from the hub."""

import json
from dataclasses import replace

import datasets
import pytest

from flash_frac.evals import harness
from flash_frac.evals.examples import read_rows
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.suites import SUITES, Request, Task, Unit
from tests.evals.known import SAMPLES, request

LM = SUITES["lm"]


@pytest.fixture(scope="module")
def lm(checkpoint):
    return FracLM(str(checkpoint), max_length=4096)


@pytest.mark.parametrize("task", ["wikitext", "hellaswag", "arc_challenge", "boolq"])
def test_the_hub_and_local_files_give_the_same(lm, task, monkeypatch):
    """Without a folder the task asks for its dataset, here the same rows."""
    rows = read_rows(SAMPLES / "lm" / f"{task}.jsonl")
    asked = []

    def load(path, name=None, **options):
        asked.append(path)
        return {
            split: datasets.Dataset.from_list(rows) for split in ("train", "validation", "test")
        }

    local = harness.measure(request(LM, task, lm))
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert harness.measure(request(LM, task, lm, data_dir=None)) == local
    assert len(asked) == 1 and "/" in asked[0]


def test_examples_before_the_question(lm, tmp_path):
    """A suite with few-shot examples reads them from <task>.<split>.jsonl."""
    rows = read_rows(SAMPLES / "lm" / "piqa.jsonl")
    (tmp_path / "lm").mkdir()
    for name, part in (("piqa", rows[:2]), ("piqa.train", rows[2:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / "lm" / f"{name}.jsonl").write_text(text)
    task = replace(LM.tasks[2], splits=("validation", "train"))
    suite = replace(LM, tasks=(task,), num_fewshot=1, paper={})
    seen = []

    class Watched(FracLM):
        def loglikelihood(self, requests, disable_tqdm=False):
            seen.extend(request.args[0] for request in requests)
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    watched = Watched(lm.model, tokenizer=lm.tokenizer, max_length=4096)
    asked = Request(lm=watched, suite=suite, unit=Unit(task=task), data_dir=tmp_path)
    assert harness.measure(asked)["num_examples"] == 2
    beginnings = tuple(f"Question: {row['goal']}\nAnswer:" for row in rows[2:])
    assert len(seen) == 4 and all(text.startswith(beginnings) for text in seen)


def test_an_unknown_task_is_named(lm):
    task = Task(name="no_such_task", metrics=(), folder="piqa")
    with pytest.raises(ValueError, match="lm-eval has no task no_such_task in piqa"):
        harness.configuration(task)
