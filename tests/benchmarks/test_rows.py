"""Benchmark rows, their file, and errors when something cannot be measured."""

from pathlib import Path

import pytest
import torch

from flash_frac.bench import timing
from flash_frac.bench.memory import MEMORY_COLUMNS
from flash_frac.bench.perplexity import COLUMNS as PERPLEXITY_COLUMNS
from flash_frac.bench.profiling import PROFILE_COLUMNS
from flash_frac.bench.rows import (
    ADDED,
    COLUMNS,
    append_rows,
    check_header,
    describe_machine,
    make_row,
    read_rows,
)
from flash_frac.bench.serve import SERVE_COLUMNS
from flash_frac.bench.timing import Times, attempt, exit_if_ours_failed
from flash_frac.bench.training import TRAIN_COLUMNS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def row(**columns):
    shape = {"B": 2, "T": 50, "H": 1, "M": None, "D": 8}
    results = {"tokens": 100, "peak": None, "error": None} | columns
    return make_row("some peer 1.0", "forward", shape, torch.float32, Times(1, 2, 4), **results)


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "gpu.csv"
    machine = describe_machine(
        "somewhere/ops.py", ["--commit", "1a2b3c", "--out=x.csv", "--time", "8"], "1a2b3c"
    )
    append_rows([row() | machine], path)
    append_rows([row(error=0.00123, peak=7)], path)
    first, second = read_rows(path)
    assert tuple(first) == COLUMNS
    assert {name: str(value or "") for name, value in (row() | machine).items()} == first
    assert (first["commit"], first["command"]) == ("1a2b3c", "python benchmarks/ops.py --time 8")
    assert float(first["tokens_per_s"]) == 100 / (1e-3 * float(first["ms_p50"]))
    assert float(second["peak_mib"]) == 7 and float(second["error"]) == pytest.approx(1.2e-3)
    assert second["commit"] == ""
    with pytest.raises(ValueError, match="speed"):
        append_rows([row() | {"speed": 1}], path)


@pytest.mark.parametrize(
    ("header", "named"),
    [(COLUMNS[:-1], "state_bytes"), (COLUMNS[::-1], "their order"), ((*COLUMNS, "x"), "x")],
)
def test_another_header_is_refused(tmp_path, header, named):
    path = tmp_path / "gpu.csv"
    path.write_text(",".join(header) + "\n")
    before = path.read_text()
    with pytest.raises(ValueError, match=rf"gpu\.csv must have .* differ: {named}; .*--out"):
        append_rows([row()], path)
    with pytest.raises(ValueError, match="must have the columns"):
        read_rows(path)
    assert path.read_text() == before


def test_older_files_lack_the_newest_columns(tmp_path):
    """They are read as they are, and get the columns with the next row."""
    path, old = tmp_path / "gpu.csv", BENCHMARKS / "results" / "before_after" / "h200.csv"
    path.write_bytes(old.read_bytes())
    before = read_rows(path)
    assert not any(line[name] for line in before for name in ADDED)
    append_rows([row(mode="graph", state_bytes=12)], path)
    *kept, last = read_rows(path)
    assert kept == before and (last["mode"], last["state_bytes"]) == ("graph", "12")
    lines = old.read_text().splitlines()
    changed = path.read_text().splitlines()
    assert changed[0] == ",".join([lines[0], *ADDED])
    assert changed[1:-1] == [f"{line},," for line in lines[1:]]


def test_nothing_is_appended_to_half_a_row(tmp_path):
    path = tmp_path / "gpu.csv"
    append_rows([row()], path)
    before = path.read_text()[:-20]
    path.write_text(before)
    for touch in (lambda: append_rows([row()], path), lambda: read_rows(path)):
        with pytest.raises(ValueError, match=r"gpu\.csv line 2 .*restore the file, or delete"):
            touch()
    assert path.read_text() == before


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.csv")), ids=lambda path: path.name)
def test_committed_rows_are_read(path):
    others = {"train": TRAIN_COLUMNS, "serve": SERVE_COLUMNS, "memory": MEMORY_COLUMNS}
    others |= {"perplexity": PERPLEXITY_COLUMNS, "profile": PROFILE_COLUMNS}
    if path.parent.name in others:
        assert read_rows(path, others[path.parent.name])
        return
    check_header(path)
    for line in read_rows(path):
        assert None not in line and None not in line.values()
        assert float(line["ms_p20"]) <= float(line["ms_p50"]) <= float(line["ms_p80"])


def test_a_failure_is_printed_once_and_only_ours_counts(capsys):
    failures = []

    def refuse():
        raise RuntimeError("no such kernel\nand a long story")

    assert attempt("a peer 1.0", refuse, failures) == attempt("a peer 1.0", refuse, failures) == []
    assert capsys.readouterr().out == "left out: a peer 1.0: RuntimeError: no such kernel\n"
    assert attempt("another", lambda: 5, failures) == [5]
    exit_if_ours_failed(failures)
    attempt("flash_frac triton", refuse, failures)
    with pytest.raises(SystemExit, match="flash_frac triton: RuntimeError: no such kernel"):
        exit_if_ours_failed(failures)


def test_functions_take_turns(monkeypatch):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    monkeypatch.setattr(timing, "sample", lambda function, repeats: [function() or 4.0] * repeats)
    times = timing.time_in_turns(functions, rounds=2, repeats=3)
    assert calls == [*"ababab"]
    assert times == {"a": (4, 4, 4), "b": (4, 4, 4)}
    assert timing.quantiles([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (2, 3.5, 5)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_are_thin(path):
    """What measures is in flash_frac/bench; the figures are drawn here. Docstrings do not count."""
    _, _, code = path.read_text().split('"""', 2)
    assert len(code.splitlines()) < (280 if path.name == "plot.py" else 65)


def test_a_full_disk_leaves_no_half_row(tmp_path, monkeypatch):
    path = tmp_path / "cpu.csv"
    append_rows([row()], path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"cpu\.csv could not be written: No space left"):
        append_rows([row()], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
