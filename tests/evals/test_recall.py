"""Recall: prompts, windows and scores as in Just Read Twice, and models with known scores."""

import json

import pytest
from tokenizers.processors import TemplateProcessing

from flash_frac.data import byte_tokenizer
from flash_frac.evals import recall
from flash_frac.evals.examples import read_rows
from flash_frac.evals.recall import FORMATS, SUITE, answer_position, contains, prompted, window
from flash_frac.evals.report import average
from tests.evals.known import SAMPLES, reader, request, tiny_frac

pytest.importorskip("lm_eval")


def samples(task):
    return read_rows(SAMPLES / "recall" / f"{task}.jsonl")


def test_prompts_are_clozes():
    lm = reader(str)
    prompts = {task: prompted(lm, samples(task)[0], FORMATS[task])["prompt"] for task in FORMATS}
    assert prompts["swde"].endswith("Released 14 March 1998.\nShowtimes and tickets. Reviews. "
                                    "Contact us. Director:")  # fmt: skip
    # Only line breaks and full stops go before FDA's question, as the space after them shows.
    assert prompts["fda"].endswith("Applicant: Merrow Diagnostics.\n . Measurand:")
    assert prompts["squad"].endswith("The engineer who built the lighthouse at Cape Hollow was")
    assert prompts["triviaqa"].startswith("Copper  Copper is a metal")
    assert prompts["triviaqa"].endswith("well. Which metal has the symbol Cu? The answer is")
    assert prompts["nq"].endswith("described by Karl von Frisch. The waggle dance was described by")
    assert prompts["drop"].count("The longest field goal of the visitors") == 1
    assert "Summary of information" not in prompts["swde"]


def test_a_question_is_taken_off_as_often_as_it_stands_there():
    record = {"key": "mascot", "value": "otter", "text": "Mascot: otter.\nMASCOT:mascot:"}
    assert prompted(reader(str), record, FORMATS["fda"])["prompt"] == "Mascot: otter. Mascot:"
    record = {"context": "It was red. it was It was", "question": "It was", "answers": ["red"]}
    assert prompted(reader(str), record, FORMATS["drop"])["prompt"] == "It was red. it was. It was"
    assert prompted(reader(str), record, FORMATS["nq"])["prompt"] == "It was red. it was. It was"


def test_contains():
    assert contains("It was PARIS, then.", ["the capital", "Paris"]) == 1
    assert contains("It was Lyon.", ["Paris", "Lyons"]) == 0
    assert contains("", ["Paris"]) == 0
    # An answer is text, not a pattern.
    assert contains("abc", ["a.c"]) == 0 and contains("3.5 (a)", ["3.5 (A)"]) == 1


@pytest.mark.parametrize("before", [0, 5, 998, 999, 1000, 4000, 5500, 5994])
def test_windows_are_of_exactly_the_size_and_hold_the_answer(before):
    document = "x" * before + "answer" + "y" * (5994 - before)
    text, cut = window(byte_tokenizer(), document, document.index("answer"), 1998)
    start = max(0, before - 999)
    assert cut and text == document[start : start + 1998]
    assert "answer" in text
    assert len(text) == min(1998, 6000 - start)


def test_windows_of_documents_that_fit():
    tokenizer = byte_tokenizer()
    assert window(tokenizer, "short text", 6, 100) == ("short text", False)
    # Half a window before the answer is all that is kept, even so.
    document = "x" * 80 + "answer"
    assert window(tokenizer, document, 80, 100) == (document[30:], True)
    # Not found: as if it stood at the end.
    assert window(tokenizer, document, None, 100) == (document[35:], True)
    assert window(tokenizer, document, None, 50, fallback=40) == (document[15:65], True)


def test_the_centre_is_the_first_of_key_and_value():
    record = {"key": "Colour", "value": "red", "answers": ["RED", "crimson"]}
    document = "No match. A red colour."
    assert answer_position(record, document, ("key", "value")) == 12
    assert answer_position(record, document, ("key",)) == 16
    assert answer_position(record, document, ("answers",)) == 12
    assert answer_position(record, document, ()) == 0
    assert answer_position({"value": "blue"}, document, ("value",)) is None
    record = {"value": "blue", "alt_answers": ["green", "A red"]}
    assert answer_position(record, document, ("value",)) == 10


@pytest.mark.parametrize("task", FORMATS)
def test_long_prompts_and_their_answers_have_2048_tokens(task):
    """A document of 60,000 bytes with the answer in its middle: it is found, in exactly 2K."""
    lm = reader(str)
    filler = "The sky over the hills was grey. " * 900
    answer = "Zanzibar"
    record = {
        "text": f"{filler} Place: {answer}. {filler}", "key": "place", "value": answer,
        "context": f"{filler} It is {answer}. {filler}", "question": "And so it is",
        "answers": [answer],
    }  # fmt: skip
    if task in ("triviaqa", "drop"):
        # These keep the beginning.
        record["context"] = f"Once more: it is {answer}. {filler}"
    example = prompted(lm, record, FORMATS[task])
    assert example["cut"] and answer in example["prompt"]
    length = len(lm.tok_encode(example["prompt"]))
    window_tokens = 1950 if task == "nq" else 1998
    question = {"swde": " Place:", "fda": " Place:", "squad": ""}.get(task, "And so it is")
    assert window_tokens - 40 <= length <= 2000
    assert length == 2000 or length < window_tokens + len(question) + 3
    if task in ("swde", "fda", "triviaqa", "drop"):
        assert length == 2000 and example["prompt"].endswith(question)


