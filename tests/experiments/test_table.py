"""Tables of results: rows found by key, and intact after an interruption."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from experiments.ablation import run as ablation
from experiments.evaluation import run as evaluation
from experiments.heavy_tail import run as heavy_tail
from experiments.long_documents import run as long_documents
from experiments.mixed_models import run as mixed_models
from experiments.table import Table, add_run_options, made_with, out_folder, parse_options
from flash_frac.files import read_table

ROOT = Path(__file__).parents[2]
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


def test_a_smoke_test_keeps_the_options_that_are_named():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    add_run_options(parser)
    smoke = {"steps": 3, "seeds": [0]}
    # Also where the value is the default.
    options = parse_options(parser, ["--smoke", "--steps", "2400"], smoke)
    assert (options.steps, options.seeds) == (2400, [0])


@pytest.mark.parametrize(
    "parse",
    [ablation.parse, evaluation.parse, heavy_tail.parse, long_documents.parse, mixed_models.parse],
)
def test_smoke_tests_of_the_experiments_keep_lengths(parse):
    assert parse(["--smoke", "--lengths", "96"]).lengths == [96]


# Commits that no clone has, of branches that were rebased: experiments/mixed_models/README.md and
# docs/training.md name them.
GONE = {"a0e9cfb", "08cd88e", "37a4537"}
# Rows of benchmarks that were measured before their commit was made.
DIRTY = {"f11ee34-dirty", "e1da754-dirty"}


def test_commits_of_rows_exist():
    def git(*arguments, **options):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, **options
        ).stdout

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("needs git and the whole history")
    files = git("ls-files", "*.csv").split()
    found = {
        row["commit"] for path in files for row in read_table(ROOT / path)[1] if "commit" in row
    }
    assert found >= GONE | DIRTY, "an exception that no row needs"
    names = sorted(name.removesuffix("-dirty") for name in found - GONE)
    kinds = git("cat-file", "--batch-check=%(objecttype)", input="\n".join(names) + "\n").split(
        "\n"
    )
    unknown = [name for name, kind in zip(names, kinds, strict=False) if kind != "commit"]
    assert names and not unknown
    assert {name for name in found if name.endswith("-dirty")} == DIRTY
