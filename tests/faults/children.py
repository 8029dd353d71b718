"""Processes that die, or find the disk full, at a chosen file access.

Python reports opened, renamed and deleted files to audit hooks. A hook that counts these events
below a folder can end the process at any of them, or make every later write fail.
"""

import errno
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tests.commands import CONTEXT

WRITES = {"open", "os.mkdir", "os.rename"}
EVENTS = WRITES | {"os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Far more than any of these takes.
PATIENCE = 240


@dataclass(frozen=True)
class Fault:
    """What happens to a process.

    Attributes:
        kill_at: it is killed with -9 at this event, counted from 1; 0 for never.
        full_at: from this event on no file can be written.
        file_size: bytes to which a file can grow.
        kill_after: seconds after which it is killed, wherever it is.
    """

    kill_at: int = 0
    full_at: int = 0
    file_size: int = resource.RLIM_INFINITY
    kill_after: float | None = None


@dataclass(frozen=True)
class End:
    """How a process ended: its status, what it printed, and the events that were counted."""

    status: int
    said: str
    events: int


def start(fault: Fault, folder: Path, call: Callable[..., Any], *arguments: Any) -> Any:
    """Begin `call(*arguments)` in a process to which a fault happens as it writes to a folder."""
    file, output = tempfile.mkstemp()
    os.close(file)
    process: Any = CONTEXT.Process(target=_run, args=(fault, folder, output, call, arguments))
    process.output = Path(output)
    process.start()
    return process


def end_of(process: Any, fault: Fault = Fault()) -> End:  # noqa: B008
    """Wait for the end of a process."""
    process.join(PATIENCE if fault.kill_after is None else fault.kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    said = process.output.read_text(errors="replace")
    counts = Path(f"{process.output}.events")
    events = counts.stat().st_size if counts.exists() else 0
    for path in (process.output, counts):
        path.unlink(missing_ok=True)
    return End(process.exitcode, said, events)


def run(fault: Fault, folder: Path, call: Callable[..., Any], *arguments: Any) -> End:
    """Both of it."""
    return end_of(start(fault, folder, call, *arguments), fault)


def _run(
    fault: Fault, folder: Path, output: str, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    file = open(output, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    # Its own is one of the system, which a process that is killed leaves behind.
    tqdm.set_lock(threading.RLock())
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_size, resource.RLIM_INFINITY))
    _install(fault, folder, os.open(f"{output}.events", os.O_WRONLY | os.O_CREAT))
    try:
        call(*arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"frac: {error}")


def _install(fault: Fault, folder: Path, counter: int) -> None:
    count, below = 0, str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in EVENTS or not _touches(event, arguments, below):
            return
        count += 1
        os.write(counter, b".")
        if count == fault.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if event in WRITES and 0 < fault.full_at <= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    sys.addaudithook(hook)


def _touches(event: str, arguments: tuple[Any, ...], below: str) -> bool:
    """Whether an event changes something below a folder."""
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return False
    paths = arguments[:2] if event == "os.rename" else arguments[:1]
    return any(below in os.fsdecode(x) for x in paths if isinstance(x, str | bytes | os.PathLike))
