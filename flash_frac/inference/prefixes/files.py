"""Snapshots as files of one folder, which belong to one model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from flash_frac.inference.prefixes.snapshots import Snapshot, packed, views
from flash_frac.inference.prefixes.tree import Node, Tokens
from flash_frac.inference.storage import Format, difference_of, read_file, read_part, write_file

logger = logging.get_logger(__name__)

FORMAT = Format("flash_frac.prefix", "1", "prefix state", "PrefixStates")
# Nothing else has it, so that no file of others is ever deleted.
SUFFIX = ".prefix"


class Entry(NamedTuple):
    """A file that was there before: ids (from the root), where its edge begins, its kind."""

    path: Path
    ids: Tokens
    begin: int
    is_state: bool
    num_logits: int


class PrefixFolder:
    """A folder of snapshots. One process may use it at a time.

    Args:
        fingerprint: of the model.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        self.folder, self._fingerprint = folder, fingerprint

    def entries(self) -> list[Entry]:
        """What an earlier process has left, the oldest first; ValueError if of another model.

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
            raise ValueError(
                f"folder {self.folder} holds prefix states of another model: {difference} (by "
                f"{path.name}). Name another folder, or delete the files *{SUFFIX} in it"
            )
        return Entry(path, ids, begin, is_state, num_logits)

    def write(self, snapshot: Snapshot, memory: Tensor) -> Path | None:
        """Write a snapshot; None, with a warning, if the folder does not take it."""
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
            # Without waiting for the disk: a damaged file is found by its checksum.
            write_file(path, FORMAT, self._fingerprint | facts, tensors, sync=False)
        except OSError as error:
            logger.warning(f"a prefix state cannot be kept in folder {self.folder}: {error}")
            return None
        return path

    def read(self, snapshot: Snapshot) -> Tensor | None:
        """The bytes of a snapshot; None, with a warning, if its file is damaged or gone."""
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
            # A copy, because on a CPU these would be the file itself, mapped into memory.
            return packed(tensors, snapshot.parts, torch.device("cpu"))
        except (ValueError, KeyError, OSError) as error:
            self.delete(path, error)
            return None

    def delete(self, path: Path, error: Exception | None = None) -> None:
        """Delete a file; with a warning if that is because of an error."""
        if error is not None:
            logger.warning(f"a file of folder {self.folder} is dropped, not used: {error}")
        path.unlink(missing_ok=True)
