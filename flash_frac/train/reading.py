"""Where each rank is in the stream that it trains on, saved with its checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from flash_frac.data import Bookmark, StreamingDataset
from flash_frac.files import read_object, write_text
from flash_frac.train.parallel import on_main

# What the documents of a reader and the number of its items in a step depend on.
_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers")


class Reading:
    """The bookmarks of a rank's dataloader workers, at the last batch that was trained on.

    Args:
        dataset: of this rank; `load` lets it read on. There is nothing to do unless it is a stream.
        args: of the run.
    """

    def __init__(self, dataset: Any, args: Any) -> None:
        self.dataset = dataset if isinstance(dataset, StreamingDataset) else None
        self.args = args
        self._bookmarks: dict[int, Bookmark] = {}

    def own_batches(self, loader: DataLoader) -> DataLoader:
        """A loader of accelerate's that gives this rank all batches of its own dataset."""
        if self.dataset is None or self.args.world_size == 1:
            return loader
        shard = loader.dataset
        if not isinstance(shard, IterableDatasetShard):
            raise ValueError(
                "accelerator_config gives every rank what the first one reads, which is a part of "
                "the stream: set its dispatch_batches to false"
            )
        # The ranks share the documents already; it would share the sequences once more.
        shard.num_processes, shard.process_index = 1, 0
        return loader

    def note(self, bookmark: Bookmark | None) -> None:
        """Keep the bookmark of a batch that is trained on; only those of a stream have one."""
        if bookmark is not None:
            self._bookmarks[bookmark.worker] = bookmark

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        if self.dataset is None:
            return
        marks = [asdict(mark) for mark in self._bookmarks.values()]
        content = {"settings": self._settings(), "bookmarks": marks}
        write_text(_path(folder, self.args.process_index), json.dumps(content))

    def load(self, folder: Path) -> None:
        """Read on where this rank was in a checkpoint of as many ranks with the same settings."""
        if self.dataset is None or self.args.ignore_data_skip:
            return
        on_main(self.args, lambda: self._check(folder))
        path = _path(folder, self.args.process_index)
        try:
            marks = [Bookmark(**mark) for mark in _read(path)["bookmarks"]]
        except TypeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        self._bookmarks = {mark.worker: mark for mark in marks}
        self.dataset.resume(marks)

    def _check(self, folder: Path) -> None:
        remedy = "set ignore_data_skip to true to read the stream again from its beginning"
        path = _path(folder, 0)
        if not path.exists():
            raise ValueError(
                f"{path} is missing, as in checkpoints of earlier versions, so where the run was "
                f"in its stream is not known: {remedy}"
            )
        then = _read(path)["settings"]
        changed = [
            f"{name} {then.get(name)} -> {value}"
            for name, value in self._settings().items()
            if then.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{folder} cannot go on with its stream, which is divided otherwise now "
                f"({', '.join(changed)}): start as many ranks with the same settings, or {remedy}"
            )

    def _settings(self) -> dict[str, int]:
        ranks = {"ranks": self.args.world_size}
        return ranks | {name: getattr(self.args, name) for name in _SETTINGS}


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stream_{rank}.json"


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, {"settings": dict, "bookmarks": list})
