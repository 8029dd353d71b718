"""The manifest of a folder: its files with sizes and SHA-256 sums, to detect damage.

`write_manifest` is the last step of writing a folder, so one without a manifest is incomplete.
Files added later, such as a README, are not listed and do no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flash_frac.files import read_json, write_json

MANIFEST = "manifest.json"
FORMAT = 1


class ManifestError(ValueError):
    """A folder does not match its manifest; the message names the first file that differs."""


class NoManifestError(ManifestError):
    """A folder has no manifest: it is incomplete, or from an earlier version of flash-frac."""


class Entry(NamedTuple):
    """Size and checksum of a file when it was written."""

    size: int
    sha256: str


NO_ENTRIES: Mapping[str, Entry] = MappingProxyType({})


def write_manifest(
    folder: str | Path,
    names: Iterable[str] | None = None,
    *,
    known: Mapping[str, Entry] = NO_ENTRIES,
) -> Path:
    """List the files of a folder in its manifest.json, replacing an existing one.

    Args:
        names: paths in the folder; all files by default.
        known: files to list whose checksums are known, so they are not read.

    Example: `write_manifest("quickstart/final")`
    """
    folder = Path(folder)
    unknown = [name for name in names or _names(folder) if name not in known]
    sums = _sums([folder / name for name in unknown])
    files = dict(known)
    for name, total in zip(unknown, sums, strict=True):
        files[name] = Entry((folder / name).stat().st_size, total)
    listed = {name: files[name]._asdict() for name in sorted(files)}
    return write_json(folder / MANIFEST, {"format": FORMAT, "files": listed})


def read_manifest(folder: str | Path) -> dict[str, Entry]:
    """The files that a manifest lists, by path in the folder.

    Raises:
        NoManifestError: if there is none.
        ManifestError: if it cannot be read.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise NoManifestError(
            f"{path} is missing: the folder is incomplete, or from an earlier flash-frac version"
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
        raise ManifestError(f"{path} is damaged: it is not a list of files ({error!r})") from error


def check_manifest(folder: str | Path, pattern: str = "*", *, most_bytes: int | None = None) -> int:
    """Compare the files of a folder with its manifest: first sizes, then checksums.

    Args:
        pattern: compare only files whose paths in the folder match it.
        most_bytes: if the files have more bytes in total, compare only their sizes.

    Returns:
        The number of files compared.

    Raises:
        NoManifestError: if there is no manifest.
        ManifestError: naming the first file that is missing or differs.

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
        raise ManifestError(f"{path} is missing, but {MANIFEST} lists it")
    size = path.stat().st_size
    if size != wanted:
        raise ManifestError(f"{path} is damaged: it has {size} bytes, but {wanted} in {MANIFEST}")


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            yield name


def _sums(paths: list[Path]) -> Iterator[str]:
    # Hashing releases the GIL, so several large files take the time of one.
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(_sum, paths)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
