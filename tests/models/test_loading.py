"""Checkpoints for the commands: found without retries, loaded completely, or refused by name."""

import logging
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flash_frac.manifest import MANIFEST, write_manifest
from flash_frac.models import loading
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model
from tests.commands import make_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def nan_in_a_row(tensors):
    tensors["model.layers.1.mixer.in_proj.weight"][3, 2] = torch.nan


CHANGES = {
    "missing tensors: model.layers.1.mixer.D": lambda x: x.pop("model.layers.1.mixer.D"),
    "unexpected tensors: other": lambda x: x.update(other=torch.zeros(3)),
    "tensors with NaN or inf: model.layers.1.mixer.in_proj.weight": nan_in_a_row,
    "tensors with NaN or inf: model.layers.0.mixer.base_log_tau": lambda x: x[
        "model.layers.0.mixer.base_log_tau"
    ].fill_(torch.inf),
    "tensors of another shape: model.norm.weight ((3,) in the file, (16,) in the model)": (
        lambda x: x.update({"model.norm.weight": torch.zeros(3)})
    ),
    "and 25 more": lambda x: [x.pop(name) for name in [*x] if name != "model.norm.weight"],
}


@pytest.mark.parametrize("problem", CHANGES)
def test_tensors_are_refused_by_name(copy, problem, capfd):
    tensors = load_file(copy / WEIGHTS)
    CHANGES[problem](tensors)
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError) as caught:
        load_model(copy)
    assert str(caught.value).startswith(f"checkpoint {copy} is refused: ")
    assert problem in str(caught.value)
    # The error says it all, once.
    assert "LOAD REPORT" not in capfd.readouterr().err
    if "shape" not in problem:
        # In Python, loading stays that of transformers.
        assert AutoModelForCausalLM.from_pretrained(copy) is not None


def test_a_whole_checkpoint_is_what_transformers_loads(whole):
    ours, theirs = load_model(whole).state_dict(), AutoModelForCausalLM.from_pretrained(whole)
    assert all(torch.equal(x, ours[name]) for name, x in theirs.state_dict().items())
    assert find_tokenizer(find_checkpoint(whole)).eos_token_id == 2


@pytest.mark.parametrize("size", [0, 7, 1000])
def test_a_damaged_file_is_named(copy, size):
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"cannot be loaded: .*model\.safetensors is cut short"):
        load_model(copy)


def test_a_damaged_or_missing_shard_is_named(copy):
    model = AutoModelForCausalLM.from_pretrained(copy)
    (copy / WEIGHTS).unlink()
    model.save_pretrained(copy, max_shard_size="10KB")
    shards = sorted(copy.glob("*.safetensors"))
    assert len(shards) > 1 and load_model(copy) is not None
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{shards[1].name} is cut short"):
        load_model(copy)
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"cannot be loaded: .*{shards[1].name}"):
        load_model(copy)


def flip(path, position=-9):
    """One bit, which leaves the size and a finite weight."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_weights_are_those_of_the_manifest(copy, monkeypatch):
    write_manifest(copy)
    assert load_model(copy) is not None
    # People edit settings, and drop what they do not need.
    flip(copy / "generation_config.json", 2)
    (copy / "tokenizer.json").unlink()
    assert load_model(copy) is not None
    flip(copy / WEIGHTS)
    with pytest.raises(
        ValueError, match=r"is refused: .*model\.safetensors is damaged: its content"
    ):
        load_model(copy)
    # Of large files the size alone is compared.
    monkeypatch.setattr(loading, "VERIFIED_BYTES", 1000)
    assert load_model(copy) is not None
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes() + b"0")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: it has \d+ bytes"):
        load_model(copy)


def test_the_advice_on_weights_that_were_changed_works(copy):
    write_manifest(copy)
    flip(copy / WEIGHTS)
    with pytest.raises(ValueError, match=r"delete manifest\.json there if you changed it"):
        load_model(copy)
    (copy / MANIFEST).unlink()
    assert load_model(copy) is not None


def test_a_missing_tokenizer(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError) as caught:
        find_tokenizer(find_checkpoint(copy))
    expected = f"{copy} has no tokenizer; pass --tokenizer, or save one next to it"
    assert str(caught.value) == expected
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer of .* cannot be loaded .*; pass --tokenizer"):
        find_tokenizer(find_checkpoint(copy))


@pytest.fixture
def requests(monkeypatch):
    """The addresses that were asked for, each of which fails with what the test puts there."""
    asked = []

    def fail(url, **options):
        asked.append(url)
        raise fail.error

    fail.error = OSError("no network")
    fail.asked = asked
    monkeypatch.setattr(loading, "get_hf_file_metadata", fail)
    return fail


@pytest.mark.parametrize("name", ["./absent", "absent/", "/no/such/folder", "a/b/c", "~/nothing"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(requests, name):
    with pytest.raises(ValueError, match="there is no such folder, and it cannot be a model"):
        find_checkpoint(name)
    assert requests.asked == []


def response(status):
    """What the hub's client makes its errors from, whichever package it asks by."""
    library = __import__(huggingface_hub.utils.get_session().__class__.__module__.split(".")[0])
    return library.Response(status, request=library.Request("HEAD", "https://hub"))


