"""Training on prepared data equals training on the original files."""

import shutil

import pytest

from flash_frac.data import CorpusArguments, PreparedData, load_tokenizer, prepare_corpus
from flash_frac.train import load_recipe, train
from tests.commands import frac
from tests.train.runs import assert_same_weights, finish, losses, start_together, weights
from tests.train.test_resuming import CARRIED, interrupted

# The default of the training arguments, which decides on the held-out documents of files.
SEED = 42


@pytest.fixture
def tokens(text_folder, tmp_path):
    """The text of all these tests in shards of a document or two."""
    return make_tokens(text_folder, tmp_path / "tokens", held_out=0.1)


def make_tokens(text_folder, folder, **changes):
    arguments = CorpusArguments(sources=(str(text_folder),), seed=SEED, part_bytes=2000, **changes)
    data, _ = prepare_corpus(arguments, folder, processes=1, progress=False)
    assert len(data.train.shards) > 10
    return folder


def evaluations(result):
    return [log["eval_loss"] for log in result.history if "eval_loss" in log]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataloader_num_workers": 2},
        {"separate_documents": True},
        {"separate_documents": True, "stateful": True, "config_overrides": CARRIED},
    ],
    ids=["workers", "documents apart", "stateful"],
)
def test_training_is_the_same_and_resumes_exactly(
    write_recipe, tokens, tmp_path, monkeypatch, changes
):
    path = write_recipe(**changes)
    files = train(load_recipe(path, ["--output_dir", str(tmp_path / "files")]))
    # The command line replaces data_files and held_out of the recipe.
    typed = ["--prepared_data", str(tokens), "--output_dir", str(tmp_path / "prepared")]
    interrupted(monkeypatch, load_recipe(path, typed), 5)
    # The folder may move meanwhile.
    typed[1] = str(shutil.move(tokens, tmp_path / "moved"))
    result = train(load_recipe(path, typed))
    assert losses(tmp_path / "prepared") == losses(tmp_path / "files")
    assert evaluations(result) == evaluations(files) != []
    assert_same_weights(weights(tmp_path / "prepared"), weights(tmp_path / "files"))


@pytest.mark.parametrize("arguments", [[], ["--context_parallel_size", "2"]])
def test_two_ranks_read_what_they_read_of_files(write_recipe, tokens, tmp_path, arguments):
    path = write_recipe()
    for name, source in (("files", []), ("prepared", ["--prepared_data", tokens])):
        typed = [*arguments, *source, "--output_dir", tmp_path / name]
        for process in start_together(2, path, *typed):
            finish(process)
    assert losses(tmp_path / "prepared") == losses(tmp_path / "files")
    assert len(losses(tmp_path / "files")) == 6
    assert_same_weights(weights(tmp_path / "prepared"), weights(tmp_path / "files"))


def test_other_content_is_another_run(write_recipe, text_folder, tokens, tmp_path):
    path = write_recipe(data_files=None, held_out=None, prepared_data=str(tokens), max_steps=2)
    train(load_recipe(path))
    shutil.rmtree(tokens)
    with pytest.raises(ValueError, match=r"tokens holds no prepared data \(meta.json is missing\)"):
        train(load_recipe(path, ["--max_steps", "3"]))
    make_tokens(text_folder, tokens, held_out=0.2)
    with pytest.raises(ValueError, match=r"holds a run with other settings \(prepared_data '\w+' "):
        train(load_recipe(path, ["--max_steps", "3"]))


def test_nothing_held_out(write_recipe, text_folder, tmp_path):
    tokens = make_tokens(text_folder, tmp_path / "tokens")
    path = write_recipe(data_files=None, held_out=None, prepared_data=str(tokens), max_steps=2)
    with pytest.raises(
        ValueError, match=r"tokens has no held-out documents: prepare the data with"
    ):
        train(load_recipe(path))
    train(load_recipe(path, ["--eval_strategy", "no"]))
    assert len(losses(tmp_path / "run")) == 2


def test_another_tokenizer_is_refused_by_name(write_recipe, tokens):
    path = write_recipe(data_files=None, held_out=None, prepared_data=str(tokens), tokenizer="dna")
    with pytest.raises(ValueError, match=r"tokenised by 'bytes' .*but tokenizer is 'dna'"):
        train(load_recipe(path))
    recipe = load_recipe(path, ["--tokenizer", str(tokens / "tokenizer"), "--max_steps", "1"])
    train(recipe)


def test_the_command_line_replaces_prepared_data(write_recipe, text_folder):
    path = write_recipe(data_files=None, held_out=None, prepared_data="tokens")
    data = load_recipe(path, ["--data_files", str(text_folder)]).data
    assert data.prepared_data is None and data.held_out == 0.01
    data = load_recipe(path, ["--dataset_name", str(text_folder)]).data
    assert data.prepared_data is None


def test_plans_and_dry_runs_know_it(write_recipe, tokens):
    recipe, typed = write_recipe(), ("--prepared_data", tokens)
    data = PreparedData(tokens)
    planned = frac("plan", recipe, *typed)
    assert f"{data.train.num_tokens:,} available (in {tokens})" in planned.stdout
    shown = frac("train", recipe, *typed, "--dry_run")
    assert shown.returncode == 0, shown.stderr
    first = load_tokenizer("bytes").decode(data.train.tokens(0, 20).tolist())
    assert f"    1     '{first}" in shown.stdout
