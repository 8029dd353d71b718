"""What a training run says about its data; fields for `transformers.HfArgumentParser`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT = 0.01
# Fields that only a stream can have.
STREAM_FIELDS = ("shuffle_buffer", "held_out_documents")


@dataclass(kw_only=True)
class DataArguments:
    """Where text comes from, and how it becomes sequences of T = `sequence_length` tokens.

    Nothing is opened or downloaded here: only the settings are checked, among themselves.

    Example: `DataArguments(data_files=["books"], tokenizer="bytes", sequence_length=4096)`
    """

    data_files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files or folders of .txt, .jsonl, .parquet, .fa or .fasta "
            "(the text ones also with .gz or .zst behind). Either this or dataset_name."
        },
    )
    held_out_files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files or folders to evaluate on, instead of held_out or held_out_documents."
        },
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "A dataset of the Hugging Face hub, or a folder of one."}
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "The configuration of dataset_name."}
    )
    dataset_split: str = field(default="train", metadata={"help": "The split of dataset_name."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read dataset_name while training, without a copy on the disk."},
    )
    shuffle_buffer: int | None = field(
        default=None,
        metadata={
            "help": "Read a stream's shards in random order, and shuffle this many documents at a "
            "time; by default it is read in the order of its source."
        },
    )
    text_field: str = field(
        default="text", metadata={"help": "The field of .jsonl, .parquet and hub rows to read."}
    )
    tokenizer: str = field(
        default="bytes",
        metadata={"help": "'bytes', 'dna', a folder of a tokenizer, or its hub id."},
    )
    add_bos_token: bool | None = field(
        default=None,
        metadata={
            "help": "Begin each document with the tokenizer's bos token, or with nothing; by "
            "default as the tokenizer itself begins a text."
        },
    )
    sequence_length: int = field(
        default=1024, metadata={"help": "Tokens in one training sequence, T."}
    )
    separate_documents: bool = field(
        default=False,
        metadata={"help": "Reset the memory at each document, instead of letting it flow on."},
    )
    held_out: float | None = field(
        default=None,
        metadata={
            "help": "Share of the documents kept for evaluation, without held_out_files and "
            f"streaming; by default {HELD_OUT}."
        },
    )
    held_out_documents: int | None = field(
        default=None,
        metadata={
            "help": "Documents at the beginning of a stream that are kept for evaluation; by "
            "default none."
        },
    )
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the tokens; by default ~/.cache/flash_frac/tokens."},
    )
    stateful: bool = field(
        default=False,
        metadata={
            "help": "Carry the memory from one sequence to the next (truncated back-propagation); "
            "needs separate_documents."
        },
    )

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_stream()
        if self.held_out is None:
            self.held_out = 0.0 if self.streaming else HELD_OUT
        self._check_numbers()
        if not self.text_field:
            raise ValueError("text_field must name a field, got ''; the usual one is 'text'")
        if not self.tokenizer:
            raise ValueError("tokenizer must be 'bytes', 'dna', a folder or a hub id, got ''")
        if self.stateful and not self.separate_documents:
            raise ValueError(
                "stateful needs documents apart: set separate_documents to true, or stateful to "
                "false"
            )
        if self.stateful and self.streaming:
            raise ValueError(
                "stateful deals whole documents to lanes and cannot be used with streaming: "
                "set one of the two to false"
            )

    def _check_sources(self) -> None:
        _check_paths("data_files", self.data_files)
        _check_paths("held_out_files", self.held_out_files)
        if (self.data_files is None) == (self.dataset_name is None):
            raise ValueError(
                "exactly one of data_files and dataset_name must be given, "
                f"got {'neither' if self.data_files is None else 'both'}"
            )
        if self.dataset_name is None:
            for name in ("streaming", "dataset_config"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for a hub dataset, but data_files was given: leave {name} out, "
                        "or give dataset_name"
                    )

    def _check_stream(self) -> None:
        if self.streaming and self.held_out:
            raise ValueError(
                f"held_out is a share ({self.held_out}), which only a whole stream shows: set "
                "held_out_documents to keep its first N documents, or name held_out_files"
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
            raise ValueError(
                "held_out_documents and held_out_files exclude each other: leave one of them out"
            )

    def _check_numbers(self) -> None:
        # A recipe's "1e-2" is text to a YAML reader, and a comparison would fail without a name.
        length, share = self.sequence_length, self.held_out
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"sequence_length must be a whole number above 0, got {length!r}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(
                f"held_out must be a number in [0, 1), the share of the documents, got {share!r}; "
                "use 0 for none, and a decimal point (0.01, not 1e-2) in YAML"
            )

    @property
    def cache_folder(self) -> Path:
        """The folder of the token cache: `cache_dir`, or `flash_frac/tokens` in the user's cache.

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
