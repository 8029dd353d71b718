"""Save each rank's position in its stream of training text with every checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from flash_frac.data import Bookmark, HubDocuments, StreamingDataset
from flash_frac.files import read_object, write_text
from flash_frac.train.parallel import on_main

# Settings that determine each reader's documents and its items per step.
_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers")


class Reading:
    """The bookmarks of a rank's dataloader workers, at the last batch that was trained on.

    Args:
        dataset: the training set of this rank; if it is not a stream, there is nothing to do.
        args: the training arguments.
    """

    def __init__(self, dataset: Any, args: Any) -> None:
        self.dataset = dataset if isinstance(dataset, StreamingDataset) else None
        self.args = args
        self._bookmarks: dict[int, Bookmark] = {}

    def own_batches(self, loader: DataLoader) -> DataLoader:
        """Make accelerate's loader return all batches of this rank's own dataset."""
        if self.dataset is None or self.args.world_size == 1:
            return loader
        shard = loader.dataset
        if not isinstance(shard, IterableDatasetShard):
            raise ValueError(
                "accelerator_config makes every rank train on what the first rank reads, which is "
                "only a part of the stream: set its dispatch_batches to false"
            )
        # The documents are already split over the ranks; accelerate would split sequences again.
        shard.num_processes, shard.process_index = 1, 0
        return loader

    def note(self, bookmark: Bookmark | None) -> None:
        """Remember the bookmark of a batch in training; only batches of a stream have one."""
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
        """Resume where this rank was in a checkpoint with the same settings and number of ranks."""
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
        remedy = "set ignore_data_skip to true to read the stream from its beginning"
        path = _path(folder, 0)
        if not path.exists():
            raise ValueError(
                f"{path} is missing, as in checkpoints of earlier versions, so the run's position "
                f"in its stream is unknown: {remedy}"
            )
        then = {"divided_by": self._earlier_division()} | _read(path)["settings"]
        changed = [
            f"{name} {then.get(name)} -> {value}"
            for name, value in self._settings().items()
            if then.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{folder} cannot resume its stream, which is now divided differently "
                f"({', '.join(changed)}): use the same settings and number of ranks, or {remedy}"
            )

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self.args, name) for name in _SETTINGS}
        documents, parts = self._documents_and_parts()
        division = "shards" if documents.has_shards_for(parts) else "rows"
        return {"ranks": self.args.world_size, **settings, "divided_by": division}

    def _earlier_division(self) -> str:
        """How versions that did not record it divided the stream."""
        documents, parts = self._documents_and_parts()
        return "rows" if documents.num_shards % parts else "shards"

    def _documents_and_parts(self) -> tuple[HubDocuments, int]:
        assert self.dataset is not None and isinstance(self.dataset.documents, HubDocuments)
        parts = self.args.world_size * max(self.args.dataloader_num_workers, 1)
        return self.dataset.documents, parts


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stream_{rank}.json"


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, {"settings": dict, "bookmarks": list})
