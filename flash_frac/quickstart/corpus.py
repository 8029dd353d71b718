"""The text of the quickstart: 233 State of the Union addresses of US presidents, 1790-2021.

`sotu.jsonl.xz` in this folder holds one line of JSON per address, ordered by year:
{"year": 1790, "name": "George Washington", "text": "..."}. SOURCE.txt names their origin.
They are split by year, because a model is used on text from after its training.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from flash_frac.files import write_bytes

FILE = Path(__file__).with_name("sotu.jsonl.xz")
# The addresses from this year on are for validation: 10 of 233, 3.4% of the bytes.
FIRST_HELD_OUT_YEAR = 2012


@dataclass(frozen=True)
class Address:
    """One address: its year, its speaker, and its text, which is one paragraph."""

    year: int
    name: str
    text: str


def load() -> list[Address]:
    """All addresses, ordered by year.

    Example: `load()[0].name == "George Washington"`
    """
    with lzma.open(FILE, "rt", encoding="utf-8") as lines:
        return [Address(**json.loads(line)) for line in lines]


def split(addresses: Iterable[Address]) -> tuple[list[Address], list[Address]]:
    """The addresses for training, before 2012, and for validation, from 2012 to 2021.

    Example: `training, validation = split(load())`
    """
    addresses = list(addresses)
    training = [address for address in addresses if address.year < FIRST_HELD_OUT_YEAR]
    validation = [address for address in addresses if address.year >= FIRST_HELD_OUT_YEAR]
    return training, validation


def write(addresses: Iterable[Address], path: str | Path) -> Path:
    """Write addresses as JSON lines, which `flash_frac.data` reads.

    Example: `write(load(), "all.jsonl")`
    """
    return write_bytes(Path(path), _lines(addresses))


def pack(folder: str | Path) -> bytes:
    """The content of `sotu.jsonl.xz`, from the folder `data` of the npm package.

    Example: `FILE.write_bytes(pack("package/data"))` writes an identical file.
    """
    addresses = []
    for path in sorted(Path(folder).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        addresses.append(Address(content["year"], content["name"], text))
    return lzma.compress(_lines(addresses), preset=9 | lzma.PRESET_EXTREME)


def _lines(addresses: Iterable[Address]) -> bytes:
    rows = (json.dumps(asdict(address), ensure_ascii=False) for address in addresses)
    return "".join(row + "\n" for row in rows).encode()
