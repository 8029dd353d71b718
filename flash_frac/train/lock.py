"""One run at a time in a folder.

The kernel drops the lock of a process that dies, however it dies: none is ever left behind.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flash_frac.files import why_unwritten

LOCK = ".lock"
# Locks that this process holds, which the processes that it forks must not keep after its death.
_held: set[int] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder as long as the block runs; ValueError that names who holds it already.

    Example: `with locked(Path("runs/a")): ...`
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(descriptor, folder)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        raise ValueError(
            f"output_dir {folder} is in use by {holder or 'another process'}: wait until that run "
            "ends, stop it, or choose another output_dir"
        ) from None
    except OSError as error:
        raise ValueError(
            f"output_dir {folder} cannot be locked ({error}), so two runs could write to it: "
            "choose an output_dir on a disk with locks"
        ) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode()
    try:
        os.pwrite(descriptor, holder, 0)
    except OSError as error:
        why = why_unwritten(folder / LOCK, error, len(holder))
        raise ValueError(f"output_dir {folder} cannot be written to: {why}") from error


def _let_go() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
