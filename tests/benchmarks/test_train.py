"""The benchmark of training, on a run of a few steps."""

import train

from flash_frac.bench.rows import read_rows
from flash_frac.bench.training import TRAIN_COLUMNS
from tests.train.conftest import cache_folder, text_folder, write_recipe  # noqa: F401


def test_a_row_says_what_the_logs_say(write_recipe, tmp_path):  # noqa: F811
    path = tmp_path / "rows.csv"
    recipe = write_recipe(gradient_accumulation_steps=2)
    train.main([str(recipe), "--max_steps", "4", "--commit", "abc", "--out", str(path)])
    (row,) = read_rows(path, TRAIN_COLUMNS)
    assert (row["steps"], row["tokens_per_step"], row["commit"]) == ("4", "256", "abc")
    assert float(row["tokens_per_s"]) > 0 and float(row["last_loss"]) < float(row["first_loss"])
    assert row["command"].endswith("recipe.yaml --max_steps 4")
