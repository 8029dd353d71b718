"""Checkpoints are whole or not there."""

from flash_frac.train import checkpoint


def make(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "weights").write_text(name)


def test_only_complete_ones_count(tmp_path):
    assert checkpoint.last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", ".saving/checkpoint-11", "checkpoint-best"):
        make(tmp_path, name)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert checkpoint.last_checkpoint(tmp_path).name == "checkpoint-10"
    checkpoint.clear_leftovers(tmp_path)
    assert not (tmp_path / ".saving").exists()


def test_publishing(tmp_path):
    make(tmp_path, "checkpoint-4")
    (tmp_path / "checkpoint-4" / "old").touch()
    make(tmp_path, ".saving/checkpoint-4")
    checkpoint.publish(tmp_path, "checkpoint-4")
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
