"""Checkpoints are written while training continues, and hold the state of their step."""

import shutil
import threading
import time

import pytest
from torch.distributed.checkpoint import FileSystemWriter
from transformers import Trainer, TrainerCallback

from flash_frac.manifest import check_manifest
from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.checkpoint import checkpoints
from tests.train.runs import assert_same_weights, finish, losses, start, weights

QUICK = {"eval_strategy": "no", "max_steps": 6, "save_steps": 2}


class Events(TrainerCallback):
    """What happens in which order: steps, and the writing of optimizers."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.seen, write_data = [], FileSystemWriter.write_data
        build = FracTrainer.__init__

        def write_slowly(writer, *args, **kwargs):
            name = writer.path.parent.name
            self.seen.append(f"begin {name}")
            time.sleep(seconds)
            result = write_data(writer, *args, **kwargs)
            self.seen.append(f"end {name}")
            return result

        def build_watched(trainer, *args, **kwargs):
            build(trainer, *args, **kwargs)
            trainer.add_callback(self)

        monkeypatch.setattr(FileSystemWriter, "write_data", write_slowly)
        monkeypatch.setattr(FracTrainer, "__init__", build_watched)

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(state.global_step)


def test_training_goes_on_while_a_checkpoint_is_written(write_recipe, tmp_path, monkeypatch):
    """One is waited for where the next is due, and at the end."""
    path = write_recipe(**QUICK)
    train(load_recipe(path, ["--async_save", "false", "--output_dir", str(tmp_path / "waiting")]))
    events = Events(monkeypatch, seconds=1.0)
    train(load_recipe(path))
    run = tmp_path / "run"
    for step in (2, 4):
        begin, end = (events.seen.index(f"{x} checkpoint-{step}") for x in ("begin", "end"))
        assert {step + 1, step + 2} <= set(events.seen[begin:end])
        assert end < events.seen.index(f"begin checkpoint-{step + 2}")
    assert events.seen[-1] == "end checkpoint-6" and not list(run.glob(".saving*"))
    for checkpoint in checkpoints(run):
        check_manifest(checkpoint)
        # The steps that were made meanwhile are not in it.
        same = tmp_path / "waiting" / checkpoint.name
        for file in ("model.safetensors", "optimizer_0/__0_0.distcp", "scheduler.pt"):
            assert (checkpoint / file).read_bytes() == (same / file).read_bytes()
    assert len(checkpoints(run)) == 3 and losses(run) == losses(tmp_path / "waiting")


def test_without_it_training_waits(write_recipe, monkeypatch):
    events = Events(monkeypatch)
    train(load_recipe(write_recipe(async_save=False, **QUICK)))
    saves = [[f"begin checkpoint-{n}", f"end checkpoint-{n}"] for n in (2, 4, 6)]
    assert events.seen == [1, 2, *saves[0], 3, 4, *saves[1], 5, 6, *saves[2]]
    assert not any(thread.name == "saving" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("an error")])
def test_a_checkpoint_is_completed_if_the_run_ends(write_recipe, tmp_path, monkeypatch, error):
    Events(monkeypatch, seconds=0.5)
    step = FracTrainer.training_step

    def stop(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            raise error
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(FracTrainer, "training_step", stop)
    with pytest.raises((KeyboardInterrupt, ValueError)):
        train(load_recipe(write_recipe(**QUICK)))
    (folder,) = checkpoints(tmp_path / "run")
    check_manifest(folder)


def test_a_checkpoint_of_an_earlier_version_goes_on(write_recipe, tmp_path, monkeypatch):
    """Their optimizer is a file of torch."""
    path = write_recipe(**QUICK)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "new")]))
    with monkeypatch.context() as patch:
        patch.setattr(
            FracTrainer,
            "_save_optimizer_and_scheduler",
            lambda self, folder: Trainer._save_optimizer_and_scheduler(self, folder),
        )
        train(load_recipe(path, ["--output_dir", str(tmp_path / "old")]))
    old = tmp_path / "old"
    shutil.rmtree(old / "checkpoint-6")
    shutil.rmtree(old / "final")
    assert (old / "checkpoint-4" / "optimizer.pt").exists()
    assert not (old / "checkpoint-4" / "optimizer_0").exists()
    train(load_recipe(path, ["--output_dir", str(old)]))
    assert losses(old) == losses(tmp_path / "new")
    assert_same_weights(weights(old), weights(tmp_path / "new"))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "rmsprop", "adagrad")]


@pytest.mark.parametrize("name", ["adafactor", *SLOW])
def test_other_optimizers_resume_exactly(write_recipe, tmp_path, name):
    path, run = write_recipe(optim=name, **QUICK), tmp_path / "run"
    train(load_recipe(path))
    before, final = losses(run), weights(run)
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "final")
    train(load_recipe(path))
    assert losses(run) == before
    assert_same_weights(weights(run), final)


def test_what_goes_to_the_hub_is_complete(write_recipe, tmp_path, monkeypatch):
    pushed = []

    def push(trainer, folder):
        check_manifest(folder)
        pushed.append(folder)

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda *args, **kwargs: None)
    train(load_recipe(write_recipe(push_to_hub=True, **QUICK)))
    assert pushed == [str(tmp_path / "run" / f"checkpoint-{n}") for n in (2, 4, 6)]


def test_nothing_of_torch_is_printed(write_recipe):
    """That a single process saves and loads is no news."""
    path = write_recipe(**QUICK)
    for steps in (2, 4):
        process = start(path, "--max_steps", steps)
        finish(process)
        assert "Warning" not in process.output.read_text()
