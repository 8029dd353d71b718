"""Kinds of damage to the bytes of a file."""

import random
from pathlib import Path

# Bytes that a bad block covers, at most.
BLOCK = 64


def _delete(draw: random.Random, path: Path) -> None:
    path.unlink()


def _empty(draw: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def _cut(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def _grow(draw: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, BLOCK)))


def _flip(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _zero(draw: random.Random, path: Path) -> None:
    _overwrite(draw, path, lambda size: bytes(size))


def _scramble(draw: random.Random, path: Path) -> None:
    _overwrite(draw, path, draw.randbytes)


def _overwrite(draw, path, block) -> None:
    content = path.read_bytes()
    start = draw.randrange(len(content))
    size = min(draw.randint(1, BLOCK), len(content) - start)
    path.write_bytes(content[:start] + block(size) + content[start + size :])


WAYS = {
    "deleted": _delete,
    "emptied": _empty,
    "cut": _cut,
    "grown": _grow,
    "flipped": _flip,
    "zeroed": _zero,
    "scrambled": _scramble,
}
# What shows in a text without a checksum, which people may edit.
WAYS_OF_TEXTS = ("deleted", "emptied", "cut", "grown", "zeroed")


def damage(draw: random.Random, path: Path, ways: tuple[str, ...] = tuple(WAYS)) -> str:
    """Damage a file in one of these ways, drawn at random; says what was done."""
    before = path.read_bytes()
    if not before:
        _grow(draw, path)
        return f"{path} grown"
    while True:
        way = draw.choice(ways)
        WAYS[way](draw, path)
        # Zeros may have been there already.
        if not path.exists() or path.read_bytes() != before:
            return f"{path} {way}"
