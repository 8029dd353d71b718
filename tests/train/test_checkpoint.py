"""Checkpoints are written atomically."""

import os

import pytest

from flash_frac.files import WriteError, process_name
from flash_frac.train import checkpoint
from tests.disks import watched


def make(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "weights").write_text(name)


def drafting(folder, name):
    writer = process_name()
    return checkpoint.whole(folder, name, writer=writer, main=True, wait=lambda: None)


def test_only_complete_ones_count(tmp_path):
    assert checkpoint.last_checkpoint(tmp_path) is None
    for name in (
        "checkpoint-9",
        "checkpoint-10",
        ".saving-here-7/checkpoint-11",
        "checkpoint-best",
    ):
        make(tmp_path, name)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoint.last_checkpoint(tmp_path).name == "checkpoint-10"
    checkpoint.clear_leftovers(tmp_path)
    assert not list(tmp_path.glob(".saving*"))


def test_publishing(tmp_path):
    make(tmp_path, "checkpoint-4")
    (tmp_path / "checkpoint-4" / "old").touch()
    make(tmp_path, ".saving-here-7/checkpoint-4")
    checkpoint.publish(tmp_path / ".saving-here-7" / "checkpoint-4", tmp_path)
    assert [p.name for p in (tmp_path / "checkpoint-4").iterdir()] == ["weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (2, 4, 6, 8):
        make(tmp_path, f"checkpoint-{step}")
    checkpoint.rotate(tmp_path, None)
    assert len(checkpoint.checkpoints(tmp_path)) == 4
    checkpoint.rotate(tmp_path, 2, best="elsewhere/checkpoint-4")
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]
    checkpoint.rotate(tmp_path, 1)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-8"]


def test_a_removal_that_is_cut_off_leaves_no_half(tmp_path, monkeypatch):
    make(tmp_path, "checkpoint-2")
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)
    checkpoint.remove(tmp_path / "checkpoint-2")
    assert checkpoint.last_checkpoint(tmp_path) is None


def test_a_power_cut_loses_nothing(tmp_path, monkeypatch):
    """Files are on the disk before they count, and a new one counts before an old one goes."""
    make(tmp_path, "checkpoint-2")
    (tmp_path / "log.jsonl").touch()
    events = watched(monkeypatch)
    with drafting(tmp_path, "checkpoint-4") as draft:
        (draft / "weights").write_text("new")
        (draft / "shards").mkdir()
        (draft / "shards" / "0").write_text("shard")
    checkpoint.rotate(tmp_path, 1)
    saving = tmp_path / f".saving-{process_name()}" / "checkpoint-4"
    renamed = events.index(("rename", tmp_path / "checkpoint-4"))
    inner = [saving / name for name in ("weights", "shards/0", "shards", "manifest.json", "")]
    for path in [tmp_path / "log.jsonl", *inner]:
        assert ("sync", path) in events[:renamed], path
    removed = events.index(("rename", tmp_path / f".removing-{process_name()}"))
    assert ("sync", tmp_path) in events[renamed:removed]


def test_modes_are_those_of_the_umask(tmp_path):
    """safetensors writes files that only their owner can read."""
    before = os.umask(0o027)
    try:
        with drafting(tmp_path, "final") as draft:
            (draft / "config.json").touch()
            os.close(os.open(draft / "model.safetensors", os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "final").iterdir()}
    assert modes == dict.fromkeys(["config.json", "model.safetensors", "manifest.json"], 0o640)


def test_drafts_of_two_processes_do_not_meet(tmp_path):
    """Without the lock, as trainers of one's own may be, neither deletes what the other writes."""
    other = tmp_path / ".saving-there-7" / "checkpoint-4"
    other.mkdir(parents=True)
    with drafting(tmp_path, "checkpoint-4") as draft:
        assert draft != other
        (draft / "weights").touch()
    assert other.is_dir() and (tmp_path / "checkpoint-4" / "weights").exists()


def test_a_manifest_that_cannot_be_written_leaves_no_draft(tmp_path, monkeypatch):
    def fail(folder):
        raise WriteError(f"{folder} could not be written: No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", fail)
    with (
        pytest.raises(checkpoint.CheckpointError, match="No space left on device"),
        drafting(tmp_path, "final") as draft,
    ):
        (draft / "config.json").touch()
    assert not list(tmp_path.iterdir())
