"""Documents of a dataset on the Hugging Face hub, or of a folder that `load_dataset` can read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypedDict

from flash_frac.data.sources import check_text
from flash_frac.extras import require

BATCH_ROWS = 256


class Position(TypedDict):
    """Where a stream of documents was, as JSON can hold it.

    `state` is that of the dataset before a batch of rows, None at the beginning; `skip` of these
    rows were read, and `row` of all rows.
    """

    state: dict[str, Any] | None
    skip: int
    row: int


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
        self._dataset = _load(name, config, split, streaming)
        # A stream may not know its columns; then they are checked at its first row.
        self._check_column(self._dataset.column_names)
        self.num_rows: int | None = None if streaming else self._dataset.num_rows
        self._fingerprint: str | None = None if streaming else self._dataset._fingerprint

    @property
    def fingerprint(self) -> str:
        """A name for exactly these rows, for the cache of tokens; a stream has none."""
        if self._fingerprint is None:
            raise ValueError(
                f"dataset_name {self.name!r}: a stream cannot be cached; set streaming to false"
            )
        return self._fingerprint

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.read())

    def read(self, position: Position | None = None) -> Iterator[tuple[Position | None, str]]:
        """The texts behind a position of a stream, each with the position behind it.

        Where `streaming` is off there are no positions: they are None.

        Example: `next(documents.read(position))`
        """
        dataset, state, skip, row = self._dataset, None, 0, 0
        if position is not None:
            state, skip, row = position["state"], position["skip"], position["row"]
            # A deep copy: a dataset with a state begins there every time, and copies share it.
            dataset = copy.deepcopy(dataset)
            if state is not None:
                dataset.load_state_dict(state)
        # By batches, which are never divided among dataloader workers: whoever wants a part of
        # the documents takes it himself.
        for batch in dataset.iter(batch_size=BATCH_ROWS):
            self._check_column(list(batch))
            for number, value in enumerate(batch[self.text_field][skip:], skip + 1):
                row += 1
                where = f"dataset_name {self.name!r}, row {row}"
                text = check_text(value, where, self.text_field)
                if text and not text.isspace():
                    here: Position = {"state": state, "skip": number, "row": row}
                    yield (here if self.num_rows is None else None), text
            state, skip = (dataset.state_dict() if self.num_rows is None else None), 0

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
