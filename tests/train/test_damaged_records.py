"""Records of a run that are damaged: each is named, with what to do."""

import pytest

from flash_frac.manifest import MANIFEST
from flash_frac.train import load_recipe, train
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
