"""Results as tables and figures."""

import json

import pytest

from flash_frac.evals.report import average, columns, compare, markdown, numbers
from flash_frac.evals.suites import SUITES


def report(name, scale=1.0):
    """A model with the paper's numbers for FRAC, or a part of them."""
    units = []
    for suite in SUITES.values():
        keys = [(task.name, metric) for task in suite.tasks for metric in task.metrics]
        row = suite.paper.get("FRAC", (50.0,) * len(keys))
        for unit in suite.units():
            results = {
                metric.key: scale * row[n] / metric.scale
                for n, (task, metric) in enumerate(keys)
                if task == unit.task.name
            }
            conditions = {"limit": None, "max_length": 2048, "data": "hub"}
            units.append(
                {
                    "suite": suite.name,
                    "task": unit.task.name,
                    "length": unit.length,
                    "results": results | {"num_truncated": 0},
                    "conditions": conditions,
                }
            )
    return {"model": name, "checkpoint": name, "units": units}


def test_our_row_stands_below_the_paper():
    lines = markdown([report("mine")]).splitlines()
    paper = next(n for n, line in enumerate(lines) if line.startswith("| FRAC (paper) | 16.5"))
    assert lines[paper + 1] == lines[paper].replace("FRAC (paper)", "**mine**")


def test_numbers_that_were_not_measured_are_not_averaged():
    suite = SUITES["lm"]
    row = numbers(report("mine"), suite)
    assert row[0] == 16.5 and average(suite, row) == pytest.approx(55.09, abs=0.01)
    assert average(suite, [*row[:-1], None]) is None
    partial = report("mine")
    partial["units"] = [unit for unit in partial["units"] if unit["task"] != "boolq"]
    table = markdown([report("whole"), partial])
    assert (
        "| **mine** | 16.5 | 13.5 | 44.9 | 72.4 | 56.4 | 55.6 | 71.6 | 38.0 | 41.8 | – | – |"
        in table
    )
    assert "mine: not measured: boolq" in table


def test_only_what_was_measured_is_listed():
    """No column, table or note for the tasks that nobody asked for."""
    some = report("mine")
    some["units"] = [u for u in some["units"] if u["task"] in ("piqa", "boolq", "pg19")]
    text = markdown([some])
    assert "| Model | PIQA acc ↑ | BoolQ acc ↑ |\n" in text
    frac = [
        SUITES["lm"].paper["FRAC"][n]
        for n, (t, _) in enumerate(columns(SUITES["lm"]))
        if t.name in ("piqa", "boolq")
    ]
    row = " | ".join(f"{x:.1f}" for x in frac)
    assert f"| FRAC (paper) | {row} |\n| **mine** | {row} |\n" in text
    assert "PG19 (ppl)" in text and "ProofPile" not in text
    assert "not measured" not in text and "Avg." not in text and "–" not in text


def test_what_was_left_out_is_named():
    some = report("mine")
    some["units"] = [u for u in some["units"] if u["task"] == "pg19"]
    for unit in some["units"]:
        unit["results"]["left_out"] = [f"document {n} (9 tokens, fewer than 16)" for n in range(12)]
    some["left_out"] = ["lm/boolq", "niah/niah_single_1"]
    text = markdown([some])
    assert text.count("left out of pg19: document 0 (9 tokens, fewer than 16), document 1 (") == 1
    assert "document 9 (9 tokens, fewer than 16) and 2 more, in results.json" in text
    last = "mine: left out because local files are missing: lm/boolq, niah/niah_single_1.\n"
    assert text.endswith(last)


def test_comparison(tmp_path):
    for folder, name, scale in (("a", "frac", 1.0), ("b", "other", 0.5)):
        (tmp_path / folder).mkdir()
        text = json.dumps(report(name, scale))
        (tmp_path / folder / "results.json").write_text(text)
    written = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert {path.name for path in written} == {"compare.md", *(f"{name}.svg" for name in SUITES)}
    figure = (tmp_path / "out" / "niah.svg").read_text()
    assert all(text in figure for text in ("S-NIAH-3", "64K", ">frac<", ">other<"))
    assert "FRAC, paper" in (tmp_path / "out" / "lm.svg").read_text()
    # The same numbers give the same file.
    again = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in written]


def test_models_of_one_name_are_told_apart(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.json").write_text(json.dumps(report("final")))
    compare([tmp_path / "first", tmp_path / "second"], tmp_path / "out")
    table = (tmp_path / "out" / "compare.md").read_text()
    assert "**first**" in table and "**second**" in table


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no results\.json; name an --out folder"):
        compare([tmp_path], tmp_path / "out")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": "a"}', '{"model": "a", "units": [{}]}'])
def test_damaged_results_are_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results\.json .*; run the same `frac eval` to write it"):
        compare([tmp_path], tmp_path / "out")
