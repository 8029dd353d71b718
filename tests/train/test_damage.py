"""Incomplete or damaged checkpoints: no run resumes from one silently."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from flash_frac.manifest import MANIFEST, check_manifest, write_manifest
from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.checkpoint import checkpoints, consolidate
from flash_frac.train.resuming import newest_whole
from flash_frac.train.shards import read_index
from tests.commands import frac
from tests.test_remote_code import Code
from tests.train.runs import assert_same_weights, losses, weights

OPTIMIZER = "optimizer_0/__0_0.distcp"
STATEFUL = {"separate_documents": True, "stateful": True}


def delete(path):
    path.unlink()


def flip(path):
    """One bit in the middle, which keeps the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_text("{}")


DAMAGES = [
    (delete, OPTIMIZER, "is missing"),
    (delete, "scheduler.pt", "is missing"),
    (delete, "carried_0.safetensors", "is missing"),
    (delete, "rng_state.pth", "is missing"),
    (delete, MANIFEST, "is missing"),
    (flip, "model.safetensors", "is damaged"),
    (flip, OPTIMIZER, "is damaged"),
    (flip, "trainer_state.json", "is damaged"),
    (cut, "scheduler.pt", "is damaged"),
    (cut, MANIFEST, "is damaged"),
]


@pytest.fixture
def stopped(write_recipe, tmp_path):
    """A recipe, and a run by it whose last checkpoint is not the end: `final` is there as well."""
    path = write_recipe(max_steps=6, lr_scheduler_type="constant", eval_strategy="no", **STATEFUL)
    train(load_recipe(path))
    return path, tmp_path / "run"


def test_the_one_before_is_taken(stopped, tmp_path, capsys):
    path, whole = stopped
    for damage, name, problem in DAMAGES:
        run = tmp_path / f"{damage.__name__}-{Path(name).name}"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "checkpoint-6")
        shutil.rmtree(run / "final")
        damage(run / "checkpoint-4" / name)
        capsys.readouterr()
        train(load_recipe(path, ["--output_dir", str(run)]))
        said = capsys.readouterr().out
        lines = [line for line in said.splitlines() if "using checkpoint-2 instead" in line]
        assert len(lines) == 1 and f"{run}/checkpoint-4/{name} {problem}" in lines[0], said
        assert f"Resuming from {run}/checkpoint-2 at step 3" in said
        assert losses(run) == losses(whole)
        assert_same_weights(weights(run), weights(whole))
        assert [p.name for p in checkpoints(run)] == [f"checkpoint-{n}" for n in (2, 4, 6)]
        assert (run / "damaged-checkpoint-4").is_dir()


@pytest.mark.parametrize(("damage", "name", "problem"), [DAMAGES[0], DAMAGES[6]])
def test_the_one_that_was_asked_for_is_refused(stopped, damage, name, problem):
    path, run = stopped
    last = run / "checkpoint-6"
    damage(last / name)
    done = frac("train", path, "--resume_from_checkpoint", last)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"resume_from_checkpoint {last} is refused: {last / name} {problem}" in done.stderr
    assert last.is_dir() and newest_whole(run / "elsewhere") is None


def test_without_any_whole_one_the_command_stops(stopped):
    path, run = stopped
    for folder in checkpoints(run):
        delete(folder / "scheduler.pt")
    done = frac("train", path)
    assert done.returncode == 1 and "holds no checkpoint that can be resumed" in done.stderr
    assert all(str(folder / "scheduler.pt") in done.stderr for folder in checkpoints(run))
    # Nothing was moved, and nothing begins again in silence.
    assert len(checkpoints(run)) == 3 and "New run" not in done.stdout