def test_the_hub_is_asked_once(requests, monkeypatch):
    both = "checkpoint some/model was not found: there is no such folder, and the hub"
    with pytest.raises(ValueError, match=rf"{both} cannot be reached .*\(no network\)"):
        find_checkpoint("some/model")
    assert requests.asked == ["https://huggingface.co/some/model/resolve/main/config.json"]
    requests.error = RepositoryNotFoundError("404", response=response(404))
    with pytest.raises(ValueError, match=f"{both} has no model some/model"):
        find_checkpoint("some/model")
    requests.error = EntryNotFoundError("404")
    with pytest.raises(ValueError, match=r"the model some/model on the hub has no config\.json"):
        find_checkpoint("some/model")
    # A tokenizer needs none.
    assert find_checkpoint("some/model", needs_config=False).folder is None
    assert len(requests.asked) == 4


def test_without_a_network_the_cache_will_do(requests, monkeypatch):
    cached = "/cache/models--some--model/snapshots/0a1b2c/config.json"
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda *a, **o: cached)
    found = find_checkpoint("some/model", revision="v1")
    options = {"revision": "0a1b2c", "local_files_only": True, "trust_remote_code": False}
    assert found.options == options


def test_a_model_of_the_hub_is_read_at_one_commit(monkeypatch):
    """Settings, weights and tokenizer belong together, whatever is pushed between two requests."""
    answer = SimpleNamespace(commit_hash="0a1b2c")
    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda url: answer)
    options = find_checkpoint("some/model", revision="main").options
    assert options == {"revision": "0a1b2c", "trust_remote_code": False}


def test_folders_that_hold_no_model(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"it has no config\.json; did you mean .*final\?"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a file; name the folder"):
        find_checkpoint(tmp_path / "file")


def warnings_of(call, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flash_frac.models.loading"), "propagate", True)
    caplog.clear()
    with caplog.at_level("WARNING", "flash_frac"):
        call()
    return caplog.text


def test_settings_that_changed_are_named(copy, caplog, monkeypatch):
    """They are taken as they are, because people edit them; a flipped bit would look the same."""
    write_manifest(copy)
    loads = {
        "config.json": lambda: load_model(copy),
        "generation_config.json": lambda: load_model(copy),
        "tokenizer_config.json": lambda: find_tokenizer(find_checkpoint(copy)),
    }
    for name, load in loads.items():
        assert warnings_of(load, caplog, monkeypatch) == ""
        whole = (copy / name).read_text()
        (copy / name).write_text(whole + " ")
        assert f"{copy / name} is damaged" in warnings_of(load, caplog, monkeypatch)
        (copy / MANIFEST).rename(copy / "aside")
        assert warnings_of(load, caplog, monkeypatch) == ""
        (copy / "aside").rename(copy / MANIFEST)
        (copy / name).write_text(whole)


def test_settings_that_make_no_sense_any_more_are_named(copy):
    write_manifest(copy)
    path = copy / "config.json"
    path.write_text(path.read_text().replace("hidden_size", "hidden_rize"))
    with pytest.raises(ValueError, match=rf"no field hidden_rize.*; {path} is damaged"):
        load_model(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_broken_file_of_a_tokenizer_is_named(copy, name, listed):
    if listed:
        write_manifest(copy)
    (copy / name).write_text((copy / name).read_text()[:50])
    with pytest.raises(ValueError, match=rf"cannot be loaded \({copy / name} is ") as caught:
        find_tokenizer(find_checkpoint(copy))
    assert "\n" not in str(caught.value)
