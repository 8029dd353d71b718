import os
import signal
import time

import pytest
from tqdm import tqdm

from flash_frac.data.pool import run_parts


def note(folder, part, progress):
    """Leave a file that says which process had the part, and with how many threads."""
    progress(part)
    threads = os.environ.get("RAYON_NUM_THREADS")
    (folder / str(part)).write_text(f"{os.getpid()} {threads}")


def die(folder, part, progress):
    if part == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_or_be_interrupted(folder, part, progress):
    """Part 0 interrupts the first process as Ctrl-C does; part 1 works until it is stopped."""
    if part == 0:
        while not (folder / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
        return
    try:
        (folder / "begun").touch()
        for _ in range(6000):
            progress(1)
            time.sleep(0.01)
        (folder / "ended").touch()
    finally:
        (folder / "cleaned").touch()


def run(work, folder, parts, processes):
    with tqdm(disable=True) as bar:
        run_parts(work, folder, list(range(parts)), processes, bar)


@pytest.mark.parametrize(("parts", "processes"), [(3, 1), (1, 4), (2, 4)])
def test_every_part_is_done(tmp_path, parts, processes):
    run(note, tmp_path, parts, processes)
    pids, threads = zip(
        *((tmp_path / str(k)).read_text().split() for k in range(parts)), strict=True
    )
    # One process is this one; of four cores two processes get two threads each.
    assert (str(os.getpid()) in pids) == (min(parts, processes) == 1)
    assert min(parts, processes) == 1 or set(threads) == {"2"}


def test_a_killed_process_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"was killed, perhaps because memory .*fewer --processes"):
        run(die, tmp_path, 3, 2)


def test_an_interruption_stops_all(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(wait_or_be_interrupted, tmp_path, 2, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "cleaned").exists() and not (tmp_path / "ended").exists()
