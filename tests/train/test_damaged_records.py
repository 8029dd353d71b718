"""Damaged records of a run: each error names the file and the remedy."""

import shutil

import pytest

from flash_frac.manifest import MANIFEST
from flash_frac.train import load_recipe, train
from flash_frac.train.monitor import read_lines
from tests.commands import frac


@pytest.fixture
def run(write_recipe, tmp_path):
    train(load_recipe(write_recipe(max_steps=2, eval_strategy="no")))
    return tmp_path / "run"


def refused(recipe, *options):
    """The one line that the command ends with."""
    done = frac("train", recipe, "--max_steps", 3, *options)
    assert done.returncode == 1 and done.stderr.startswith("frac: ")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_damaged_records_are_named(run):
    recipe, path = run.parent / "recipe.yaml", run / "run.json"
    content = path.read_text()
    for damaged in (content[: len(content) // 2], "[]", '{"model": {}}'):
        path.write_text(damaged)
        message = refused(recipe)
        assert f"{path} " in message and "delete it to resume" in message
    path.write_text(content)

    log = run / "log.jsonl"
    lines = log.read_text()
    for damaged in ("{\n" + lines, '{"loss": 1}\n' + lines):
        log.write_text(damaged)
        assert f"{log} line 1 is " in (message := refused(recipe)) and "delete that line" in message
    # The advice holds, and a last line without an end is that of a kill.
    log.write_text(lines + '{"step": 2, "lo')

    checkpoint = run / "checkpoint-2"
    state = checkpoint / "trainer_state.json"
    (checkpoint / MANIFEST).unlink()
    whole = state.read_text()
    for damaged in (whole[:99], "[]", '{"nonsense": 1}'):
        state.write_text(damaged)
        assert f"{state} is damaged" in refused(recipe, "--resume_from_checkpoint", checkpoint)
    state.write_text(whole)
    done = frac("train", recipe, "--max_steps", 3, "--resume_from_checkpoint", checkpoint)
    assert done.returncode == 0, done.stderr
    assert f"{log} line {lines.count(chr(10)) + 1} is cut off and left out" in done.stdout


def test_a_log_that_changed_is_named(run):
    """Its lines are still JSON; the run goes on, and the log as it is."""
    recipe, log = run.parent / "recipe.yaml", run / "log.jsonl"
    whole = log.read_text()
    said = f"{log} is not the log that {run / 'checkpoint-2'} was saved with"
    for content in (whole.replace('"loss": ', '"loss": 1'), "", whole[: whole.index("\n") + 1]):
        for folder in ("checkpoint-3", "final"):
            shutil.rmtree(run / folder, ignore_errors=True)
        log.write_text(content)
        done = frac("train", recipe, "--max_steps", 3)
        assert done.returncode == 0 and said in done.stdout.splitlines()
    shutil.rmtree(run / "checkpoint-3")
    log.write_text(whole + '{"step": 2, "loss": 0.0}\n')
    done = frac("train", recipe, "--max_steps", 3)
    assert done.returncode == 0 and "is not the log" not in done.stdout
    # What came after the checkpoint is written again.
    assert [line["step"] for line in read_lines(log) if "loss" in line] == [1, 2, 3]


def test_other_settings_name_their_record(run):
    done = frac("train", run.parent / "recipe.yaml", "--sequence_length", 32)
    assert done.returncode == 1 and "other settings (sequence_length 64 -> 32)" in done.stderr
    assert f"output_dir {run} " in done.stderr and "in its run.json" in done.stderr
