"""Drafts: folders of tokens being written, each locked by the process that writes it.

The operating system releases a lock when its process ends, however it ends. So an unlocked draft is
a leftover, and the next run deletes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flash_frac.files import folder_size, why_unwritten

# .KEY.UUID: hidden from readers, and unlike any other name in a cache.
_NAME = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}")


class Draft:
    """A new folder locked by this process; `with` deletes it at the end unless it was moved.

    Attributes:
        folder: the draft.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock

    def move(self, target: Path) -> None:
        """Rename it, unless another process was first: then the target has the same content."""
        try:
            os.replace(self.folder, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def open_draft(cache: Path, key: str) -> Draft:
    """Create and lock a draft of a cache entry or a shard.

    Args:
        cache: folder of the finished ones, which must exist.
        key: 32 hexadecimal digits for its name.
    """
    while True:
        folder = cache / f".{key}.{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            # Another process took it for a leftover before it was locked.
            continue
        _lock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return Draft(folder, lock)
        os.close(lock)


def collect_drafts(cache: Path) -> None:
    """Delete the drafts of dead processes."""
    if not cache.is_dir():
        return
    for folder in cache.iterdir():
        if not _NAME.fullmatch(folder.name):
            continue
        try:
            lock = os.open(folder, os.O_RDONLY)
        # Moved or deleted meanwhile, or not readable for us.
        except OSError:
            continue
        if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs; raise ValueError if another process has locked it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(
            f"{folder} is being written by another process: wait for it, or stop it"
        ) from None
    except OSError:
        # Without file locks, two processes may repeat each other's work, but do no harm.
        pass
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def writing(folder: Path, argument: str, remedy: str) -> Iterator[None]:
    """Turn a write error into a ValueError with the reason and the disk space needed.

    Args:
        folder: the folder of the drafts.
        argument: the argument that names the folder.
        remedy: what to do instead of freeing space.
    """
    try:
        yield
    except OSError as error:
        why = str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            # Bytes that this run and others have written so far.
            drafts = sum(map(folder_size, folder.glob(".*")))
            why = why_unwritten(folder / "tokens", error, drafts, or_more=True)
        raise ValueError(
            f"{argument}: cannot write tokens to {folder} ({why}); free disk space, make it "
            f"writable, {remedy}"
        ) from error


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock was obtained; without file locks it never is, and no draft is deleted."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True
