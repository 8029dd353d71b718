"""The list of a folder's files with their sizes and SHA-256 sums, by which damage is found.

`write_manifest` is the last step of writing a folder: one without it was not written to the end.
Files that come later, such as a README, are not in the list and do no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import NamedTuple

from flash_frac.files import read_json, write_json

MANIFEST = "manifest.json"
FORMAT = 1


class ManifestError(ValueError):
    """A folder is not what its manifest says; the message names the first file that differs."""


class NoManifestError(ManifestError):
    """A folder has no manifest: it is incomplete, or an earlier flash-frac has written it."""


class Entry(NamedTuple):
    """A file as it was written."""

    size: int
    sha256: str


def write_manifest(folder: str | Path) -> Path:
    """List all files below a folder in its manifest.json, which replaces one that is there.

    Example: `write_manifest("quickstart/final")`
    """
    folder = Path(folder)
    names = sorted(_names(folder))
    sums = _sums([folder / name for name in names])
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": total}
        for name, total in zip(names, sums, strict=True)
    }
    return write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def read_manifest(folder: str | Path) -> dict[str, Entry]:
    """The files that a manifest lists, by their paths in the folder.

    Raises:
        NoManifestError: if there is none.
        ManifestError: if it cannot be read.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise NoManifestError(
            f"{path} is missing: the folder is incomplete, or an earlier flash-frac has written it"
        )
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ManifestError(
                f"{path} has format {content['format']}, but this flash-frac reads format {FORMAT}"
            )
        files = content["files"].items()
        return {name: Entry(int(file["size"]), str(file["sha256"])) for name, file in files}
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ManifestError(f"{path} is damaged: it is no list of files ({error!r})") from error


def check_manifest(folder: str | Path, pattern: str = "*", *, most_bytes: int | None = None) -> int:
    """Compare the files of a folder with its manifest, their sizes before their sums.

    Args:
        pattern: only files whose paths in the folder match it.
        most_bytes: if they have more bytes than that, compare their sizes alone.

    Returns:
        How many files were compared.

    Raises:
        NoManifestError: if there is no manifest.
        ManifestError: that names the first file that is missing or differs.

    Example: `check_manifest("quickstart/final")`
    """
    folder = Path(folder)
    files = {name: x for name, x in read_manifest(folder).items() if fnmatch(name, pattern)}
    for name, entry in files.items():
        _check_size(folder / name, entry.size)
    if most_bytes is not None and sum(entry.size for entry in files.values()) > most_bytes:
        return len(files)
    try:
        sums = list(_sums([folder / name for name in files]))
    except OSError as error:
        raise ManifestError(f"{error.filename} cannot be read: {error.strerror}") from error
    for name, total in zip(files, sums, strict=True):
        if total != files[name].sha256:
            raise ManifestError(
                f"{folder / name} is damaged: its content does not match its checksum in {MANIFEST}"
            )
    return len(files)


def _check_size(path: Path, wanted: int) -> None:
    if not path.is_file():
        raise ManifestError(f"{path} is missing, which {MANIFEST} lists")
    size = path.stat().st_size
    if size != wanted:
        raise ManifestError(f"{path} is damaged: it has {size} bytes, {wanted} in {MANIFEST}")


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            yield name


def _sums(paths: list[Path]) -> Iterator[str]:
    # Hashing lets other threads run, so several large files take the time of one.
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(_sum, paths)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
