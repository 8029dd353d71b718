"""The training benchmark, on a run of a few steps."""

import time

import train
from torch.distributed.checkpoint import FileSystemWriter

from flash_frac.bench.rows import read_rows
from flash_frac.bench.saves import SAVE_COLUMNS, StepTimes
from flash_frac.bench.training import TRAIN_COLUMNS
from flash_frac.quickstart import corpus
from tests.train.conftest import cache_folder, text_folder, write_recipe  # noqa: F401


def test_a_row_says_what_the_logs_say(write_recipe, tmp_path):  # noqa: F811
    path = tmp_path / "rows.csv"
    recipe = write_recipe(gradient_accumulation_steps=2)
    train.main([str(recipe), "--max_steps", "4", "--commit", "abc", "--out", str(path)])
    (row,) = read_rows(path, TRAIN_COLUMNS)
    assert (row["steps"], row["tokens_per_step"], row["commit"]) == ("4", "256", "abc")
    facts = ("batch", "accumulation", "recompute", "compile")
    assert [row[name] for name in facts] == ["2", "2", "no", "no"]
    assert float(row["tokens_per_s"]) > 0 and float(row["last_loss"]) < float(row["first_loss"])
    assert row["command"].endswith("recipe.yaml --max_steps 4")


def test_a_short_run_needs_no_data(tmp_path, monkeypatch):
    """The text is made on the spot, and of the run only the row stays."""
    path = tmp_path / "rows.csv"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "load", lambda: [corpus.Address(1790, "A", "memory fades " * 200)])
    typed = ["--quickstart", "--max_steps", "2", "--logging_steps", "1", "--use_cpu"]
    train.main(["small", *typed, "--commit", "abc", "--out", str(path)])
    (row,) = read_rows(path, TRAIN_COLUMNS)
    assert (row["steps"], row["batch"], row["sequence_length"]) == ("2", "8", "256")
    assert row["command"] == f"python benchmarks/train.py small {' '.join(typed)}"
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_saves(write_recipe, tmp_path, monkeypatch):  # noqa: F811
    """Three runs; the one that waits for its checkpoints is the one whose steps take longer."""
    path, recipe = tmp_path / "rows.csv", write_recipe(eval_strategy="no", save_steps=6)
    write_data = FileSystemWriter.write_data

    def write_slowly(*args, **kwargs):
        time.sleep(0.3)
        return write_data(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_slowly)
    monkeypatch.chdir(tmp_path)
    train.main([str(recipe), "--saves", "--max_steps", "20", "--commit", "abc", "--out", str(path)])
    rows = {row["saving"]: row for row in read_rows(path, SAVE_COLUMNS)}
    assert [row["saves"] for row in rows.values()] == ["0", "3", "3"]
    assert rows["none"]["save_ms"] == rows["none"]["checkpoint_gib"] == ""
    assert float(rows["sync"]["save_ms"]) > 300 > float(rows["async"]["first_save_ms"])
    assert int(rows["async"]["writing_steps"]) > 0 == int(rows["sync"]["writing_steps"])
    assert not list(tmp_path.glob(".saves-*"))


def test_the_time_of_a_save():
    """Steps of 10 ms; a save after step 20 takes 50, and two steps while it is written 2 more."""
    times = StepTimes()
    times.saved, times.writing = [20], {21, 22, 23}
    longer = {21: 0.05, 22: 0.002, 23: 0.002}
    now = 0.0
    for step in range(1, 31):
        now += 0.01 + longer.get(step, 0)
        times.ends[step] = now
    columns = times.columns()
    assert (columns["step_ms"], columns["first_save_ms"], columns["saves"]) == (10.0, 50.0, 1)
    assert (columns["writing_step_ms"], columns["writing_steps"]) == (12.0, 2)
    assert columns["lost_s_per_save"] == 0.054
