"""Evaluations save their results, resume, and report what is missing."""

import dataclasses
import json
import math

import datasets
import pytest
import torch
from typer.testing import CliRunner

from flash_frac.cli import app
from flash_frac.data import byte_tokenizer
from flash_frac.evals import harness, runner
from flash_frac.evals.examples import read_rows
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.long_perplexity import window_starts
from flash_frac.evals.report import compare
from flash_frac.evals.runner import Settings, evaluate, model_name, suite_names, whole_numbers
from flash_frac.evals.suites import SUITES
from flash_frac.models.quantizing import is_quantized
from tests.commands import frac
from tests.evals.known import SAMPLES, tiny_frac

TASKS = ("piqa", "winogrande", "openbookqa")


def options(**changes):
    return Settings(
        **{"suites": ("lm",), "tasks": TASKS, "data_dir": SAMPLES, "limit": 2} | changes
    )


def test_a_run_is_taken_up_where_it_ended(checkpoint, tmp_path, monkeypatch, no_network):
    measured, measure = [], harness.measure

    def interrupted(request):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(request.unit.name)
        return measure(request)

    monkeypatch.setattr(harness, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(checkpoint), tmp_path, options())
    assert measured == ["piqa", "winogrande"]
    assert len(json.loads((tmp_path / "results.json").read_text())["units"]) == 2
    again = []
    monkeypatch.setattr(harness, "measure", lambda r: again.append(r.unit.name) or measure(r))
    report = evaluate(str(checkpoint), tmp_path, options())
    assert again == ["openbookqa"] and [u["task"] for u in report["units"]] == list(TASKS)
    # A finished run needs neither model nor measurement, and leaves no partial file.
    monkeypatch.setattr(runner, "_load", None)
    assert evaluate(str(checkpoint), tmp_path, options()) == report
    assert not list(tmp_path.rglob("*.part"))


def test_results_of_other_conditions_are_not_mixed(checkpoint, uniform, tmp_path):
    one = {"tasks": ("piqa",)}
    evaluate(str(checkpoint), tmp_path, options(**one))
    with pytest.raises(ValueError, match=r"measured differently \(limit 2 there and 1 now"):
        evaluate(str(checkpoint), tmp_path, options(**one, limit=1))
    with pytest.raises(ValueError, match="max_length 2048 there and 4096 now"):
        evaluate(str(checkpoint), tmp_path, options(**one, max_length=4096))
    with pytest.raises(ValueError, match="quantize None there and int8 now"):
        evaluate(str(checkpoint), tmp_path, options(**one, quantize="int8"))
    with pytest.raises(ValueError, match=r"weights .* choose another --out"):
        evaluate(str(uniform), tmp_path, options(**one))


def test_a_checkpoint_is_measured_with_quantised_weights(checkpoint, tmp_path, monkeypatch):
    load = runner._load
    one = options(tasks=("piqa",), quantize="int8")
    loaded = []
    monkeypatch.setattr(runner, "_load", lambda *given: loaded.append(load(*given)) or loaded[0])
    report = evaluate(str(checkpoint), tmp_path / "int8", one)
    assert is_quantized(loaded[0].model) and [u["task"] for u in report["units"]] == ["piqa"]
    with pytest.raises(ValueError, match="quantize int8 there and None now"):
        evaluate(str(checkpoint), tmp_path / "int8", options(tasks=("piqa",)))
    with pytest.raises(ValueError, match="quantise lm before"):
        evaluate("memory", tmp_path / "lm", one, lm=loaded[0])
    # One in memory is known by its values and scales.
    evaluate("memory", tmp_path / "lm", options(tasks=("piqa",)), lm=loaded[0])
    loaded[0].model.model.layers[0].mixer.in_proj.weight.scale.mul_(2)
    with pytest.raises(ValueError, match=r"weights memory:"):
        evaluate("memory", tmp_path / "lm", options(tasks=("piqa",)), lm=loaded[0])


