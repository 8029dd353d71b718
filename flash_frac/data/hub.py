"""Documents of a dataset on the Hugging Face hub, or of a folder that `load_dataset` can read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np

from flash_frac.data.sources import check_text
from flash_frac.extras import require

BATCH_ROWS = 256


class Position(TypedDict):
    """Where a stream of documents was, as JSON can hold it.

    `state` is that of the dataset before a batch of rows, None at the beginning of pass `epoch`;
    `row` rows of the pass came before the batch, and `skip` rows of the batch were read.
    """

    epoch: int
    state: dict[str, Any] | None
    row: int
    skip: int


def beginning_of(epoch: int) -> Position:
    """Where a pass over a stream begins; the first is pass 0."""
    return {"epoch": epoch, "state": None, "row": 0, "skip": 0}


class HubDocuments:
    """The texts of a dataset, in its order; can be iterated over again and again.

    Args:
        name: hub id, or a folder.
        config: configuration of the dataset, if it has several.
        split: split, as `load_dataset` understands it ("train", "train[:10%]").
        streaming: read while iterating, without a copy on the disk.
        text_field: the column of the text.

    Example: `for text in HubDocuments("user/books", split="train", streaming=True): ...`
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        *,
        split: str = "train",
        streaming: bool = False,
        text_field: str = "text",
    ) -> None:
        self.name = name
        self.text_field = text_field
        self.streaming = streaming
        self._dataset = _load(name, config, split, streaming)
        # A stream may not know its columns; then they are checked at its first row.
        self._check_column(self._dataset.column_names)
        self.num_rows: int | None = None if streaming else self._dataset.num_rows
        self._fingerprint: str | None = None if streaming else self._dataset._fingerprint
        self._shuffle: tuple[int, int] | None = None

    @property
    def fingerprint(self) -> str:
        """A name for exactly these rows, for the cache of tokens; a stream has none."""
        if self._fingerprint is None:
            raise ValueError(
                f"dataset_name {self.name!r}: a stream cannot be cached; set streaming to false"
            )
        return self._fingerprint

    @property
    def num_shards(self) -> int:
        """The files of a stream, or what else it can be divided into without being read."""
        return self._dataset.num_shards

    def shuffled(self, seed: int, buffer: int) -> HubDocuments:
        """A stream with its shards in random order, and so the documents in every `buffer`.

        Each pass has another order. The buffer of `datasets` is lost when a run is interrupted;
        these documents come in the same order from any position.

        Example: `HubDocuments("user/books", streaming=True).shuffled(seed=0, buffer=10_000)`
        """
        shuffled = copy.copy(self)
        shuffled._shuffle = (seed, buffer)
        return shuffled

    def __iter__(self) -> Iterator[str]:
        if self.streaming:
            return (text for _, text in self.read())
        return (text for _, text in self._texts(self._dataset, "", beginning_of(0)))

    def read(
        self, position: Position | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[tuple[Position, str]]:
        """The texts of one of `parts` of a stream, each with the position behind it.

        No document is in two parts. They are divided by shards if that comes out even; if not,
        part k takes the rows k, k + parts, ... and reads all others.

        Args:
            position: where to read on to the end of its pass, from an earlier read of this part.

        Example: `next(documents.read(position, part=3, parts=16))`
        """
        distributed = require("datasets.distributed", "train", "dataset_name")
        dataset = distributed.split_dataset_by_node(self._dataset, part, parts)
        position = position or beginning_of(0)
        if self._shuffle is not None:
            # Of the shards alone: `dataset.shuffle` goes row by row, over ten times slower.
            order = np.random.default_rng([self._shuffle[0], position["epoch"]])
            dataset._ex_iterable = dataset._ex_iterable.shuffle_data_sources(order)
        # A deep copy: a dataset with a state begins there every time, and copies share it.
        dataset = copy.deepcopy(dataset)
        if position["state"] is not None:
            dataset.load_state_dict(position["state"])
        where = f" of part {part + 1} of {parts}" if parts > 1 else ""
        return self._texts(dataset, where, position, part)

    def _texts(
        self, dataset: Any, where: str, position: Position, part: int = 0
    ) -> Iterator[tuple[Position, str]]:
        epoch, state = position["epoch"], position["state"]
        row, skip = position["row"], position["skip"]
        # By batches, which are never divided among dataloader workers, as rows would be.
        for batch in dataset.iter(batch_size=self._shuffle[1] if self._shuffle else BATCH_ROWS):
            self._check_column(list(batch))
            values = batch[self.text_field]
            order = self._order(len(values), epoch, part, row)
            for number in range(skip, len(values)):
                index = order[number]
                source = f"dataset_name {self.name!r}, row {row + index + 1}{where}"
                text = check_text(values[index], source, self.text_field)
                if text and not text.isspace():
                    yield {"epoch": epoch, "state": state, "row": row, "skip": number + 1}, text
            row, skip = row + len(values), 0
            state = dataset.state_dict() if self.streaming else None

    def _order(self, size: int, epoch: int, part: int, row: int) -> Any:
        """The order of a batch, which depends on nothing that came before it."""
        if self._shuffle is None:
            return range(size)
        return np.random.default_rng([self._shuffle[0], epoch, part, row]).permutation(size)

    def _check_column(self, names: list[str] | None) -> None:
        if names is not None and self.text_field not in names:
            raise ValueError(
                f"dataset_name {self.name!r} has no column {self.text_field!r} "
                f"(there: {', '.join(names)}); set text_field to the one with the text"
            )


def _load(name: str, config: str | None, split: str, streaming: bool) -> Any:
    datasets = require("datasets", "train", "dataset_name")
    failures = (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except failures as error:
        raise ValueError(
            f"dataset_name {name!r} (dataset_config {config!r}, dataset_split {split!r}) cannot be "
            "loaded: check the three, the network, and for a private one the login. "
            f"The reader said: {error}"
        ) from error
