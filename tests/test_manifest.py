"""Damage to a folder is detected, naming the file."""

import json

import pytest

from flash_frac.manifest import (
    MANIFEST,
    ManifestError,
    NoManifestError,
    check_manifest,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "shards" / "0.distcp").write_bytes(b"shard")
    (tmp_path / "empty").touch()
    write_manifest(tmp_path)
    return tmp_path


def test_a_whole_folder_passes(folder):
    check_manifest(folder)
    files = read_manifest(folder)
    assert list(files) == ["empty", "model.safetensors", "shards/0.distcp"]
    assert files["shards/0.distcp"].size == 5
    # The sum is that of `sha256sum`.
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert files["empty"].sha256 == nothing


def test_a_file_that_comes_later_does_no_harm(folder):
    (folder / "README.md").touch()
    check_manifest(folder)


@pytest.mark.parametrize("name", ["empty", "model.safetensors", "shards/0.distcp"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ManifestError, match=rf"{folder / name} is missing"):
        check_manifest(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "shards/0.distcp"])
def test_a_flipped_byte_is_found(folder, name):
    content = bytearray((folder / name).read_bytes())
    for place in (0, len(content) // 2, -1):
        (folder / name).write_bytes(content)
        check_manifest(folder)
        flipped = content.copy()
        flipped[place] ^= 1
        (folder / name).write_bytes(flipped)
        with pytest.raises(ManifestError, match=rf"{folder / name} is damaged: its content"):
            check_manifest(folder)


def test_a_file_of_another_size_is_found(folder):
    (folder / "shards" / "0.distcp").write_bytes(b"sha")
    with pytest.raises(ManifestError, match=r"0.distcp is damaged: it has 3 bytes, but 5 in"):
        check_manifest(folder)


def test_a_folder_without_manifest_is_incomplete(folder):
    (folder / MANIFEST).unlink()
    with pytest.raises(NoManifestError, match=rf"{folder / MANIFEST} is missing"):
        check_manifest(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"format": 1}', '{"format": 1, "files": {"a": 7}}', '{"a": 1}']
)
def test_a_damaged_manifest_is_named(folder, content):
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ManifestError, match=rf"{folder / MANIFEST} is damaged"):
        check_manifest(folder)


def test_a_manifest_of_a_later_format_is_refused(folder):
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, "format": 2}))
    with pytest.raises(ManifestError, match="has format 2, but this flash-frac reads format 1"):
        check_manifest(folder)


def test_only_some_files_with_sums_that_are_known(folder):
    """Those are not read again, so that a wrong one is found by the check alone."""
    known = {"model.safetensors": read_manifest(folder)["model.safetensors"]}
    (folder / "model.safetensors").write_bytes(bytes(256 * 40))
    write_manifest(folder, ["empty"], known=known)
    assert list(read_manifest(folder)) == ["empty", "model.safetensors"]
    with pytest.raises(ManifestError, match=r"model\.safetensors is damaged"):
        check_manifest(folder)
