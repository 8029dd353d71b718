"""Make one file of documents from the RFCs, without page headers and footers.

    python experiments/rfc/prepare.py FOLDER OUT.jsonl [--sample]

FOLDER holds rfc*.txt or rfc*.txt.gz at any depth, as in the rfc-editor's archive or Debian's
packages doc-rfc-*. Each RFC becomes a line {"name", "text"}, in numerical order. --sample makes the
smaller file of the committed results: it drops numbers 4n + 3 and takes the first 5,839 others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

# "Fielding, et al.    Standards Track    [Page 2]", a form feed, "RFC 2616   HTTP/1.1   June 1999".
PAGE = re.compile(r"\n*[^\n]*\[Page \w+\][ \t]*\n?\f?\n*(?:RFC \d+[^\n]*\d{4}[ \t]*\n)?\n*")
SAMPLE = 5839


def number(path: Path) -> int | None:
    """The number in rfc2616.txt.gz; None for lists and notes about RFCs."""
    match = re.fullmatch(r"rfc(\d+)\.txt(\.gz)?", path.name)
    return int(match[1]) if match else None


def read(path: Path) -> str:
    """The text of one RFC without page breaks; a few old ones are decoded as Latin-1."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    text = PAGE.sub("\n\n", text.replace("\r\n", "\n")).replace("\f", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def sample(numbers: Iterable[int]) -> list[int]:
    """The RFCs of the committed results, for training and evaluation."""
    return [n for n in sorted(numbers) if n % 4 != 3][:SAMPLE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sample", action="store_true", help="the documents of results.csv")
    options = parser.parse_args()
    files = [p for p in options.folder.rglob("rfc*.txt*") if p.is_file() and not p.is_symlink()]
    found = {n: p for p in sorted(files) if (n := number(p)) is not None}
    if not found:
        parser.error(f"no rfc*.txt or rfc*.txt.gz under {options.folder}")
    numbers = sample(found) if options.sample else sorted(found)
    draft, characters = options.out.with_suffix(".draft"), 0
    with draft.open("w", encoding="utf-8") as file:
        for n in numbers:
            text = read(found[n])
            characters += len(text)
            file.write(json.dumps({"name": f"rfc{n}", "text": text}, ensure_ascii=False) + "\n")
    draft.replace(options.out)
    print(f"{len(numbers)} documents, {characters / 1e6:.1f} million characters in {options.out}")


if __name__ == "__main__":
    main()
