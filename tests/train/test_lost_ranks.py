"""Processes that freeze or die: the others end in time, and name them."""

import os
import signal
import time

import pytest

from flash_frac.train import load_recipe
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.train.runs import start_together

TIMEOUT = 6


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_a_lost_rank_is_named(write_recipe, tmp_path, lost, how):
    path = write_recipe(max_steps=10_000, save_steps=10_000, eval_strategy="no")
    processes = start_together(2, path, "--ddp_timeout", TIMEOUT)
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
    words = f"rank 0 waited in vain for all 2 processes to begin (ddp_timeout is {TIMEOUT} s)"
    assert words in said and "Traceback" not in said


def test_a_timeout_must_be_positive(write_recipe):
    with pytest.raises(ValueError, match="ddp_timeout must be above 0, got 0"):
        load_recipe(write_recipe(ddp_timeout=0))
