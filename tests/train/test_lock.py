"""Two runs in one folder: the second is refused, with the holder of the lock."""

import os
import re
import signal
import time

import pytest

from flash_frac.files import write_text
from flash_frac.lock import LOCK, locked
from flash_frac.train import load_recipe, train
from flash_frac.train.checkpoint import checkpoints
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.train.runs import finish, losses, start, start_together


def wait_for(condition, process):
    deadline = time.time() + 120
    while not condition():
        assert process.is_alive() and time.time() < deadline, process.output.read_text()
        time.sleep(0.01)


def test_the_second_names_the_first(write_recipe, tmp_path):
    path, run = write_recipe(max_steps=300, save_steps=5, eval_strategy="no"), tmp_path / "run"
    first = start(path)
    wait_for(lambda: read_lines(run / LOG_NAME), first)
    second = start(path)
    second.join(120)
    said = second.output.read_text()
    assert second.exitcode == 1 and "Traceback" not in said
    assert re.search(rf"output_dir {run} is in use by process {first.pid} on \S+, since 2", said)
    finish(first)
    assert [step for step, _ in losses(run)] == list(range(1, 301))


def test_many_at_once(write_recipe, tmp_path):
    """One trains; the others leave its files alone."""
    path = write_recipe(max_steps=40, save_steps=1, save_total_limit=2, eval_strategy="no")
    processes = [start(path) for _ in range(4)]
    for process in processes:
        process.join(120)
    codes = sorted(process.exitcode for process in processes)
    said = [process.output.read_text() for process in processes]
    # Those that come when it has ended find a finished run.
    good = [text for text in said if "is in use by" not in text]
    assert codes == [0] * len(good) + [1] * (4 - len(good)), said
    assert len(good) >= 1 and not any("Traceback" in text for text in said)
    run = tmp_path / "run"
    assert [p.name for p in checkpoints(run)] == ["checkpoint-39", "checkpoint-40"]
    assert [step for step, _ in losses(run)] == list(range(1, 41))


def test_a_killed_run_holds_nothing(write_recipe, tmp_path):
    path, run = write_recipe(max_steps=200), tmp_path / "run"
    victim = start(path)
    wait_for(lambda: read_lines(run / LOG_NAME), victim)
    victim.kill()
    victim.join()
    with locked(run):
        pass


def test_a_process_that_outlives_the_holder_holds_nothing(tmp_path):
    """As workers do for some seconds that a killed run has forked."""
    holder = os.fork()
    if holder == 0:
        with locked(tmp_path):
            if os.fork() == 0:
                write_text(tmp_path / "worker", str(os.getpid()))
                time.sleep(60)
            while not (tmp_path / "worker").exists():
                time.sleep(0.01)
            os._exit(0)
    os.waitpid(holder, 0)
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, 0)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_frozen_run_holds_its_folder(write_recipe, tmp_path):
    path, run = write_recipe(max_steps=200), tmp_path / "run"
    frozen = start(path)
    wait_for(lambda: read_lines(run / LOG_NAME), frozen)
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"in use by process {frozen.pid} on"):
        train(load_recipe(path))
    frozen.kill()
    frozen.join()


def test_all_processes_of_a_run_are_refused(write_recipe, tmp_path):
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        processes = start_together(2, write_recipe())
        for process in processes:
            process.join(120)
    assert [process.exitcode for process in processes] == [1, 1]
    assert all(f"process {os.getpid()} on" in p.output.read_text() for p in processes)


def test_the_lock_ends_with_its_block(tmp_path):
    for _ in range(2):
        with pytest.raises(InterruptedError), locked(tmp_path):
            raise InterruptedError
    with (
        locked(tmp_path),
        pytest.raises(ValueError, match="in use by process"),
        locked(tmp_path),
    ):
        pass
    (tmp_path / LOCK).write_text("")
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
