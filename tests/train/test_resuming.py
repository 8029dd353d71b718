"""Runs that end early and resume: killed, stopped by an error, or out of disk space."""

import json
import time
from contextlib import contextmanager
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoTokenizer, TrainerCallback, trainer

from flash_frac.manifest import write_manifest
from flash_frac.train import FracTrainer, load_recipe, run, train
from flash_frac.train.checkpoint import CheckpointError, checkpoints, last_checkpoint
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.commands import frac
from tests.train.runs import (
    assert_same_weights,
    await_checkpoint,
    finish,
    losses,
    make_text,
    start,
    weights,
)

# What has a state of fixed size.
CARRIED = {"mixer_types": ["frac", "delta", "sliding_attention"], "sliding_window": 20}
CARRIED |= {"num_hidden_layers": 3}


def kill_at(process, log, step):
    """Kill -9 as soon as the log shows a step."""
    deadline = time.time() + 120
    while not any(line["step"] >= step for line in read_lines(log)):
        assert process.is_alive() and time.time() < deadline, process.output.read_text()
        time.sleep(0.01)
    process.kill()
    process.join()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(write_recipe, tmp_path):
    path = write_recipe(max_steps=40, save_steps=7, gradient_accumulation_steps=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = start(path, "--output_dir", whole)
    victim = start(path, "--output_dir", killed)
    await_checkpoint(killed, 7)
    kill_at(victim, killed / LOG_NAME, 9)
    # What a death in the middle of a save would leave.
    (killed / ".saving-here-7" / "checkpoint-99").mkdir(parents=True, exist_ok=True)
    assert last_checkpoint(killed).name != "checkpoint-99"
    finish(start(path, "--output_dir", killed))
    finish(reference)
    assert losses(killed) == losses(whole) and len(losses(whole)) == 40
    assert_same_weights(weights(killed), weights(whole))
    assert not list(killed.glob(".saving*"))


class StopAt(TrainerCallback):
    """Ends a run as an error would."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


@contextmanager
def stopping(monkeypatch, step, error=InterruptedError):
    """Runs end by an error when they have made `step` steps."""
    plain = FracTrainer.__init__

    def with_stop(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.add_callback(StopAt(step, error))

    with monkeypatch.context() as patch:
        patch.setattr(FracTrainer, "__init__", with_stop)
        yield


def interrupted(monkeypatch, recipe, step):
    """Run until an error in `step`."""
    with stopping(monkeypatch, step), pytest.raises(InterruptedError):
        train(recipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"separate_documents": True},
        {"separate_documents": True, "stateful": True, "config_overrides": CARRIED},
        {"num_train_epochs": 2, "max_steps": -1, "sequence_length": 512, "save_steps": 5},
    ],
    ids=["documents apart", "stateful", "epochs"],
)
def test_resuming_is_exact(write_recipe, tmp_path, monkeypatch, changes):
    path = write_recipe(**changes)
    outputs = ["--output_dir", str(tmp_path / "whole")]
    train(load_recipe(path, outputs))
    broken = tmp_path / "broken"
    outputs = ["--output_dir", str(broken)]
    total = losses(tmp_path / "whole")[-1][0]
    interrupted(monkeypatch, load_recipe(path, outputs), total - 1)
    train(load_recipe(path, outputs))
    assert losses(broken) == losses(tmp_path / "whole")
    assert_same_weights(weights(broken), weights(tmp_path / "whole"))


def test_resuming_a_hub_dataset_is_exact(write_recipe, tmp_path, text_folder, monkeypatch):
    """A folder stands for the hub: `datasets` reads both alike. Of streams see test_reading."""
    source = {"dataset_name": str(text_folder), "data_files": None}
    path = write_recipe(**source, separate_documents=True, sequence_length=256)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "whole")]))
    outputs = ["--output_dir", str(tmp_path / "broken")]
    interrupted(monkeypatch, load_recipe(path, outputs), 5)
    result = train(load_recipe(path, outputs))
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert any("eval_loss" in log for log in result.history)


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (5, "stopped at step 5; checkpoint-4 is kept; the same command resumes from it"),
        (1, "stopped at step 1; there is no checkpoint yet, so the same command starts over"),
    ],
)
def test_ctrl_c(write_recipe, monkeypatch, step, kept):
    with stopping(monkeypatch, step, KeyboardInterrupt):
        done = frac("train", write_recipe(disable_tqdm=False))
    assert done.returncode == 130 and done.stdout.splitlines()[-1] == kept
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_tokens_are_made(write_recipe, monkeypatch):
    monkeypatch.setattr(run, "build_data", mock.Mock(side_effect=KeyboardInterrupt))
    done = frac("train", write_recipe())
    kept = "there is no checkpoint yet, so the same command starts over"
    assert done.returncode == 130 and done.stdout == f"stopped before the first step; {kept}\n"


def test_resuming_without_noise(write_recipe, tmp_path):
    """A tied head is saved once; any other missing tensor is an error, and not a warning."""
    train(load_recipe(write_recipe(max_steps=2, eval_strategy="no")))
    with mock.patch.object(trainer.logger, "warning") as warning:
        train(load_recipe(write_recipe(max_steps=3, eval_strategy="no")))
    assert not any("missing keys" in str(call) for call in warning.mock_calls)
    saved = tmp_path / "run" / "checkpoint-3" / "model.safetensors"
    tensors = load_file(saved)
    del tensors["model.norm.weight"]
    save_file(tensors, saved, {"format": "pt"})
    # As if it had been saved so.
    write_manifest(saved.parent)
    with pytest.raises(
        ValueError, match=r"checkpoint-3 does not fit this model: missing \['model.no"
    ):
        train(load_recipe(write_recipe(max_steps=4, eval_strategy="no")))


def test_a_complete_run_is_not_trained_further(write_recipe, tmp_path):
    path = write_recipe(disable_tqdm=False)
    train(load_recipe(path))
    before = weights(tmp_path / "run")
    done = frac("train", path)
    finished = f"This run is finished: {tmp_path}/run/checkpoint-6 is its last checkpoint"
    assert done.returncode == 0 and finished in done.stdout.splitlines()
    assert "Resuming" not in done.stdout and "0/6" not in done.stderr
    assert len(losses(tmp_path / "run")) == 6
    assert_same_weights(weights(tmp_path / "run"), before)


def test_a_run_killed_after_its_last_checkpoint_keeps_no_more_than_its_limit(
    write_recipe, tmp_path, monkeypatch
):
    path, run = write_recipe(save_total_limit=2), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("flash_frac.train.checkpoint.remove", lambda folder: None)
        train(load_recipe(path))
    assert len(checkpoints(run)) == 3
    train(load_recipe(path))
    assert [p.name for p in checkpoints(run)] == ["checkpoint-4", "checkpoint-6"]


def test_another_recipe_does_not_go_on_with_a_run(write_recipe, tmp_path):
    train(load_recipe(write_recipe(max_steps=2)))
    with pytest.raises(ValueError, match=r"other settings \(sequence_length 64 -> 32\)"):
        train(load_recipe(write_recipe(sequence_length=32)))
    with pytest.raises(ValueError, match=r"other settings \(frac_num_modes 4 -> 8\)"):
        train(load_recipe(write_recipe(config_overrides={"frac_num_modes": 8})))
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        train(load_recipe(write_recipe(resume_from_checkpoint=str(tmp_path))))


def test_a_run_keeps_its_optimizer(write_recipe):
    """A checkpoint has its settings, and changed ones would not act."""
    path = write_recipe(max_steps=2, save_steps=2)
    train(load_recipe(path))
    folder = load_recipe(path).training.output_dir
    for changes in (["--learning_rate", "0.5"], ["--optim", "sgd"], ["--weight_decay", "9"]):
        name = changes[0].removeprefix("--")
        asked = ["--resume_from_checkpoint", f"{folder}/checkpoint-2"]
        for more in ([], asked):
            with pytest.raises(ValueError, match=rf"^{name} .* -> .*keeps the optimizer"):
                train(load_recipe(path, ["--max_steps", "4", *changes, *more]))
    assert train(load_recipe(path, ["--max_steps", "4"])).history[-1]["step"] == 4


def test_a_run_may_change_its_schedule(write_recipe):
    """For example to let the learning rate decay from a checkpoint on."""
    path = write_recipe(max_steps=2, save_steps=2, logging_steps=1, lr_scheduler_type="constant")
    train(load_recipe(path))
    changes = ["--max_steps", "6", "--lr_scheduler_type", "linear"]
    history = train(load_recipe(path, changes)).history
    rates = [row["learning_rate"] for row in history if "learning_rate" in row]
    assert rates == pytest.approx([3e-3, 3e-3, 3e-3, 1.5e-3, 1e-3, 5e-4])


@pytest.mark.parametrize("source", ["data_files", "dataset_name", "streaming"])
def test_a_run_does_not_go_on_with_other_text(write_recipe, tmp_path, source):
    """Its path is the same, and so is the number of documents."""
    (tmp_path / "text").mkdir()
    text = make_text(tmp_path / "text") / "text.jsonl"
    changes = {"data_files": None, "dataset_name": str(text.parent)}
    if source == "data_files":
        changes = {"data_files": [str(text)]}
    elif source == "streaming":
        changes |= {"streaming": True, "held_out": 0.0}
    path = write_recipe(eval_strategy="no", max_steps=1, save_steps=1, **changes)
    train(load_recipe(path))
    run, more = tmp_path / "run", ["--max_steps", "2"]
    before = (run / "run.json").read_text()
    text.write_text(text.read_text().replace("memory", "oblivion"))
    name = {"streaming": "dataset_name"}.get(source, source)
    message = f"content of {name} or the tokenizer .* --resume_from_checkpoint {run}/checkpoint-1$"
    with pytest.raises(ValueError, match=message):
        train(load_recipe(path, more))
    assert (run / "run.json").read_text() == before
    if source == "data_files":
        train(load_recipe(path, [*more, "--resume_from_checkpoint", str(run / "checkpoint-1")]))
        assert [step for step, _ in losses(run)] == [1, 2]


def test_a_run_that_did_not_record_its_text_goes_on(write_recipe, tmp_path):
    """As those of earlier versions."""
    path, record = write_recipe(eval_strategy="no", max_steps=1, save_steps=1), tmp_path / "run"
    train(load_recipe(path))
    record /= "run.json"
    written = json.loads(record.read_text())
    content = written["order"].pop("content")
    record.write_text(json.dumps(written))
    train(load_recipe(path, ["--max_steps", "2"]))
    assert json.loads(record.read_text())["order"]["content"] == content


def test_the_beginning_of_documents_is_kept(write_recipe, tmp_path):
    """By the tokenizer of every checkpoint, and on resuming, whatever says so."""
    short = {"max_steps": 2, "eval_strategy": "no"}
    train(load_recipe(write_recipe(add_bos_token=True, **short)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert tokenizer("a").input_ids == [1, 100]
    with pytest.raises(ValueError, match=r"other settings \(beginning \[1\] -> None\)"):
        train(load_recipe(write_recipe(**short)))
    recipe = load_recipe(write_recipe(**short), ["--add_bos_token", "true", "--max_steps", "3"])
    train(recipe)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]


def test_a_run_goes_on_when_its_configuration_has_moved(write_recipe, tmp_path):
    train(load_recipe(write_recipe(max_steps=2)))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "elsewhere" / "config.json")
    moved = load_recipe(write_recipe(config_name="elsewhere", max_steps=3))
    (tmp_path / "config.json").unlink()
    train(moved)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]


def test_a_run_of_an_earlier_version_goes_on(write_recipe, tmp_path):
    """It wrote the path of its configuration, such as recipes/models/frac-tiny, into run.json."""
    path = write_recipe(config_name="frac-tiny", config_overrides={"vocab_size": 259}, max_steps=2)
    train(load_recipe(path))
    run = tmp_path / "run" / "run.json"
    written = json.loads(run.read_text())
    old = {"config_name": "recipes/models/frac-tiny", "config_overrides": {"vocab_size": 259}}
    run.write_text(json.dumps({**written, "order": {**written["order"], **old}}))
    train(load_recipe(path, ["--max_steps", "3"]))
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]
    assert json.loads(run.read_text())["recipe"]["model"]["config_name"] == "frac-tiny"


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(write_recipe, tmp_path, monkeypatch, meanwhile):
    path = write_recipe(save_total_limit=1, async_save=meanwhile)
    run, write_data = tmp_path / "run", FileSystemWriter.write_data

    def full(self, *args, **kwargs):
        if "checkpoint-4" in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(FileSystemWriter, "write_data", full)
        train(load_recipe(path))
    message = str(caught.value)
    assert "checkpoint-4 could not be written" in message and "No space left" in message
    assert f"last good checkpoint, {run / 'checkpoint-2'}" in message
    assert [p.name for p in checkpoints(run)] == ["checkpoint-2"]
    assert not list(run.glob(".saving*"))
    train(load_recipe(path))
    assert [p.name for p in checkpoints(run)] == ["checkpoint-6"]
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_that_cannot_grow(write_recipe, tmp_path):
    """The same for what the system really does: here, no file may be larger than 80 KiB."""
    path, run = write_recipe(max_steps=2), tmp_path / "run"
    train(load_recipe(path))
    before = contents(run / "checkpoint-2")
    process = start(path, "--max_steps", 4, file_size=80 * 1024)
    process.join()
    said = process.output.read_text()
    assert process.exitcode == 1 and "Traceback" not in said
    assert "checkpoint-4 could not be written" in said
    assert f"last good checkpoint, {run / 'checkpoint-2'}" in said
    assert before == contents(run / "checkpoint-2")
    assert checkpoints(run) == [run / "checkpoint-2"] and not list(run.glob(".saving*"))


def test_an_unwritable_folder_is_named(write_recipe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir .*file.run cannot be written to"):
        train(load_recipe(write_recipe(output_dir=str(tmp_path / "file" / "run"))))
