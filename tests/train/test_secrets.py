"""Secrets given to a run appear in nothing that it writes or prints."""

import dataclasses
import pickle

from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.arguments import FracTrainingArguments

MARK = "hf_MARKED"
# The files of a checkpoint from which training resumes, as torch saves them.
RESUMED = {".metadata", "__0_0.distcp", "scheduler.pt", "rng_state.pth"}


def secret_names(arguments):
    """The fields whose value transformers itself leaves out of what it shows."""
    shown = arguments.to_dict()
    fields = (field.name for field in dataclasses.fields(arguments))
    return [name for name in fields if shown.get(name) == f"<{name.upper()}>"]


def files_with(mark, folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if mark.encode() in path.read_bytes()]


def is_pickled(path):
    head = path.read_bytes()[:4]
    # torch.save writes a zip archive.
    return head[:2] == b"\x80\x04" or head == b"PK\x03\x04"


def test_no_secret_is_written(write_recipe, tmp_path, capfd, monkeypatch):
    secrets = secret_names(FracTrainingArguments(output_dir=str(tmp_path / "unused")))
    assert "hub_token" in secrets
    marked = {name: f"{MARK}_{name}" for name in secrets}
    trainers = []
    monkeypatch.setattr(
        "flash_frac.train.run.FracTrainer",
        lambda *given, **named: trainers.append(FracTrainer(*given, **named)) or trainers[0],
    )
    recipe = load_recipe(write_recipe(eval_steps=2, report_to="tensorboard", **marked))
    train(recipe)
    run = tmp_path / "run"
    # Whoever pushes to the hub still has it.
    assert all(getattr(recipe.training, name) == value for name, value in marked.items())
    # What transformers writes into output_dir on its way to the hub; there is none here.
    trainers[0].args.push_to_hub = True
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: Hub())
    trainers[0].hub_model_id, trainers[0].push_in_progress = "some/model", None
    trainers[0]._push_from_checkpoint(str(run / "checkpoint-6"))
    assert (run / "training_args.bin").exists()
    assert files_with(MARK, run) == []
    printed = capfd.readouterr()
    assert MARK not in printed.out + printed.err
    assert MARK.encode() not in pickle.dumps(recipe.training)


class Hub:
    def upload_folder(self, **options):
        return None


def test_nothing_is_pickled_but_what_training_resumes_from(write_recipe, tmp_path):
    train(load_recipe(write_recipe(max_steps=2)))
    run = tmp_path / "run"
    pickled = [path for path in run.rglob("*") if path.is_file() and is_pickled(path)]
    assert {path.name for path in pickled} == RESUMED
    assert {path.relative_to(run).parts[0] for path in pickled} == {"checkpoint-2"}