def test_missing_files_are_named_before_anything_runs(checkpoint, tmp_path, monkeypatch):
    folder = tmp_path / "data" / "lm"
    folder.mkdir(parents=True)
    (folder / "piqa.jsonl").write_text((SAMPLES / "lm" / "piqa.jsonl").read_text())
    lacking = options(data_dir=tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_load", None)
        with pytest.raises(
            ValueError, match=r"missing .*winogrande\.jsonl, .*openbookqa"
        ) as caught:
            evaluate(str(checkpoint), tmp_path / "out", lacking)
    assert f"frac eval prepare {tmp_path / 'data'} --suite lm" in str(caught.value)
    report = evaluate(
        str(checkpoint), tmp_path / "out", options(data_dir=tmp_path / "data", skip_missing=True)
    )
    assert [unit["task"] for unit in report["units"]] == ["piqa"]
    results = (tmp_path / "out" / "results.md").read_text()
    assert "left out because local files are missing: lm/winogrande, lm/openbookqa.\n" in results
    assert "| Model | PIQA acc ↑ |" in results and "ARC" not in results


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"suite": "lm"}'])
@pytest.mark.parametrize("task", TASKS[:2])
def test_damaged_results_are_named(checkpoint, tmp_path, task, content):
    """That of the task that is asked for, and another beside it."""
    evaluate(str(checkpoint), tmp_path, options(tasks=(TASKS[0],), limit=1))
    (tmp_path / "lm" / f"{task}.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{task}\.json .*; delete it to measure again"):
        evaluate(str(checkpoint), tmp_path, options(tasks=(TASKS[0],), limit=1))


def test_a_digit_that_changed_is_noticed(checkpoint, tmp_path):
    """In a result, in the report, and in the hashes that results are known by."""
    settings = options(tasks=("piqa",), limit=1)
    evaluate(str(checkpoint), tmp_path, settings)
    for name, call in {
        "lm/piqa.json": lambda: evaluate(str(checkpoint), tmp_path, settings),
        "results.json": lambda: compare([tmp_path], tmp_path / "compared"),
        "hashes.json": lambda: evaluate(str(checkpoint), tmp_path, settings),
    }.items():
        path = tmp_path / name
        whole = path.read_text()
        digit = next(n for n, letter in enumerate(whole) if letter in "123456")
        path.write_text(whole[:digit] + str(int(whole[digit]) + 1) + whole[digit + 1 :])
        with pytest.raises(ValueError, match=rf"{name} .*do not match its checksum"):
            call()
        path.write_text(whole)


def test_a_result_that_is_not_finite_is_null(checkpoint, tmp_path, monkeypatch):
    """And said to be so: an empty cell could mean that nothing was measured."""
    measure = harness.measure
    broken = {"acc,none": math.nan, "ppl,none": math.inf}
    monkeypatch.setattr(harness, "measure", lambda request: measure(request) | broken)
    evaluate(str(checkpoint), tmp_path, options(tasks=("piqa",), limit=1))
    for name in ("results.json", "lm/piqa.json"):
        content = json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)
        unit = content["units"][0] if "units" in content else content
        assert unit["results"]["acc,none"] is unit["results"]["ppl,none"] is None
        assert unit["results"]["not_finite"] == ["acc,none", "ppl,none"]
    table = (tmp_path / "results.md").read_text()
    assert "| – |" in table and "NaN or inf in piqa: acc,none, ppl,none" in table


@pytest.mark.parametrize(("suite", "task"), [("lm", "wikitext"), ("longppl", "pg19")])
def test_a_perplexity_beyond_all_numbers(tmp_path, suite, task):
    """As a flipped bit in an exponent gives it: one line, and no result."""
    model = tiny_frac()
    with torch.no_grad():
        model.model.norm.weight *= 1e6
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    length = ("--lengths", "64") if suite == "longppl" else ()
    out = tmp_path / "out"
    chosen = ("--suite", suite, "--tasks", task, "--data-dir", SAMPLES, "--limit", 1, *length)
    done = frac("eval", tmp_path / "model", *chosen, "--out", out)
    assert done.returncode == 1
    assert f"frac: {suite}/{task}" in done.stderr and "weights are damaged" in done.stderr
    assert not list(out.rglob(f"{task}*"))


def test_suites_that_read_files_fetch_them_first(checkpoint, tmp_path, monkeypatch):
    """Without --data-dir; a second run finds them."""
    fetched = []

    def load(name, *args, **kwargs):
        fetched.append(name)
        return read_rows(SAMPLES / "recall" / "squad.jsonl")

    monkeypatch.setattr(datasets, "load_dataset", load)
    settings = Settings(suites=("recall",), tasks=("squad",), limit=1)
    report = evaluate(str(checkpoint), tmp_path, settings)
    assert report["units"][0]["conditions"]["data"].keys() == {"squad.jsonl"}
    num_fetched = len(fetched)
    assert evaluate(str(checkpoint), tmp_path, settings) == report and len(fetched) == num_fetched


def test_a_checkpoint_is_found_before_data_are_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(ValueError, match=r"checkpoint \./absent was not found"):
        evaluate("./absent", tmp_path / "out", Settings(suites=("recall",), tasks=("squad",)))
    assert not (tmp_path / "out").exists()


