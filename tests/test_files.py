"""Files are written atomically."""

import multiprocessing
import os

import pytest

from flash_frac.files import process_name, put_in_place, write_json, write_rows, write_text
from tests.disks import watched


@pytest.mark.parametrize("write", [write_json, write_rows, write_text])
def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch, write):
    events = watched(monkeypatch)
    path = write(tmp_path / "run.json", "" if write is write_text else [])
    kinds = [(kind, place.name) for kind, place in events]
    draft = f".run.json.{process_name()}.part"
    assert kinds == [("sync", draft), ("rename", "run.json"), ("sync", tmp_path.name)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_may_get_lost_waits_for_no_disk(tmp_path, monkeypatch):
    events = watched(monkeypatch)
    (tmp_path / "draft").touch(mode=0o600)
    put_in_place(tmp_path / "draft", tmp_path / "file", durable=False)
    assert events == [("rename", tmp_path / "file")]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_nothing_stays_of_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a.txt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_drafts_of_killed_processes_are_collected(tmp_path):
    """Those of processes that run, of other machines and of other files stay."""
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    process.start()
    process.join()
    here = process_name().removesuffix(f"-{os.getpid()}")
    (tmp_path / f".a.txt.{here}-{process.pid}.part").write_text("begun")
    kept = [f".a.txt.{here}-{os.getppid()}.part", f".a.txt.elsewhere-{process.pid}.part"]
    kept.append(f".b.txt.{here}-{process.pid}.part")
    for name in kept:
        (tmp_path / name).write_text("begun")
    write_text(tmp_path / "a.txt", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "a.txt"])
