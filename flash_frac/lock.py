"""Allow one process at a time in a folder.

The operating system releases the lock when its process dies, so no stale lock is left behind.
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
# Locks that this process holds; forked processes must not keep them alive after its death.
_held: set[int] = set()


@contextmanager
def locked(folder: Path, argument: str = "output_dir") -> Iterator[None]:
    """Lock a folder while the block runs; raise ValueError naming the holder if it is locked.

    Args:
        argument: the argument that names the folder.

    Example: `with locked(Path("runs/a")): ...`
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(descriptor, folder, argument)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _take(descriptor: int, folder: Path, argument: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        raise ValueError(
            f"{argument} {folder} is in use by {holder or 'another process'}: wait until it ends, "
            f"stop it, or choose another {argument}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{argument} {folder} cannot be locked ({error}), so two processes could write to it: "
            f"choose another {argument}, on a file system that supports locks"
        ) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode()
    try:
        os.pwrite(descriptor, holder, 0)
    except OSError as error:
        why = why_unwritten(folder / LOCK, error, len(holder))
        raise ValueError(f"{argument} {folder} cannot be written to: {why}") from error


def _let_go() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