def test_checkpoints_of_earlier_versions(stopped):
    """They have no manifest: taken when they are asked for, if nothing is missing."""
    path, run = stopped
    for folder in checkpoints(run):
        delete(folder / MANIFEST)
    last = run / "checkpoint-6"
    done = frac("train", path, "--max_steps", 7)
    advice = f"resume unverified with --resume_from_checkpoint {last}"
    assert done.returncode == 1 and advice in done.stderr
    asked = ["train", path, "--max_steps", 7, "--resume_from_checkpoint", last]
    done = frac(*asked)
    assert done.returncode == 0 and f"{last} has no {MANIFEST}: its files cannot" in done.stdout
    shutil.rmtree(last / "optimizer_0")
    done = frac(*asked)
    assert done.returncode == 1 and f"{last}/optimizer* is missing" in done.stderr


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (delete, "carried_0.safetensors"),
        (delete, "rng_state.pth"),
        (cut, "scheduler.pt"),
        (flip, OPTIMIZER),
        (delete, OPTIMIZER),
        (cut, "optimizer_0/.metadata"),
        (cut, "rng_state.pth"),
        (cut, "config.json"),
        (empty, "trainer_state.json"),
        (cut, "trainer_state.json"),
    ],
)
def test_damage_is_named_without_a_manifest(stopped, damage, name):
    path, run = stopped
    last = run / "checkpoint-6"
    delete(last / MANIFEST)
    damage(last / name)
    done = frac("train", path, "--max_steps", 7, "--resume_from_checkpoint", last)
    assert done.returncode == 1 and done.stderr.count("\n") <= 1, done.stderr
    assert str(last / name).replace(".pth", "") in done.stderr, done.stderr


def code_in_a_file_of_torch(folder, code):
    """As earlier versions wrote it."""
    shutil.rmtree(folder / "optimizer_0")
    torch.save({"code": code}, folder / "optimizer.pt")


def code_in_an_index(folder, code):
    (folder / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(code))


def code_in_a_value(folder, code):
    """In the place of the first value that is no tensor."""
    parts = folder / "optimizer_0"
    state = {"optimizer": {"param_groups": [{"lr": code}]}}
    state_dict_saver.save(state, checkpoint_id=parts / "other", no_dist=True)
    index, other = read_index(parts), read_index(parts / "other")
    (place,) = other.storage_data
    value = next(x for x in other.storage_data.values())
    index.storage_data[place] = replace(value, relative_path=f"other/{value.relative_path}")
    with (parts / ".metadata").open("wb") as file:
        pickle.dump(index, file)


@pytest.mark.parametrize("put", [code_in_a_file_of_torch, code_in_an_index, code_in_a_value])
def test_code_in_an_optimizer_is_not_run(stopped, tmp_path, put):
    path, run = stopped
    last, mark = run / "checkpoint-6", tmp_path / "the code has run"
    put(last, Code(mark))
    write_manifest(last)
    done = frac("train", path, "--max_steps", 7)
    assert done.returncode == 1 and "Traceback" not in done.stderr and not mark.exists()
    assert f"{last} is refused: a torch file in it" in done.stderr


def test_a_trainer_of_ones_own_verifies_too(stopped):
    path, run = stopped
    recipe = load_recipe(path)
    flip(run / "checkpoint-6" / OPTIMIZER)
    result = train(load_recipe(path, ["--output_dir", str(run / "other"), "--max_steps", "2"]))
    trainer = FracTrainer(
        result.model, recipe, tokenizer=result.tokenizer, train_dataset=[0, 0, 0, 0]
    )
    with pytest.raises(ValueError, match=r"__0_0.distcp is damaged"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))


def test_what_save_only_model_leaves_out_is_told(write_recipe, tmp_path):
    train(load_recipe(write_recipe(save_only_model=True, eval_strategy="no", max_steps=2)))
    done = frac("train", tmp_path / "recipe.yaml", "--max_steps", 3)
    assert done.returncode == 0, done.stderr
    assert "optimizer and learning rate start fresh (save_only_model)" in done.stdout


def test_final_has_a_manifest(stopped):
    _, run = stopped
    check_manifest(run / "final")


def test_damaged_shards_are_not_joined(tmp_path):
    shards = tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    (shards / "__0_0.distcp").write_bytes(b"shard")
    write_manifest(tmp_path / "checkpoint-2")
    flip(shards / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"__0_0.distcp is damaged"):
        consolidate(tmp_path / "checkpoint-2", tmp_path / "joined")
