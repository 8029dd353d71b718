"""Tables of results: found by key, whole after an interruption."""

import argparse
from pathlib import Path

import pytest
import torch

from experiments.table import Table, add_run_options, made_with, out_folder

COLUMNS = ("model", "seed", "accuracy")


def test_rows_are_found_again(tmp_path):
    path = tmp_path / "deep" / "results.csv"
    table = Table(path, COLUMNS, num_key=2)
    table.append([{"model": "a", "seed": 0, "accuracy": 0.5}])
    table.append([{"model": "a", "seed": 1, "accuracy": None}])
    again = Table(path, COLUMNS, num_key=2)
    assert ("a", 0) in again and ("a", "1") in again and ("b", 0) not in again
    assert again.rows["a", "1"] == {"model": "a", "seed": "1", "accuracy": ""}
    assert path.read_text() == "model,seed,accuracy\na,0,0.5\na,1,\n"


def test_a_row_of_the_same_key_is_replaced(tmp_path):
    table = Table(tmp_path / "results.csv", COLUMNS, num_key=2)
    for accuracy in (0.5, 0.75):
        table.append([{"model": "a", "seed": 0, "accuracy": accuracy}])
    assert (tmp_path / "results.csv").read_text() == "model,seed,accuracy\na,0,0.75\n"


def test_an_interruption_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.csv"
    table = Table(path, COLUMNS, num_key=2)
    table.append([{"model": "a", "seed": 0, "accuracy": 0.5}])
    before = path.read_text()

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        table.append([{"model": "a", "seed": 1, "accuracy": 0.5}])
    assert path.read_text() == before


def test_another_table_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("model,accuracy\n")
    with pytest.raises(ValueError, match=r"results\.csv must have the columns model, seed, acc"):
        Table(path, COLUMNS, num_key=2)


def test_half_a_table_is_refused(tmp_path):
    """Or a run would take its rows as they are, and write the rest again."""
    path = tmp_path / "results.csv"
    path.write_text("model,seed,accuracy\na,0,0.5\na,1")
    with pytest.raises(ValueError, match=r"results\.csv line 3 has 2 values for 3 columns"):
        Table(path, COLUMNS, num_key=2)


def test_runs_have_a_folder_and_say_what_they_were_made_with(tmp_path):
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    assert out_folder(parser.parse_args([]), Path("here")) == Path("here")
    assert out_folder(parser.parse_args(["--out", str(tmp_path)]), Path("here")) == tmp_path
    # A smoke test leaves the committed rows alone.
    smoke = out_folder(parser.parse_args(["--smoke"]), Path("here"))
    assert smoke.is_dir() and smoke != Path("here")
    facts = made_with("abc", ("commit", "torch", "numpy", "no_such_package"))
    assert facts["commit"] == "abc" and facts["torch"] == torch.__version__
    assert facts["numpy"] and facts["no_such_package"] is None
    assert made_with(None)["commit"]
