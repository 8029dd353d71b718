"""The memory benchmark on a run of a few steps, and its committed rows against `frac plan`."""

import re
from pathlib import Path

import memory
import pytest

from flash_frac.bench.memory import CASES, MEMORY_COLUMNS
from flash_frac.bench.rows import read_rows
from flash_frac.train import load_recipe
from flash_frac.train.memory import GIB, memory_of
from flash_frac.train.plan import setup_of

RESULTS = Path(memory.__file__).parent / "results" / "memory"
ROWS = [row for path in sorted(RESULTS.glob("*.csv")) for row in read_rows(path, MEMORY_COLUMNS)]


def peak_of(recipe, arguments):
    return memory_of(setup_of(load_recipe(recipe, arguments, planned=1), 1)[0]).peak / GIB


def test_a_row_says_what_was_run(tmp_path):
    path = tmp_path / "rows.csv"
    words = "small --gradient_checkpointing true --use_cpu"
    memory.main(["--cases", words, "--cap", "40", "--commit", "abc", "--out", str(path)])
    (row,) = read_rows(path, MEMORY_COLUMNS)
    assert row["recipe"] == "small" and row["arguments"] in words and row["recompute"] == "all"
    assert (row["cap_gib"], row["peak_gib"], row["commit"]) == ("40.0", "", "abc")
    assert float(row["planned_gib"]) > 0 and float(row["tokens_per_s"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_recipe_that_fits_one_large_gpu(name):
    recipe, *arguments = CASES[name].split()
    assert 1 < peak_of(recipe, [*arguments, "--eval_strategy=no"]) < 120


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['recipe']} {row['arguments']}")
def test_measured_peaks(row):
    """Within 10%, of the plan as it is now and not as it was when the row was measured."""
    typed = [*row["arguments"].split(), "--eval_strategy=no"]
    typed += [f"--per_device_train_batch_size={row['batch']}"]
    typed += [f"--gradient_accumulation_steps={row['accumulation']}"]
    typed += [f"--sequence_length={row['sequence_length']}"]
    assert re.fullmatch(r"[\d.]+", row["peak_gib"]), "a row of a GPU has a peak"
    assert peak_of(row["recipe"], typed) == pytest.approx(float(row["peak_gib"]), rel=0.1)
