"""Fetch the human chromosome 20 (GRCh37, 63 million bases): python -m experiments.dna.fetch

It comes from Debian's package vt-examples, through the configured apt mirror, and is written to
data/dna/20.fa.gz. Nothing is installed, and root is not needed. On systems other than Debian or
Ubuntu, download the package by hand and pass it as --deb.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "vt-examples"
MEMBER = "usr/share/doc/vt/examples/ref/20.fa.gz"
SHA256 = "83c80b3fb23822ff0a66f26306e46f5db3c83d48fcff68bcddc353a3d8ef581b"
# Ignored by git: the data are not ours to distribute.
FOLDER = Path(__file__).parents[2] / "data" / "dna"
CHROMOSOME_20 = FOLDER / "20.fa.gz"


def download(package: str, folder: Path) -> Path:
    """Download the package to a folder, from apt's mirror."""
    if shutil.which("apt-get") is None:
        raise SystemExit(
            f"apt-get is not installed: download Debian's package {package} and pass it as --deb"
        )
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    return next(folder.glob(f"{package}_*.deb"))


def member_of(deb: Path, member: str) -> bytes:
    """Read one file of a Debian package without installing it."""
    if shutil.which("dpkg-deb") is None:
        raise SystemExit("dpkg-deb is not installed: install dpkg, which many systems package")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(tar.stdout)) as archive:
        names = {name.removeprefix("./"): name for name in archive.getnames()}
        if member not in names:
            raise SystemExit(f"{deb} has no {member}; is it another version of the package?")
        file = archive.extractfile(names[member])
        assert file is not None
        return file.read()


def check(content: bytes, sha256: str) -> None:
    """SystemExit unless the content is the one that the results used."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SystemExit(
            f"the chromosome must have the checksum {sha256}, got {found}; fetch again, or pass "
            "another file to the experiment as --fasta"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--deb", type=Path, help="the package, if already downloaded")
    parser.add_argument("--out", type=Path, default=CHROMOSOME_20)
    options = parser.parse_args(arguments)
    if options.out.exists():
        check(options.out.read_bytes(), SHA256)
        print(f"{options.out} already exists")
        return
    with tempfile.TemporaryDirectory() as folder:
        content = member_of(options.deb or download(PACKAGE, Path(folder)), MEMBER)
    check(content, SHA256)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    aside = options.out.with_name(options.out.name + ".part")
    aside.write_bytes(content)
    aside.replace(options.out)
    print(f"{len(content) / 1e6:.1f} MB in {options.out}")


if __name__ == "__main__":
    main()
