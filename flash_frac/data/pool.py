"""Process the parts of a corpus in worker processes, which end when this process does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tqdm import tqdm

Work = Callable[[Any, int, Callable[[int], object]], None]
# Seconds between updates of the progress bar.
LOOK = 0.5


class _Stopped(Exception):
    """Another process has failed, so this one stops."""


# The task of this process, if it is a worker of the pool.
_task: tuple[Work, Any, Any, Any] | None = None


def run_parts(work: Work, job: Any, parts: list[int], processes: int, bar: tqdm) -> None:
    """Call work(job, part, progress) for each part, in a pool of worker processes.

    With a single worker it is called in this process, where the tokenizer has its own threads. If
    there are fewer parts than processes, the spare cores become threads of the workers.

    Args:
        work: a module-level function.
        bar: shows the sum of the values passed to `progress`.

    Raises:
        ValueError: the error of a part; all others stop at their next document.
    """
    workers = min(processes, len(parts))
    if workers <= 1:
        for part in parts:
            work(job, part, bar.update)
        return
    # Forking is unsafe once the tokenizer has started its threads.
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    shared = (work, job, done, stop, processes // workers)
    with ProcessPoolExecutor(workers, context, _begin, shared) as pool:
        try:
            waiting = {pool.submit(_run, part) for part in parts}
            before = bar.n
            while waiting:
                ended, waiting = wait(waiting, LOOK, FIRST_COMPLETED)
                bar.update(before + done.value - bar.n)
                for future in ended:
                    future.result()
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise ValueError(
                    "a worker process was killed, perhaps because memory ran out: run the same "
                    "command again with fewer --processes; finished shards are kept"
                ) from error
            raise


def _begin(work: Work, job: Any, done: Any, stop: Any, threads: int) -> None:
    """Initialise a worker of the pool."""
    global _task
    _task = work, job, done, stop
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    # Ctrl-C reaches all processes of a terminal; the main process stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(part: int) -> None:
    assert _task is not None
    work, job, done, stop = _task

    def progress(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        with done.get_lock():
            done.value += count

    work(job, part, progress)