def test_a_beginning_token_counts_and_is_not_read_as_text():
    lm = reader(str)
    lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    assert lm.tok_encode("a") == [1, 3 + ord("a")]
    text = "x" * 5000 + " Place: Zanzibar. " + "y" * 5000
    record = {"text": text, "key": "place", "value": "Zanzibar"}
    prompt = prompted(lm, record, FORMATS["swde"])["prompt"]
    assert len(lm.tok_encode(prompt)) == 2000 and lm.tok_encode(prompt).count(1) == 1
    assert prompt.endswith("y. Place:") and "Place: Zanzibar." in prompt and "<" not in prompt


@pytest.fixture(scope="module")
def answers():
    """An answer to the prompt of each sample, in other letters and among other words."""
    lm, found = reader(str), {}
    for task, form in FORMATS.items():
        for record in samples(task):
            if (example := prompted(lm, record, form)) is not None:
                found[example["prompt"]] = f" so: {example['answers'][-1].upper()}."
    return found


@pytest.mark.parametrize("task", FORMATS)
def test_known_models_get_the_scores_they_must(task, answers):
    scores = {}
    for name, answer in {
        "oracle": answers.__getitem__,
        "silent": lambda prompt: "",
        "half": lambda prompt: answers[prompt] if len(prompt) % 2 else "no",
    }.items():
        lm = reader(answer)
        result = recall.measure(request(SUITE, task, lm))
        scores[name] = result["contains,none"]
    assert "note" not in result
    assert scores["oracle"] == 1.0 and scores["silent"] == 0.0
    odd = [len(prompt) % 2 for prompt in lm.prompts]
    assert scores["half"] == pytest.approx(sum(odd) / len(odd))
    assert result["num_examples"] == len(lm.prompts) == len(samples(task)) - (task == "squad")
    assert result["num_left_out"] == (task == "squad") and result["num_cut"] == 0
    assert len(result["left_out"]) == result["num_left_out"]
    assert all("an answer of fewer than two letters" in name for name in result["left_out"])
    assert all(options["until"] == ["\n"] for options in lm.options)
    assert all(options["max_gen_toks"] == 48 for options in lm.options)


def test_prompts_reach_the_model_unchanged():
    lm = reader(lambda prompt: "")
    recall.measure(request(SUITE, "fda", lm))
    wanted = [prompted(lm, record, FORMATS["fda"])["prompt"] for record in samples("fda")]
    assert sorted(lm.prompts) == sorted(wanted)


def test_a_frac_model_runs_and_padding_changes_nothing():
    from flash_frac.evals.language_model import FracLM

    model, scores, generations = tiny_frac(), [], []

    class Recorded(FracLM):
        def generate_until(self, *arguments, **options):
            generations.append(super().generate_until(*arguments, **options))
            return generations[-1]

    for batch_size in (1, 3):
        lm = Recorded(
            model, tokenizer=byte_tokenizer(), max_length=2048, batch_size=batch_size, device="cpu"
        )
        scores.append(recall.measure(request(SUITE, "swde", lm)))
    assert generations[0] == generations[1] and len(generations[0]) == 3
    assert scores[0] == scores[1] and 0 <= scores[0]["contains,none"] <= 1


def test_limits_and_missing_files_name_the_remedy(tmp_path):
    lm = reader(lambda prompt: "")
    assert recall.measure(request(SUITE, "squad", lm, limit=2))["num_examples"] == 2
    with pytest.raises(FileNotFoundError, match=r"nq\.jsonl is missing: .* frac eval prepare"):
        recall.measure(request(SUITE, "nq", lm, data_dir=tmp_path))
    with pytest.raises(ValueError, match="max_length = 40 leaves -8 tokens for a prompt"):
        recall.measure(request(SUITE, "nq", reader(str, max_length=40)))
    (tmp_path / "recall").mkdir()
    (tmp_path / "recall" / "squad.jsonl").write_text(json.dumps(samples("squad")[3]))
    with pytest.raises(ValueError, match="all 1 examples of squad have answers of fewer than two"):
        recall.measure(request(SUITE, "squad", lm, data_dir=tmp_path))


def test_preparation_writes_the_layout(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [{"text": "Été", "value": name}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    files = recall.prepare(tmp_path)
    assert [f.name for f in files] == [f"{task.name}.jsonl" for task in SUITE.tasks]
    assert ("hazyresearch/based-swde-v2", "default", "validation") in asked
    assert ("hazyresearch/based_nq_2048", None, "validation") in asked
    assert recall.prepare(tmp_path) == []
    files[2].unlink()
    assert recall.prepare(tmp_path) == [files[2]]
    assert read_rows(files[1]) == [{"text": "Été", "value": "hazyresearch/based-squad"}]


def test_without_a_folder_the_hub_is_asked(monkeypatch):
    def load_dataset(name, config, split):
        assert (name, config, split) == ("hazyresearch/based_drop", None, "validation")
        return samples("drop")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    lm = reader(lambda prompt: "41 yards")
    result = recall.measure(request(SUITE, "drop", lm, data_dir=None))
    assert result["contains,none"] == 0.5 and result["num_examples"] == 2
    result = recall.measure(request(SUITE, "drop", lm, data_dir=None, limit=1))
    assert result["contains,none"] == 1.0 and result["num_examples"] == 1

    def fail(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ValueError, match=r"based_drop cannot be downloaded \(no route\); run"):
        recall.measure(request(SUITE, "drop", lm, data_dir=None))


def test_the_suite_is_the_papers_table():
    columns = [task.metrics[0].column for task in SUITE.tasks]
    assert columns == ["SWDE", "SQD", "FDA", "TQA", "NQ", "Drop"]
    for numbers in SUITE.paper.values():
        # Both are rounded to a tenth.
        assert average(SUITE, numbers[:-1]) == pytest.approx(numbers[-1], abs=0.1)
