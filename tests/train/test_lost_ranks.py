"""Ranks that freeze or die: the others stop in time, and name them."""

import os
import signal
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from flash_frac.manifest import check_manifest
from flash_frac.train import FracTrainer, heartbeat, load_recipe, parallel
from flash_frac.train.checkpoint import checkpoints
from flash_frac.train.monitor import LOG_NAME, read_lines
from flash_frac.train.parallel import LostRankError, naming_lost_ranks
from tests.train.runs import finish, losses, start_together

TIMEOUT = 6
SHARDED = ("--fsdp", "true")


def be_impatient():
    heartbeat.SILENCE_SECONDS = 2


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        (signal.SIGSTOP, 1),
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named(write_recipe, tmp_path, how, lost):
    path = write_recipe(max_steps=10_000, save_steps=10_000, eval_strategy="no")
    processes = start_together(2, path, "--ddp_timeout", TIMEOUT, before=be_impatient)
    try:
        deadline = time.time() + 120
        while len(read_lines(tmp_path / "run" / LOG_NAME)) < 3:
            assert time.time() < deadline, [p.output.read_text() for p in processes]
            time.sleep(0.05)
        os.kill(processes[lost].pid, how)
        began = time.time()
        other = processes[1 - lost]
        other.join(90)
        said = other.output.read_text()
        assert other.exitcode == 1, said
        assert time.time() - began < TIMEOUT + 30
        assert f"ddp_timeout is {TIMEOUT} s); no answer from: rank {lost}." in said
        assert f"Check its machine ({socket.gethostname()})" in said
        # Without torchrun the first rank holds the store, and nobody can look into it.
        if (lost, how) == (1, signal.SIGSTOP):
            assert said.count(f"rank 1 on {socket.gethostname()} has been silent for 2 s") == 1
        assert "Traceback" not in said
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_rank_that_never_begins(write_recipe):
    (process,) = start_together(2, write_recipe(), "--ddp_timeout", TIMEOUT, only=0)
    process.join(90)
    said, status = process.output.read_text(), process.exitcode
    process.kill()
    assert status == 1, said
    words = f"rank 0 timed out waiting for all 2 processes to start (ddp_timeout is {TIMEOUT} s)"
    assert words in said and "Traceback" not in said


def test_ranks_that_are_only_slow_are_not_called_lost(monkeypatch):
    monkeypatch.setattr(parallel, "_silent_ranks", lambda rank, count: [])
    args = SimpleNamespace(process_index=1, world_size=2, ddp_timeout=TIMEOUT)
    message = r"rank 1 timed out .* all of them are alive: .* Raise ddp_timeout"
    with pytest.raises(LostRankError, match=message), naming_lost_ranks(args):
        raise dist.DistBackendError("timed out")


def test_a_timeout_must_be_positive(write_recipe):
    with pytest.raises(ValueError, match="ddp_timeout must be above 0, got 0"):
        load_recipe(write_recipe(ddp_timeout=0))


def die_in(part, rank):
    """Kill a rank when it has written its part of checkpoint-4, which is not complete then."""
    owner, name = part
    write = getattr(owner, name)

    def write_and_die(self, *args, **kwargs):
        result = write(self, *args, **kwargs)
        draft = str(self.path if owner is FileSystemWriter else args[0])
        if os.environ["RANK"] == str(rank) and "checkpoint-4" in draft:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, write_and_die)


OPTIMIZER, RANDOM = (FileSystemWriter, "write_data"), (FracTrainer, "_save_rng_state")


@pytest.mark.parametrize(
    ("part", "lost", "arguments"),
    [
        (RANDOM, 1, ()),
        (OPTIMIZER, 0, SHARDED),
        pytest.param(OPTIMIZER, 0, (), marks=pytest.mark.slow),
        pytest.param(OPTIMIZER, 1, SHARDED, marks=pytest.mark.slow),
        pytest.param(OPTIMIZER, 1, (*SHARDED, "--async_save", "false"), marks=pytest.mark.slow),
    ],
    ids=["other", "sharded writer", "writer", "sharded other", "sharded other, waiting"],
)
def test_a_rank_killed_during_a_save(write_recipe, tmp_path, part, lost, arguments):
    path, run = write_recipe(eval_strategy="no", max_steps=10_000), tmp_path / "run"
    arguments = (path, "--ddp_timeout", TIMEOUT, *arguments)
    processes = start_together(2, *arguments, before=partial(die_in, part, lost))
    try:
        processes[lost].join(90)
        began, other = time.time(), processes[1 - lost]
        other.join(90)
        said = other.output.read_text()
        assert processes[lost].exitcode == -signal.SIGKILL and other.exitcode == 1, said
        assert time.time() - began < TIMEOUT + 30
        assert f"no answer from: rank {lost}." in said and "Traceback" not in said
    finally:
        for process in processes:
            process.kill()
            process.join()
    # What there is of the one that was being saved is not taken for a checkpoint.
    assert [folder.name for folder in checkpoints(run)] == ["checkpoint-2"]
    assert list(run.glob(".saving-*/checkpoint-4"))
    processes = start_together(2, *arguments, "--max_steps", 4)
    for process in processes:
        finish(process)
    assert f"Resuming from {run / 'checkpoint-2'}" in processes[0].output.read_text()
    check_manifest(run / "checkpoint-4")
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4] and not list(run.glob(".saving-*"))


def fail_in_checkpoint_4(rank):
    write = FileSystemWriter.write_data

    def write_or_fail(self, *args, **kwargs):
        if os.environ["RANK"] == str(rank) and "checkpoint-4" in str(self.path):
            raise OSError(28, "No space left on device")
        return write(self, *args, **kwargs)

    FileSystemWriter.write_data = write_or_fail


@pytest.mark.parametrize(("rank", "arguments"), [(0, ()), (1, SHARDED)], ids=["plain", "sharded"])
def test_all_ranks_end_if_one_cannot_save(write_recipe, tmp_path, rank, arguments):
    path, run = write_recipe(eval_strategy="no", max_steps=10_000), tmp_path / "run"
    processes = start_together(2, path, *arguments, before=partial(fail_in_checkpoint_4, rank))
    for process in processes:
        process.join(90)
    said = [process.output.read_text() for process in processes]
    assert [process.exitcode for process in processes] == [1, 1], said
    reason = f"checkpoint-4 could not be written to {run}: No space left on device"
    assert reason in said[0] and "timed out waiting" not in "".join(said)
    # The other rank of the plain run has nothing to write, and hears of it.
    heard = "rank 0 could not write a checkpoint; see the error there"
    assert (heard if rank == 0 else reason) in said[1]
    assert [folder.name for folder in checkpoints(run)] == ["checkpoint-2"]
    assert not list(run.glob(".saving*"))