def test_what_a_task_took_is_kept(checkpoint, tmp_path):
    """Tokens of all requests without padding; no memory of a GPU where there is none."""
    report = evaluate(str(checkpoint), tmp_path, options(tasks=("piqa",), limit=1))
    unit, lm = report["units"][0], FracLM(str(checkpoint))
    row = read_rows(SAMPLES / "lm" / "piqa.jsonl")[0]
    prompt = f"Question: {row['goal']}\nAnswer:"
    lengths = [len(lm.tok_encode(f"{prompt} {row[name]}")) - 1 for name in ("sol1", "sol2")]
    assert unit["results"]["tokens_read"] == sum(lengths)
    assert 0 < unit["seconds"] < 600
    assert (unit["peak_memory_mib"] is None) == (lm.device.type == "cpu")


def test_own_documents_are_a_task_of_longppl(checkpoint, tmp_path):
    """By the name of their file, and in tables and figures with the others."""
    (tmp_path / "longppl").mkdir()
    text = (SAMPLES / "niah" / "address.txt").read_text()
    (tmp_path / "longppl" / "mine.jsonl").write_text(json.dumps({"text": text}) + "\n")
    settings = Settings(
        suites=("lm", "longppl"), tasks=("mine",), lengths=(64, 128), data_dir=tmp_path
    )
    report = evaluate(str(checkpoint), tmp_path / "out", settings)
    assert [(u["task"], u["length"]) for u in report["units"]] == [("mine", 64), ("mine", 128)]
    assert "mine (ppl)" in (tmp_path / "out" / "results.md").read_text()
    # The whole document once, and windows that end at some of its tokens.
    read = report["units"][0]["results"]["tokens_read"]
    assert read == 63 * (1 + len(window_starts(len(FracLM(str(checkpoint)).tok_encode(text)), 64)))
    with pytest.raises(ValueError, match=r"missing .*other\.jsonl"):
        evaluate(str(checkpoint), tmp_path / "out", dataclasses.replace(settings, tasks=("other",)))
    with pytest.raises(ValueError, match="tasks must be among"):
        Settings(suites=("longppl",), tasks=("mine",))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is empty"),
        ("{\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 must be a JSON object"),
        ("{}\n\udcff", "line 2 is not UTF-8 text"),
    ],
)
def test_broken_files_are_named(checkpoint, tmp_path, text, error):
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "piqa.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"piqa\.jsonl {error}"):
        evaluate(str(checkpoint), tmp_path / "out", options(tasks=("piqa",), data_dir=tmp_path))


def test_cuts_are_an_error_or_told(checkpoint, tmp_path):
    short = {"tasks": ("boolq",), "max_length": 128}
    with pytest.raises(ValueError, match=r"4 of 4 requests have more tokens .* than the 128"):
        evaluate(str(checkpoint), tmp_path, options(**short))
    report = evaluate(str(checkpoint), tmp_path, options(**short, truncate=True))
    cut = report["units"][0]["results"]["num_truncated"]
    assert cut == 4 and "requests cut to fit: 4 of boolq" in (tmp_path / "results.md").read_text()
    with pytest.raises(ValueError, match=r"an answer has .* and answers are never truncated"):
        evaluate(str(checkpoint), tmp_path, options(tasks=("piqa",), max_length=16, truncate=True))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"suites": ("glue",)}, "suites must be among lm, niah"),
        ({"tasks": ("mmlu",)}, "tasks must be among .*; got"),
        ({"lengths": (1024,)}, "lengths were given, but lm has no lengths"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"batch_size": "many"}, "batch_size must be auto or at least 1"),
    ],
)
def test_settings_are_checked(changes, error):
    with pytest.raises(ValueError, match=error):
        options(**changes)


def test_what_the_command_line_takes():
    assert suite_names("all") == tuple(SUITES) and suite_names("lm, niah") == ("lm", "niah")
    assert whole_numbers("--lengths", "512,4K") == (512, 4096)
    with pytest.raises(ValueError, match="--lengths must be whole numbers"):
        whole_numbers("--lengths", "long")
    assert model_name("runs/frac/final") == "frac" and model_name("org/frac-130m") == "frac-130m"


def test_the_command(checkpoint, tmp_path, no_network):
    """Every suite at once, from a folder of local files, without a network; then a comparison."""
    out = tmp_path / "frac"
    arguments = ["eval", str(checkpoint), "--data-dir", str(SAMPLES), "--limit", "1"]
    arguments += ["--suite", "all", "--lengths", "512", "--out", str(out), "--truncate"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "Tables are in" in done.output
    units = json.loads((out / "results.json").read_text())["units"]
    assert {unit["suite"] for unit in units} == set(SUITES)
    done = CliRunner().invoke(app, ["eval", "compare", str(out), "--out", str(tmp_path / "side")])
    assert done.exit_code == 0
    names = {path.name for path in (tmp_path / "side").iterdir()}
    assert names == {"compare.md", *(f"{name}.svg" for name in SUITES)}
