"""Checkpoints that name their classes: `auto_map`, and the file it points to."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, dynamic_module_utils

from flash_frac.manifest import MANIFEST, ManifestError, check_manifest, write_manifest
from flash_frac.models import FracConfig, FracForCausalLM, FracModel
from flash_frac.models.export import CODE, auto_map, export
from tests.models.conftest import make_model
from tests.models.hybrids import make_kind


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """transformers copies the file there before it imports it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


def files_of(folder):
    return {path.name for path in folder.iterdir()}


def assert_names_its_classes(folder):
    assert json.loads((folder / "config.json").read_text())["auto_map"] == auto_map()
    assert (folder / "modeling_frac.py").read_text() == CODE


def test_the_code_passes_linters_of_repositories():
    """Imported names are sorted, so that a committed checkpoint changes nothing there."""
    names = CODE.partition(" import ")[2].partition("  #")[0].split(", ")
    assert names == sorted(names) and len(names) == 4


def test_files_of_training_stay_behind(tmp_path):
    make_model().save_pretrained(tmp_path / "run")
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "notes.md"):
        (tmp_path / "run" / name).touch()
    copy = export(tmp_path / "run", tmp_path / "copy")
    assert files_of(tmp_path / "run") - files_of(copy) == {
        "training_args.bin",
        "optimizer.pt",
        "rng_state_0.pth",
    }


@pytest.mark.parametrize("make", [make_model, partial(make_kind, "all")], ids=["frac", "all"])
def test_auto_map_survives(tmp_path, ids, make):
    """Saved, exported, loaded with trust_remote_code, saved again; tests/hf: in new processes."""
    model = make(dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert_names_its_classes(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "exported")
    for start in ("saved", "exported"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / start, trust_remote_code=True)
        assert type(loaded) is FracForCausalLM
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        again = tmp_path / f"{start}-again"
        loaded.save_pretrained(again)
        assert_names_its_classes(again)
        assert files_of(again) == files_of(tmp_path / "saved")
        assert type(AutoModel.from_pretrained(again, trust_remote_code=True)) is FracModel


def test_a_configuration_alone_names_its_classes(tmp_path):
    make_model().config.save_pretrained(tmp_path / "config")
    assert_names_its_classes(tmp_path / "config")
    loaded = AutoConfig.from_pretrained(tmp_path / "config", trust_remote_code=True)
    assert type(loaded) is FracConfig


def test_pushing_a_configuration_pushes_the_file(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(FracConfig, "push_to_hub", lambda self, *x, **y: pushed.append((x, y)))
    make_model().config.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    assert pushed == [(("mine",), {"private": True})]


def test_a_copy_is_listed_as_it_is(tmp_path):
    """Its config.json is another than that of the source; damage is not copied."""
    source = tmp_path / "saved"
    make_model().save_pretrained(source)
    write_manifest(source)
    check_manifest(export(source, tmp_path / "exported"))
    with (source / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ManifestError, match=r"model.safetensors is damaged"):
        export(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_saving_over_a_checkpoint_drops_its_list(tmp_path):
    make_model().save_pretrained(tmp_path)
    write_manifest(tmp_path)
    make_model().save_pretrained(tmp_path)
    assert MANIFEST not in files_of(tmp_path)


def test_exporting_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint must be a folder with a config\.json"):
        export(tmp_path, tmp_path / "new")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="must be of a Frac model, got model_type 'llama'"):
        export(tmp_path, tmp_path / "new")
    (tmp_path / "config.json").write_text('{"model_type": "frac"}')
    with pytest.raises(ValueError, match="folder must not exist yet"):
        export(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
