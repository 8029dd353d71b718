"""Whatever changes a model's scores changes its identity, so no stale score is reused."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flash_frac.data import byte_tokenizer
from flash_frac.evals import identity
from flash_frac.evals.identity import identity_in_memory, identity_of_checkpoint
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.models import loading
from flash_frac.models.loading import find_checkpoint, find_tokenizer
from tests.commands import make_checkpoint
from tests.evals.known import SAMPLES

SETTINGS = Settings(suites=("lm",), tasks=("piqa",), data_dir=SAMPLES, limit=1)
WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def known_as(folder, out):
    found = find_checkpoint(folder)
    return identity_of_checkpoint(found, find_tokenizer(found), out)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_first_weight(folder):
    """One bit, at the beginning of the weights, by the size and the time of the file as it was."""
    path = folder / WEIGHTS
    content, before = bytearray(path.read_bytes()), path.stat()
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_shard(folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x")


CHANGES = {
    "weights": {
        "bit": flip_first_weight,
        "config": lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-3),
        "shard": other_shard,
        "pickled": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
        "adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "code": lambda folder: (folder / "modeling_own.py").write_text("x = 1"),
    },
    "tokenizer_hash": {
        "vocabulary": lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text().replace('"a": 100', '"a": 101')
        ),
        "bos": lambda folder: edit_json(folder / "tokenizer_config.json", bos_token="<eos>"),
    },
    "generation_settings": {
        "penalty": lambda folder: edit_json(
            folder / "generation_config.json", repetition_penalty=2.0
        ),
    },
}


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in CHANGES for name in CHANGES[part]]
)
def test_any_change_is_another_model(copy, tmp_path, part, name):
    before = known_as(copy, tmp_path)
    CHANGES[part][name](copy)
    after = known_as(copy, tmp_path)
    assert [key for key in before if before[key] != after[key]] == [part]


def test_what_does_not_matter_is_the_same_model(copy, tmp_path):
    """Another folder, the version of transformers, and what training left there."""
    before = known_as(copy, tmp_path)
    edit_json(copy / "generation_config.json", transformers_version="0.0.1")
    (copy / "training_args.bin").write_bytes(b"x")
    moved = shutil.move(copy, tmp_path / "moved")
    assert known_as(moved, tmp_path) == before


def test_files_are_hashed_once(copy, tmp_path, monkeypatch):
    read, digest = [], identity.hashlib.file_digest

    def counted(file, name):
        read.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(identity.hashlib, "file_digest", counted)
    known_as(copy, tmp_path)
    assert {"config.json", WEIGHTS} <= {*read}
    read.clear()
    known_as(copy, tmp_path)
    assert read == []
    (copy / WEIGHTS).touch()
    known_as(copy, tmp_path)
    assert read == [WEIGHTS]


@pytest.mark.parametrize("content", ["{", "[1]", '{"a'])
def test_damaged_hashes_are_named(copy, tmp_path, content):
    (tmp_path / "hashes.json").write_text(content)
    with pytest.raises(ValueError, match=r"hashes\.json cannot be read .*: delete it to hash"):
        known_as(copy, tmp_path)


def test_scores_of_other_weights_are_not_kept(tmp_path, no_network, capsys):
    """The first weights of a large file are zeroed, far from its end."""
    folder, out = make_checkpoint(tmp_path / "model", hidden_size=64), tmp_path / "out"
    path = folder / WEIGHTS
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - start > 1 << 17
    evaluate(str(folder), out, SETTINGS)
    path.write_bytes(content[:start] + bytes(1 << 16) + content[start + (1 << 16) :])
    with pytest.raises(ValueError, match=r"was measured differently \(weights .* delete it"):
        evaluate(str(folder), out, SETTINGS)
    path.write_bytes(content)
    evaluate(str(folder), out, SETTINGS)
    assert "already measured" in capsys.readouterr().out


def test_another_tokenizer_of_the_same_name(copy, tmp_path, no_network):
    tokenizer = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(tokenizer)
    named = Settings(
        suites=("lm",), tasks=("piqa",), data_dir=SAMPLES, limit=1, tokenizer=str(tokenizer)
    )
    evaluate(str(copy), tmp_path / "out", named)
    CHANGES["tokenizer_hash"]["vocabulary"](tokenizer)
    with pytest.raises(ValueError, match=r"measured differently \(tokenizer_hash"):
        evaluate(str(copy), tmp_path / "out", named)


def test_a_model_in_memory_is_known_by_its_weights(checkpoint, tmp_path):
    lm = FracLM(str(checkpoint))
    evaluate("someone/model", tmp_path, SETTINGS, lm=lm)
    evaluate("someone/model", tmp_path, SETTINGS, lm=lm)
    before = identity_in_memory(lm)
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] += 1
    assert identity_in_memory(lm)["weights"] != before["weights"]
    with pytest.raises(ValueError, match=r"measured differently \(weights memory:"):
        evaluate("someone/model", tmp_path, SETTINGS, lm=lm)


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    for commit in ("0a1b", "2c3d"):
        answer = SimpleNamespace(commit_hash=commit)
        monkeypatch.setattr(loading, "get_hf_file_metadata", lambda url, answer=answer: answer)
        found = find_checkpoint("some/model")
        known = identity_of_checkpoint(found, byte_tokenizer(), tmp_path)
        assert known["weights"] == f"hub:some/model@{commit}"
