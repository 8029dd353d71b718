"""Data settings of a training run; fields for `transformers.HfArgumentParser`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT = 0.01
# Fields for streams only.
STREAM_FIELDS = ("shuffle_buffer", "held_out_documents")
# Fields that are fixed once data is prepared.
PREPARED_FIELDS = ("held_out", "held_out_files", "held_out_documents", "text_field")


@dataclass(kw_only=True)
class DataArguments:
    """The source of the text, and how to turn it into sequences of T = `sequence_length` tokens.

    Nothing is opened or downloaded here; only the settings are checked for consistency.

    Example: `DataArguments(data_files=["books"], tokenizer="bytes", sequence_length=4096)`
    """

    data_files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files or folders of .txt, .jsonl, .parquet, .fa or .fasta (all but .parquet "
            "also compressed as .gz or .zst). Set exactly one of this, prepared_data and "
            "dataset_name."
        },
    )
    held_out_files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files or folders to evaluate on, instead of held_out or held_out_documents."
        },
    )
    prepared_data: str | None = field(
        default=None,
        metadata={"help": "A folder written by `frac data prepare`, instead of data_files."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "A dataset on the Hugging Face hub, or its local folder."}
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "The configuration of dataset_name."}
    )
    dataset_split: str = field(default="train", metadata={"help": "The split of dataset_name."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read dataset_name while training, without a copy on disk."},
    )
    shuffle_buffer: int | None = field(
        default=None,
        metadata={
            "help": "Read a stream's shards in random order, and shuffle this many documents at a "
            "time; by default, keep the order of the source."
        },
    )
    text_field: str = field(
        default="text", metadata={"help": "The field of .jsonl, .parquet and hub rows to read."}
    )
    tokenizer: str = field(
        default="bytes",
        metadata={"help": "'bytes', 'dna', or the folder or hub id of a tokenizer."},
    )
    add_bos_token: bool | None = field(
        default=None,
        metadata={
            "help": "Start each document with the tokenizer's bos token (true) or without it "
            "(false); by default, do as the tokenizer does."
        },
    )
    sequence_length: int = field(
        default=1024, metadata={"help": "Tokens per training sequence, T."}
    )
    separate_documents: bool = field(
        default=False,
        metadata={"help": "Reset the state at each document instead of carrying it over."},
    )
    held_out: float | None = field(
        default=None,
        metadata={
            "help": "Fraction of the documents held out for evaluation, if there are no "
            f"held_out_files and no streaming; by default {HELD_OUT}."
        },
    )
    held_out_documents: int | None = field(
        default=None,
        metadata={
            "help": "Hold out the first N documents of a stream for evaluation; by default none."
        },
    )
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for cached tokens; by default ~/.cache/flash_frac/tokens."},
    )
    stateful: bool = field(
        default=False,
        metadata={
            "help": "Carry states from one sequence to the next (truncated back-propagation "
            "through time); needs separate_documents."
        },
    )

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_stream()
        # Prepared data has its held-out split already.
        if self.held_out is None and self.prepared_data is None:
            self.held_out = 0.0 if self.streaming else HELD_OUT
        self._check_numbers()
        if not self.text_field:
            raise ValueError("text_field must name a field, got ''; the usual one is 'text'")
        if not self.tokenizer:
            raise ValueError("tokenizer must be 'bytes', 'dna', a folder or a hub id, got ''")
        if self.stateful and not self.separate_documents:
            raise ValueError(
                "stateful needs separate documents: set separate_documents to true, or stateful to "
                "false"
            )
        if self.stateful and self.streaming:
            raise ValueError(
                "stateful assigns whole documents to lanes, so it cannot be used with streaming: "
                "set one of the two to false"
            )

    def _check_sources(self) -> None:
        _check_paths("data_files", self.data_files)
        _check_paths("held_out_files", self.held_out_files)
        sources = ("data_files", "prepared_data", "dataset_name")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "exactly one of data_files, prepared_data and dataset_name must be given, "
                f"got {' and '.join(given) or 'none'}"
            )
        for name in PREPARED_FIELDS if self.prepared_data is not None else ():
            # None and "text" are the defaults.
            if (value := getattr(self, name)) not in (None, "text"):
                raise ValueError(
                    f"{name} is {value!r}, but prepared_data is already split and tokenised: leave "
                    f"{name} out, or prepare the data again with it"
                )
        if self.dataset_name is None:
            for name in ("streaming", "dataset_config"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for a hub dataset, but {given[0]} was given: leave {name} out, "
                        "or give dataset_name"
                    )

    def _check_stream(self) -> None:
        if self.streaming and self.held_out:
            raise ValueError(
                f"held_out ({self.held_out}) is a fraction of the data, whose size is unknown for "
                "a stream: set held_out_documents to hold out its first N documents, or set "
                "held_out_files"
            )
        for name in STREAM_FIELDS:
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} must be a whole number, 0 for none, got {number!r}")
            if number and not self.streaming:
                raise ValueError(f"{name} is for a stream: set streaming to true, or {name} to 0")
        if self.held_out_documents and self.held_out_files is not None:
            raise ValueError("held_out_documents and held_out_files cannot be combined; set one")

    def _check_numbers(self) -> None:
        # YAML reads "1e-2" as text, and a comparison would fail without naming the field.
        length, share = self.sequence_length, self.held_out
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"sequence_length must be a whole number above 0, got {length!r}")
        if share is None:
            return
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(
                f"held_out must be a fraction of the documents in [0, 1), got {share!r}; "
                "use 0 for none, and a decimal point (0.01, not 1e-2) in YAML"
            )

    @property
    def cache_folder(self) -> Path:
        """Folder of the token cache: `cache_dir`, or `flash_frac/tokens` in the user's cache.

        Example: `DataArguments(data_files=["a.txt"], cache_dir="tokens").cache_folder`
        """
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(root).expanduser() / "flash_frac" / "tokens"


def _check_paths(name: str, paths: Sequence[str] | None) -> None:
    if paths is None:
        return
    if isinstance(paths, str):
        raise ValueError(f"{name} must be a list of paths, got the text {paths!r}: write [{paths}]")
    if len(paths) == 0:
        raise ValueError(f"{name} must hold at least one path, got an empty list; or leave it out")
