"""Documents of a dataset on the Hugging Face hub, or of a folder that `load_dataset` can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_frac.data.sources import check_text
from flash_frac.extras import require

BATCH_ROWS = 256


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
        # A stream may not know its columns; then the first row tells.
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
        row = 0
        # By batches, which are never divided among dataloader workers: whoever wants a part of
        # the documents takes it himself.
        for batch in self._dataset.iter(batch_size=BATCH_ROWS):
            self._check_column(list(batch))
            for value in batch[self.text_field]:
                row += 1
                where = f"dataset_name {self.name!r}, row {row}"
                text = check_text(value, where, self.text_field)
                if text and not text.isspace():
                    yield text

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
