"""Sharded states in folders of torch.distributed.checkpoint: each rank writes its own shard.

Reading never runs code from such a folder, although torch itself would unpickle anything in it.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

# The folder in a checkpoint, named as accelerate does.
OPTIMIZER = "optimizer_0"
_INDEX = ".metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_CHECKPOINT = "torch.distributed.checkpoint"
# The only names that may be unpickled from an index.
_OF_AN_INDEX = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
# torch warns even where a single process is intended.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class _Unpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _OF_AN_INDEX.get(module, ()):
            raise UnpicklingError(f"{module}.{name} is not part of an index of tensors")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's planner would unpickle any object, so pass it plain data only.
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_index(folder: Path) -> Metadata:
    """The index of a folder's tensors; raises UnpicklingError if it holds anything else."""
    path = folder / _INDEX
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except (UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise UnpicklingError(f"{path} is damaged or holds code: {error}") from error


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of the first rank that failed instead of torch's list of all errors."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error


def write(folder: Path, state: dict[str, Any], *, group: Any) -> None:
    """Write a nested dictionary of tensors and plain data.

    Args:
        group: the ranks, each of which writes its own shard; None if this process writes alone.
    """
    with _own_errors():
        # Files are synced to disk when the checkpoint is complete.
        writer = FileSystemWriter(folder, sync_files=False)
        save_parts(state, storage_writer=writer, process_group=group, no_dist=group is None)


def read(folder: Path, state: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """Read into the tensors of `state`, which has the structure of the dictionary written.

    Args:
        alone: whether this process reads alone, rather than all ranks together.
    """
    # This reports damage in one error; torch would print one per file.
    read_index(folder)
    with _own_errors():
        load_parts(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=alone)
    return state


def check(folder: Path) -> None:
    """Raise ValueError or UnpicklingError unless all parts match their checksums."""
    for info in read_index(folder).storage_data.values():
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            part = io.BytesIO(file.read(info.length))
        try:
            with zipfile.ZipFile(part) as archive:
                bad = archive.testzip()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{folder / info.relative_path} is damaged: {error}") from error
        if bad is not None:
            raise ValueError(
                f"{folder / info.relative_path} is damaged: its part {bad} has changed"
            )


def optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer state by parameter name; if it is sharded, only this rank's shard."""
    return {"optimizer": states.get_optimizer_state_dict(model, _plain(optimizer))}


def load_optimizer(folder: Path, model: nn.Module, optimizer: Any, *, alone: bool) -> None:
    """Restore the optimizer state from a folder written by any number of ranks."""
    loaded = read(folder, optimizer_state(model, optimizer), alone=alone)
    states.set_optimizer_state_dict(model, _plain(optimizer), loaded["optimizer"])


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def model_state(model: nn.Module) -> dict[str, Any]:
    """The weights of this rank's shard of a model."""
    return {"model": states.get_model_state_dict(model)}


def load_model(folder: Path, model: nn.Module) -> None:
    """Restore the weights of a sharded model from a folder written by any number of ranks."""
    states.set_model_state_dict(model, read(folder, model_state(model), alone=False)["model"])


def load_whole_model(path: Path, model: nn.Module, *, main: bool, tied: dict[str, str]) -> None:
    """Restore the weights of a sharded model from one safetensors file, read by one rank.

    Args:
        main: whether this rank reads the file.
        tied: tied weights that the file omits, each with the name of the saved tensor.
    """
    weights: dict[str, Any] = dict(load_file(path)) if main else {}
    weights |= {name: weights[same] for name, same in tied.items() if same in weights}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
