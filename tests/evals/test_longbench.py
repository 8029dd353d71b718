"""LongBench: middle truncation, models with known scores, the paper's groups and averages."""

import pytest

from flash_frac.data import byte_tokenizer
from flash_frac.evals import longbench
from flash_frac.evals.examples import read_rows
from flash_frac.evals.longbench import GROUPS, SUITE, ends, harness_config, prompted
from flash_frac.evals.report import average
from tests.evals.known import SAMPLES, reader, request, tiny_frac

pytest.importorskip("lm_eval")

TASKS = [task.name for task in SUITE.tasks]
NEW_TOKENS = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32,
    "musique": 32, "gov_report": 512, "qmsum": 512, "multi_news": 512, "trec": 64, "triviaqa": 32,
    "samsum": 128, "lcc": 64, "repobench-p": 64,
}  # fmt: skip


def samples(task):
    return read_rows(SAMPLES / "longbench" / f"{task}.jsonl")


def test_the_first_and_the_last_tokens_are_kept():
    assert ends(list(range(10)), 6) == [[0, 1, 2], [7, 8, 9]]
    assert ends(list(range(10)), 5) == [[0, 1], [8, 9]]
    assert ends([1, 2], 1) == [[], []]


def test_a_long_prompt_loses_its_middle_and_says_so():
    config = harness_config("qasper")
    lm = reader(str, max_length=1128)
    record = {"context": "left " * 500 + "right " * 500, "input": "Why?", "answers": ["so"]}
    example = prompted(lm, record, config)
    whole = prompted(reader(str, max_length=10**6), record, config)
    assert example["cut"] and not whole["cut"]
    assert example["prompt"] == whole["prompt"][:500] + whole["prompt"][-500:]
    assert len(lm.tok_encode(example["prompt"])) == 1000
    # What is too long by one token loses one at each side of the middle, at most.
    lm.max_length = len(whole["prompt"]) + 128 - 1
    assert len(prompted(lm, record, config)["prompt"]) in {lm.max_length - 128, lm.max_length - 129}
    lm.max_length += 1
    assert prompted(lm, record, config) == whole


def test_letters_of_several_tokens_that_are_cut_still_fit():
    """Half a letter decodes to a sign of three bytes; a prompt must not grow by that."""
    lm = reader(str, max_length=400)
    record = {"context": "日本語" * 200, "input": "?", "answers": ["x"]}
    for new in range(100, 106):
        config = harness_config("qasper") | {"generation_kwargs": {"max_gen_toks": new}}
        example = prompted(lm, record, config)
        assert example["cut"] and len(lm.tok_encode(example["prompt"])) <= 400 - new


def test_both_names_of_the_question_are_read():
    config = harness_config("hotpotqa")
    record = samples("hotpotqa")[0]
    renamed = {("question" if key == "input" else key): record[key] for key in record}
    lm = reader(str)
    assert prompted(lm, record, config) == prompted(lm, renamed, config)
    assert record["input"] in prompted(lm, record, config)["prompt"]


@pytest.mark.parametrize("task", TASKS)
def test_known_models_get_the_scores_they_must(task):
    config = harness_config(task)
    lm = reader(lambda prompt: "", max_length=4096)
    answers = {
        prompted(lm, record, config)["prompt"]: record["answers"][0] for record in samples(task)
    }
    silent = longbench.measure(request(SUITE, task, lm))
    oracle = reader(answers.__getitem__, max_length=4096)
    perfect = longbench.measure(request(SUITE, task, oracle))
    # ROUGE's library has a beta that keeps a perfect match a hair below one.
    assert perfect["score,none"] == pytest.approx(1.0, abs=1e-6)
    assert silent["score,none"] == 0.0
    assert perfect["num_examples"] == len(answers) and perfect["num_cut"] == 0
    assert sorted(oracle.prompts) == sorted(answers)
    assert {options["max_gen_toks"] for options in oracle.options} == {NEW_TOKENS[task]}


def test_scores_between_nothing_and_all():
    """F1 of one right word of two, and the share of the classes that a model names."""
    lm = reader(lambda prompt: "the honey pot", max_length=4096)
    # "honey" is one of two words, and all of the answer "honey": F1 is 2/3; the other is wrong.
    score = longbench.measure(request(SUITE, "narrativeqa", lm))["score,none"]
    assert score == pytest.approx((2 / 3 + 0) / 2)
    lm = reader(lambda prompt: " Individual or Food", max_length=4096)
    score = longbench.measure(request(SUITE, "trec", lm))["score,none"]
    assert score == pytest.approx((1 / 2 + 0) / 2)


def test_cuts_are_reported():
    lm = reader(lambda prompt: "", max_length=128 + 300)
    result = longbench.measure(request(SUITE, "narrativeqa", lm))
    assert result["num_cut"] == result["num_examples"] == 2
    assert all(len(lm.tok_encode(prompt)) == 300 for prompt in lm.prompts)
    with pytest.raises(ValueError, match="max_length = 100 leaves -28 tokens for a prompt: raise"):
        longbench.measure(request(SUITE, "narrativeqa", reader(str, max_length=100)))


def test_a_frac_model_runs_every_kind_of_task():
    from flash_frac.evals.language_model import FracLM

    lm = FracLM(tiny_frac(), tokenizer=byte_tokenizer(), max_length=700, batch_size=2, device="cpu")
    for task in ("hotpotqa", "trec", "lcc"):
        result = longbench.measure(request(SUITE, task, lm))
        assert 0 <= result["score,none"] <= 1
    assert lm.num_truncated == 0


def test_the_suite_is_the_papers_table():
    """Its average is that of the fourteen tasks, not of the five groups."""
    assert len(TASKS) == 14 and [len(tasks) for tasks in GROUPS.values()] == [3, 3, 3, 3, 2]
    for row, numbers in SUITE.paper.items():
        assert average(SUITE, numbers[:-1]) == pytest.approx(numbers[-1], abs=0.1), row
    paper = dict(zip(TASKS, SUITE.paper["FRAC"][:-1], strict=True))
    groups = [sum(paper[task] for task in tasks) / len(tasks) for tasks in GROUPS.values()]
    assert sum(groups) / 5 == pytest.approx(17.68, abs=0.01)


def test_preparation_writes_the_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "datasets.load_dataset", lambda name, config, split: [{"of": [name, config, split]}]
    )
    files = longbench.prepare(tmp_path)
    assert [file.stem for file in files] == TASKS
    assert read_rows(files[-1]) == [{"of": ["Xnhyacinth/LongBench", "repobench-p", "test"]}]
    with pytest.raises(FileNotFoundError, match=r"lcc\.jsonl is missing: .* --suite longbench"):
        longbench.measure(request(SUITE, "lcc", reader(str), data_dir=tmp_path / "elsewhere"))
