"""With load_best_model_at_end, `final` is the best checkpoint even after interruptions."""

import shutil

import pytest
from safetensors.torch import load_file

from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.checkpoint import checkpoints
from flash_frac.train.resuming import best_of
from tests.commands import frac
from tests.train.runs import assert_same_weights, finish, losses, start_together, weights

# The held-out losses by step, as the test wants them: the best checkpoint is not the last.
LOSSES = {2: 3.0, 4: 2.0, 6: 4.0}


@pytest.fixture
def best_is_4(write_recipe, tmp_path, monkeypatch):
    """A recipe by which checkpoint-4 is the best, and the folder of its finished run."""
    plain = FracTrainer.evaluate

    def evaluate(self, *args, **kwargs):
        metrics = plain(self, *args, **kwargs)
        return {**metrics, "eval_loss": LOSSES[self.state.global_step]}

    monkeypatch.setattr(FracTrainer, "evaluate", evaluate)
    path = write_recipe(load_best_model_at_end=True, eval_steps=2, save_steps=2)
    train(load_recipe(path))
    run = tmp_path / "run"
    assert_final_is_4(run)
    return path, run


def assert_final_is_4(run):
    assert_same_weights(weights(run), load_file(run / "checkpoint-4" / "model.safetensors"))


def test_repeating_a_finished_run(best_is_4):
    path, run = best_is_4
    done = frac("train", path)
    assert done.returncode == 0 and "This run is finished" in done.stdout
    assert_final_is_4(run)


def test_a_kill_before_the_final_model(best_is_4):
    path, run = best_is_4
    shutil.rmtree(run / "final")
    train(load_recipe(path))
    assert_final_is_4(run)


def test_a_kill_before_the_last_step(best_is_4):
    path, run = best_is_4
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoint-6")
    train(load_recipe(path))
    assert_final_is_4(run)


def test_a_folder_that_has_moved(best_is_4, tmp_path):
    path, run = best_is_4
    moved = run.rename(tmp_path / "moved")
    shutil.rmtree(moved / "final")
    train(load_recipe(path, ["--output_dir", str(moved)]))
    assert_final_is_4(moved)


def test_one_checkpoint_at_most(best_is_4, tmp_path):
    """The last one stays beside the best: without it the same command would train again."""
    path, _ = best_is_4
    run = tmp_path / "one"
    limited = load_recipe(path, ["--save_total_limit", "1", "--output_dir", str(run)])
    train(limited)
    assert limited.training.save_total_limit == 1
    assert [p.name for p in checkpoints(run)] == ["checkpoint-4", "checkpoint-6"]
    before = losses(run)
    done = frac("train", path, "--save_total_limit", 1, "--output_dir", run)
    assert "This run is finished" in done.stdout and losses(run) == before
    assert_final_is_4(run)


@pytest.mark.parametrize("name", ["model.safetensors", None], ids=["damaged", "missing"])
def test_a_best_checkpoint_that_is_lost(best_is_4, name):
    path, run = best_is_4
    before = weights(run)
    best = run / "checkpoint-4"
    if name is None:
        shutil.rmtree(best)
    else:
        (best / name).write_bytes((best / name).read_bytes()[:-1])
    done = frac("train", path)
    problem = f"{best / name} is damaged" if name else f"{best} is missing"
    assert done.returncode == 1 and problem in done.stderr
    assert "or set load_best_model_at_end to false" in done.stderr
    assert_same_weights(weights(run), before)


def test_all_processes_load_the_best(write_recipe, tmp_path):
    """Each knows it by its name in output_dir, and not by that of its draft."""
    path = write_recipe(load_best_model_at_end=True, eval_steps=2, save_steps=2, max_steps=4)
    processes = start_together(2, path)
    for process in processes:
        finish(process)
    assert not any("Could not locate" in p.output.read_text() for p in processes)
    best = best_of(tmp_path / "run" / "checkpoint-4")
    assert_same_weights(weights(tmp_path / "run"), load_file(best / "model.safetensors"))
