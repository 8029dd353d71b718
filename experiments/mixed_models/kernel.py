"""Make one file of long documents from the C sources of a Linux kernel.

    python -m experiments.mixed_models.kernel FOLDER OUT.jsonl [--part N]

FOLDER is an unpacked kernel, such as Debian's linux-source-6.1. A directory is one document: its .c
files in the order of their names, without subdirectories. A single file has 4K tokens (median), too
few to fill a long context with related text. Each document becomes a line {"name", "text"}, sorted
by a hash of its name, so that neighbours are unrelated. --part N takes one directory in N.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_directory(folder: Path) -> str:
    """The .c files of one directory, joined by an empty line; a few are decoded as Latin-1."""
    texts = []
    for path in sorted(folder.glob("*.c")):
        if not path.is_symlink():
            content = path.read_bytes()
            try:
                texts.append(content.decode().strip())
            except UnicodeDecodeError:
                texts.append(content.decode("latin-1").strip())
    return "\n\n".join(text for text in texts if text) + "\n"


def chosen(names: Iterable[str], part: int) -> list[str]:
    """One name in `part`, selected and sorted by a hash."""
    hashes = {int(hashlib.sha256(name.encode()).hexdigest(), 16): name for name in names}
    return [name for digest, name in sorted(hashes.items()) if digest % part == 0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", type=int, default=1, help="take one directory in this many")
    options = parser.parse_args(arguments)
    folders = {path.parent for path in options.folder.rglob("*.c")}
    if not folders:
        parser.error(f"no .c files under {options.folder}")
    names = chosen((str(path.relative_to(options.folder)) for path in folders), options.part)
    draft, characters = options.out.with_suffix(".draft"), 0
    with draft.open("w", encoding="utf-8") as file:
        for name in names:
            text = read_directory(options.folder / name)
            characters += len(text)
            file.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    draft.replace(options.out)
    print(f"{len(names)} documents, {characters / 1e6:.1f} million characters in {options.out}")


if __name__ == "__main__":
    main()
