"""Folders of the token cache that are being written, each locked by the process that writes it.

The kernel releases a lock when its process ends, however it ends. A draft that nobody has locked is
therefore left over, and is deleted by the next run.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from pathlib import Path

# .KEY.UUID: hidden, so that no reader looks at it; nothing else in a cache has such a name.
_NAME = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}")


class Draft:
    """A new folder that is this process's own; deleted at the end of `with`, unless it was moved.

    Attributes:
        folder: the draft.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def open_draft(cache: Path, key: str) -> Draft:
    """Make a draft of a cache entry, and lock it.

    Args:
        cache: folder of the cache, which must be there.
        key: name of the entry, 32 hexadecimal digits.
    """
    while True:
        folder = cache / f".{key}.{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            # Another process has taken it for a leftover before it was locked.
            continue
        _lock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return Draft(folder, lock)
        os.close(lock)


def collect_drafts(cache: Path) -> None:
    """Delete the drafts of processes that are gone."""
    if not cache.is_dir():
        return
    for folder in cache.iterdir():
        if not _NAME.fullmatch(folder.name):
            continue
        try:
            lock = os.open(folder, os.O_RDONLY)
        # Moved or deleted by now, or not ours to open.
        except OSError:
            continue
        if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock was obtained. On a disk without locks, nothing is ever collected."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True
