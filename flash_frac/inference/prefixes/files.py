"""Snapshots as files in a folder that belongs to one model."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from flash_frac.inference.prefixes.snapshots import Snapshot, packed, views
from flash_frac.inference.prefixes.tree import Node, Tokens
from flash_frac.inference.storage import Format, difference_of, read_file, read_part, write_file
from flash_frac.lock import locked

logger = logging.get_logger(__name__)

FORMAT = Format("flash_frac.prefix", "1", "prefix state", "PrefixStates")
# A unique suffix, so that no other file is ever deleted.
SUFFIX = ".prefix"


class Entry(NamedTuple):
    """An existing file: ids from the root, the start of its edge, and its kind."""

    path: Path
    ids: Tokens
    begin: int
    is_state: bool
    num_logits: int


class PrefixFolder:
    """A folder of snapshots, locked until `close` or the end of the process.

    Args:
        fingerprint: the model's fingerprint.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        self.folder, self._fingerprint = folder, fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()
        self._lock.enter_context(locked(folder, "folder"))

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.close()

    def entries(self) -> list[Entry]:
        """Files of an earlier process, the oldest first; ValueError if they are of another model.

        Only headers and tokens are read. Damaged files are deleted with a warning.
        """
        for draft in self.folder.glob(f".*{SUFFIX}.*"):
            draft.unlink(missing_ok=True)
        paths = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        found = [self._entry(path) for path in paths]
        return [entry for entry in found if entry is not None]

    def _entry(self, path: Path) -> Entry | None:
        try:
            facts, tensors = read_part(path, FORMAT, ["ids"])
            difference = difference_of(facts, self._fingerprint)
            begin, num_logits = int(facts["begin"]), int(facts["num_logits"])
            ids, is_state = tensors["ids"].numpy().copy(), facts["kind"] == "state"
        except (ValueError, KeyError, OSError) as error:
            self.delete(path, error)
            return None
        if difference is not None:
            self.close()
            raise ValueError(
                f"folder {self.folder} holds prefix states of another model: {difference} (see "
                f"{path.name}). Use another folder, or delete the files *{SUFFIX} in it"
            )
        return Entry(path, ids, begin, is_state, num_logits)

    def write(self, snapshot: Snapshot, memory: Tensor) -> Path | None:
        """Write a snapshot and return its path; warn and return None if that fails."""
        node: Node = snapshot.owner
        kind = "state" if snapshot is node.state else "segment"
        ids = node.ids()
        logits = [part.shape[0] for part in snapshot.parts if part.name == "logits"]
        facts = {"kind": kind, "begin": str(node.begin), "num_logits": str(sum(logits))}
        name = f"{kind}-{node.begin}-" if kind == "segment" else f"{kind}-"
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        path = self.folder / f"{name}{digest[:32]}{SUFFIX}"
        tensors = {"ids": torch.from_numpy(ids), **views(memory.cpu(), snapshot.parts)}
        try:
            # Do not wait for the disk: the checksum detects a damaged file.
            write_file(path, FORMAT, self._fingerprint | facts, tensors, sync=False)
        except OSError as error:
            logger.warning(f"a prefix state cannot be written to folder {self.folder}: {error}")
            return None
        return path

    def read(self, snapshot: Snapshot) -> Tensor | None:
        """Return the bytes of a snapshot; warn and return None if its file is damaged or gone."""
        path, node = snapshot.path, snapshot.owner
        assert path is not None
        try:
            facts, tensors = read_file(path, FORMAT)
            if difference := difference_of(facts, self._fingerprint):
                raise ValueError(f"{path} was replaced by a file of another model: {difference}")
            if not np.array_equal(tensors["ids"].numpy(), node.ids()):
                raise ValueError(f"{path} was replaced by a file of other tokens")
            shapes = {part.name: (part.shape, part.dtype) for part in snapshot.parts}
            found = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
            if found | shapes != found:
                raise ValueError(f"{path} was replaced by a file with other tensors")
            # Copy, because on a CPU these tensors are the memory-mapped file itself.
            return packed(tensors, snapshot.parts, torch.device("cpu"))
        except (ValueError, KeyError, OSError, torch.OutOfMemoryError) as error:
            self.delete(path, error)
            return None

    def delete(self, path: Path, error: Exception | None = None) -> None:
        """Delete a file; warn if an error is the reason."""
        if error is not None:
            logger.warning(f"deleting a file of folder {self.folder}: {error}")
        try:
            path.unlink(missing_ok=True)
        # The engine must not stop because of a folder that cannot be written to.
        except OSError as problem:
            logger.warning(f"cannot delete a file of folder {self.folder}: {problem}")
