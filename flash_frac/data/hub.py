"""Documents of a Hugging Face hub dataset, or of a folder that `load_dataset` can read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np

from flash_frac.data.sources import check_text
from flash_frac.extras import require

BATCH_ROWS = 256


class Position(TypedDict):
    """The position in a stream of documents, as JSON values.

    `state` is the state of the dataset before a batch of rows, None at the start of pass `epoch`.
    `row` rows of the pass came before the batch, and `skip` rows of the batch were read.
    """

    epoch: int
    state: dict[str, Any] | None
    row: int
    skip: int


def beginning_of(epoch: int) -> Position:
    """The start of a pass over a stream; the first is pass 0."""
    return {"epoch": epoch, "state": None, "row": 0, "skip": 0}


class HubDocuments:
    """The texts of a dataset in order; can be iterated over repeatedly.

    Args:
        name: hub id, or a folder.
        config: configuration of the dataset, if it has several.
        split: a split in the syntax of `load_dataset` ("train", "train[:10%]").
        streaming: read while iterating, without a copy on disk.
        text_field: the column with the text.

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
        self._config = config
        self.text_field = text_field
        self.streaming = streaming
        self._dataset = _load(name, config, split, streaming)
        # A stream may not know its columns before its first row, which is checked then.
        self._check_column(self._dataset.column_names)
        self.num_rows: int | None = None if streaming else self._dataset.num_rows
        self._fingerprint: str | None = None if streaming else self._dataset._fingerprint
        self._shuffle: tuple[int, int] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of exactly these rows, for the token cache; a stream has none."""
        if self._fingerprint is None:
            raise ValueError(
                f"dataset_name {self.name!r}: a stream cannot be cached; set streaming to false"
            )
        return self._fingerprint

    @property
    def version(self) -> str:
        """A hash that changes with the files of a stream, without reading them.

        It depends on their commit on the hub, or on their modification times in a folder.
        """
        datasets = require("datasets", "train", "dataset_name")
        return datasets.load_dataset_builder(self.name, self._config).hash

    @property
    def num_shards(self) -> int:
        """Number of shards that a stream can be divided into without reading it: its files."""
        return self._dataset.num_shards

    def has_shards_for(self, parts: int) -> bool:
        """Whether `read` gives each of `parts` whole shards; otherwise it gives them rows."""
        return parts <= self.num_shards

    def shuffled(self, seed: int, buffer: int) -> HubDocuments:
        """A stream with shuffled shards, and documents shuffled within each `buffer`.

        Each pass has another order. The shuffle buffer of `datasets` is lost when a run is
        interrupted; this order is the same from any position.

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
        """The texts of one of `parts` of a stream, each with the position after it.

        No document is in two parts. Part k of n takes the shards k, k + n, ...; if there are more
        parts than shards, it takes the rows k, k + n, ..., and has to read all others.

        Args:
            position: resume here, up to the end of the pass; from an earlier read of this part.

        Example: `next(documents.read(position, part=3, parts=16))`
        """
        distributed = require("datasets.distributed", "train", "dataset_name")
        by_shards = self.has_shards_for(parts)
        share = (0, 1) if by_shards else (part, parts)
        dataset = distributed.split_dataset_by_node(self._dataset, *share)
        position = position or beginning_of(0)
        if self._shuffle is not None:
            # Shuffles the shards only: `dataset.shuffle` reads row by row, over ten times slower.
            order = np.random.default_rng([self._shuffle[0], position["epoch"]])
            dataset._ex_iterable = dataset._ex_iterable.shuffle_data_sources(order)
        if by_shards:
            # Before version 5, `datasets` divides only a multiple of `parts` by shards.
            sources = dataset._ex_iterable
            dataset._ex_iterable = sources.shard_data_sources(parts, part, contiguous=False)
        # A dataset with a state always starts there, and shallow copies share the state.
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
        # In batches, because `datasets` would divide rows between dataloader workers.
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
        """The order of the rows in a batch, independent of earlier batches."""
        if self._shuffle is None:
            return range(size)
        return np.random.default_rng([self._shuffle[0], epoch, part, row]).permutation(size)

    def _check_column(self, names: list[str] | None) -> None:
        if names is not None and self.text_field not in names:
            raise ValueError(
                f"dataset_name {self.name!r} has no column {self.text_field!r}, only "
                f"{', '.join(names)}; set text_field to the one with the text"
            )


def _load(name: str, config: str | None, split: str, streaming: bool) -> Any:
    datasets = require("datasets", "train", "dataset_name")
    failures = (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except failures as error:
        raise ValueError(
            f"dataset_name {name!r} (dataset_config {config!r}, dataset_split {split!r}) cannot be "
            "loaded: check these three, the network, and your login if it is private. "
            f"The error was: {error}"
        ) from error
