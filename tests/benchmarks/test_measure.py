"""Rows, their file, and what happens when something cannot be measured."""

import ast
import csv

import measure
import pytest
import torch
from measure import COLUMNS, RESULTS, append, check_header

from flash_frac.bench import timing
from flash_frac.bench.timing import Times, attempt, make_row

SCRIPTS = sorted(RESULTS.parent.glob("*.py"))


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def row(**columns):
    shape = {"B": 2, "T": 50, "H": 1, "M": None, "D": 8}
    results = {"tokens": 100, "peak": None, "error": None} | columns
    return make_row("some peer 1.0", "forward", shape, torch.float32, Times(1, 2, 4), **results)


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "gpu.csv"
    append([row()], path)
    append([row(error=0.00123, peak=7)], path)
    first, second = read(path)
    assert list(first) == list(COLUMNS)
    assert first["ms_p50"] == "2" and float(first["tokens_per_s"]) == 100 / 2e-3
    assert first["M"] == first["peak_mib"] == first["error"] == first["commit"] == ""
    assert (second["peak_mib"], second["error"]) == ("7", "1.2e-03")


@pytest.mark.parametrize(
    ("header", "named"),
    [(COLUMNS[:-1], "transformers"), (COLUMNS[::-1], "their order"), ((*COLUMNS, "x"), "x")],
)
def test_another_header_is_refused(tmp_path, header, named):
    path = tmp_path / "gpu.csv"
    path.write_text(",".join(header) + "\n")
    before = path.read_text()
    with pytest.raises(ValueError, match=rf"gpu\.csv must have .* differ: {named}; .*--out"):
        append([row()], path)
    assert path.read_text() == before


def test_an_unknown_column_is_refused(tmp_path):
    with pytest.raises(ValueError, match="speed"):
        append([row() | {"speed": 1}], tmp_path / "gpu.csv")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_committed_rows_have_the_columns(path):
    check_header(path)
    for line in read(path):
        assert None not in line and None not in line.values()
        assert float(line["ms_p20"]) <= float(line["ms_p50"]) <= float(line["ms_p80"])


def test_a_failure_is_told_once_and_only_ours_counts(capsys):
    failures = []

    def refuse():
        raise RuntimeError("no such kernel\nand a long story")

    assert attempt("a peer 1.0", refuse, failures) == attempt("a peer 1.0", refuse, failures) == []
    assert capsys.readouterr().out == "left out: a peer 1.0: RuntimeError: no such kernel\n"
    assert attempt("another", lambda: 5, failures) == [5]
    timing.exit_if_ours_failed(failures)
    attempt("flash_frac triton", refuse, failures)
    with pytest.raises(SystemExit, match="flash_frac triton: RuntimeError: no such kernel"):
        timing.exit_if_ours_failed(failures)


def test_functions_take_turns(monkeypatch):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    monkeypatch.setattr(timing, "sample", lambda function, repeats: [function() or 4.0] * repeats)
    times = timing.time_in_turns(functions, rounds=2, repeats=3)
    assert calls == [*"ababab"]
    assert times == {"a": (4, 4, 4), "b": (4, 4, 4)}


def test_a_sample_has_so_many_times():
    if not torch.cuda.is_available():
        assert len(timing.sample(lambda: None, 3)) == 3
    assert timing.quantiles([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (2, 3.5, 5)


def test_the_commit_can_be_told():
    told = measure.describe_machine("somewhere/ops.py", ["--commit", "1a2b3c"], "1a2b3c")
    assert told["commit"] == "1a2b3c"
    assert told["command"] == "python benchmarks/ops.py"
    assert set(told) <= set(COLUMNS) and told["torch"] == torch.__version__


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
