"""Full disks: a one-line error names the file and the space it needs, and nothing is left behind.

A file size limit simulates the disk: the system refuses writes beyond it in the same way, to
Python, to safetensors and to tokenizers.
"""

import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flash_frac.bench.rows import append_rows
from flash_frac.data import byte_tokenizer
from flash_frac.drawing import figure_at
from flash_frac.files import (
    WriteError,
    append_text,
    drafted,
    folder_size,
    write_files,
    write_text,
)
from flash_frac.inference.prefixes.files import FORMAT
from flash_frac.inference.storage import write_file
from flash_frac.lock import locked
from flash_frac.train.checkpoint import SHARDS, CheckpointError, whole
from tests.commands import frac, make_checkpoint

NEEDS = "it needs {} bytes, and "


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_text_that_does_not_fit(tmp_path):
    path = write_text(tmp_path / "old.txt", "as it was")
    for target in (path, tmp_path / "new" / "folder" / "new.txt"):
        with files_of_at_most(10), pytest.raises(WriteError) as caught:
            write_text(target, "x" * 1000)
        message = str(caught.value)
        assert message.startswith(f"{target} could not be written: File too large; ")
        assert NEEDS.format("1,000") in message and message.endswith("are free on that disk")
    assert everything_in(tmp_path) == ["old.txt"] and path.read_text() == "as it was"


def test_files_that_belong_together(tmp_path):
    write_files(tmp_path, {"a": b"old"})
    with files_of_at_most(10), pytest.raises(WriteError, match=f"{tmp_path}/b could not .* 103 b"):
        write_files(tmp_path, {"a": b"new", "b": b"x" * 100})
    assert everything_in(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_an_interrupt_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), drafted(tmp_path / "new" / "a", 1) as draft:
        draft.write_text("x")
        raise KeyboardInterrupt
    assert everything_in(tmp_path) == []


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError), drafted(tmp_path / "a", 1):
        _ = 1 / 0


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), OSError("the hub is away")])
def test_errors_of_a_network_are_no_failed_writes(tmp_path, error):
    with pytest.raises(type(error), match=re.escape(str(error))), drafted(tmp_path / "a", 1):
        raise error


def test_a_file_that_cannot_be_read_is_no_failed_write(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, drafted(tmp_path / "new" / "a", 1) as draft:
        draft.write_bytes((tmp_path / "missing").read_bytes())
    assert "could not be written" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory"):
        write_text(tmp_path / "file" / "new" / "a", "x")
    assert everything_in(tmp_path) == ["file"]


def test_files_that_grow(tmp_path):
    for append in (
        lambda path: append_text(path, "x" * 1000),
        lambda path: append_rows([{"command": "x" * 1000}], path),
    ):
        with files_of_at_most(100), pytest.raises(WriteError) as caught:
            append(tmp_path / "a")
        (tmp_path / "a").unlink(missing_ok=True)
        assert str(caught.value).startswith(f"{tmp_path / 'a'} could not be written: File too")


def test_a_lock(tmp_path):
    with (
        files_of_at_most(0),
        pytest.raises(ValueError, match=rf"output_dir {tmp_path} cannot be written to: .*needs"),
        locked(tmp_path),
    ):
        pass


def assert_refused(done, path):
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"frac: {path} could not be written: "), line
    assert NEEDS.format("")[:8] in line and "are free on that disk" in line


def test_inspect(checkpoint, tmp_path):
    out = tmp_path / "page"
    command = ("inspect", checkpoint, "--tokens", 64, "--out", out)
    with files_of_at_most(20_000):
        done = frac(*command)
    assert_refused(done, out / "index.html")
    assert everything_in(tmp_path) == []
    assert frac(*command).returncode == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    with files_of_at_most(20_000):
        assert frac(*command).returncode == 1
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_save_state(checkpoint, tmp_path):
    state = tmp_path / "states" / "here"
    command = ("generate", checkpoint, "--prompt", "To be", "--max-new-tokens", 3)
    with files_of_at_most(500):
        done = frac(*command, "--save-state", state)
    assert_refused(done, state)
    assert "The state is in" not in done.stderr
    assert everything_in(tmp_path) == []


def test_export(checkpoint, tmp_path):
    with files_of_at_most(10_000):
        done = frac("export", checkpoint, tmp_path / "copies" / "copy")
    assert_refused(done, tmp_path / "copies" / "copy")
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("save", ["tokenizer", "tensors", "torch"])
def test_a_checkpoint(tmp_path, save):
    """Each library has its own error."""

    def write(draft):
        if save == "tokenizer":
            byte_tokenizer().save_pretrained(draft)
        elif save == "tensors":
            save_file({"x": torch.zeros(1000)}, draft / "x.safetensors")
        else:
            torch.save({"x": torch.zeros(1000)}, draft / "x.pt")

    once = {"writer": "me", "main": True, "wait": lambda: None}
    # The first has none before it to tell its size.
    needs, good = "it needs more than ", "there is no checkpoint yet"
    for name in ("checkpoint-2", "checkpoint-4"):
        with (
            files_of_at_most(1000),
            pytest.raises(CheckpointError) as caught,
            whole(tmp_path, name, **once) as draft,
        ):
            write(draft)
        message = str(caught.value)
        assert message.startswith(f"{name} could not be written to {tmp_path}: ")
        assert "\n" not in message and needs in message and "are free on that disk" in message
        assert good in message
        assert not list(tmp_path.glob(".saving*"))
        with whole(tmp_path, "checkpoint-2", **once) as draft:
            (draft / "file").write_text("good")
        needs = NEEDS.format(folder_size(tmp_path / "checkpoint-2"))
        good = f"resumes from the last good checkpoint, {tmp_path / 'checkpoint-2'}"


def test_consolidate(tmp_path, monkeypatch):
    (tmp_path / "checkpoint" / SHARDS).mkdir(parents=True)
    (tmp_path / "checkpoint" / SHARDS / "shard").write_text("some")

    def merge(shards, draft, **options):
        (Path(draft) / "model.safetensors").write_bytes(b"x" * 2000)

    monkeypatch.setattr("accelerate.utils.merge_fsdp_weights", merge)
    with files_of_at_most(1000):
        done = frac("consolidate", tmp_path / "checkpoint", tmp_path / "joined")
    assert_refused(done, tmp_path / "joined")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_figure(tmp_path):
    with (
        files_of_at_most(1000),
        pytest.raises(WriteError, match=r"a\.svg could not be written"),
        figure_at(tmp_path / "a.svg", (3, 2)) as (_, (axes,)),
    ):
        axes.plot([1, 2])
    assert everything_in(tmp_path) == []


def test_a_prefix_state_is_left_out_with_a_warning(tmp_path):
    """The server goes on without it."""
    with files_of_at_most(100), pytest.raises(OSError, match=r"a\.prefix could not be written"):
        write_file(tmp_path / "a.prefix", FORMAT, {}, {"x": torch.zeros(1000)})
    assert everything_in(tmp_path) == []
