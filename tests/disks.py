"""Record a program's disk operations, in order."""

import os
from pathlib import Path


def watched(monkeypatch):
    """The list of all that is synced and renamed from now on: ("sync", path), ("rename", new)."""
    events, fsync, replace = [], os.fsync, os.replace

    def note_sync(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_replace(old, new):
        replace(old, new)
        events.append(("rename", Path(new)))

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    return events
