"""Rows of a genome as in HyenaDNA: FASTA, intervals of a BED file, one token per base.

    read_fasta -> ids of every chromosome       read_bed or split_by_position -> intervals
    windows    -> parts of an interval to read  make_rows -> (N, L) ids, ready for a model

The ids are HyenaDNA's: [SEP] 1, [PAD] 4, [UNK] 6, A 7, C 8, G 9, T 10, N 11. A row of length L is
L - 1 bases and [SEP] (or L bases); all but the first are predicted. A row cut short by the end of a
chromosome is filled with [PAD] on the left, which is never predicted.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from flash_frac.data.tokenizer import DNA_LETTERS, DNA_SPECIAL

SEP, PAD, UNKNOWN = (DNA_SPECIAL.index(name) for name in ("[SEP]", "[PAD]", "[UNK]"))
A, C, G, T, N = (len(DNA_SPECIAL) + i for i in range(len(DNA_LETTERS)))
# HyenaDNA's 12 ids, padded to a multiple of 8.
VOCAB_SIZE = 16
SPLITS = ("train", "valid", "test")
# Size of the intervals in HyenaDNA's BED file.
INTERVAL = 131_072

Genome = Mapping[str, np.ndarray]
Mode = Literal["hyenadna", "subsegment"]


class Interval(NamedTuple):
    """Bases start to end - 1 of a chromosome, counted from 0."""

    name: str
    start: int
    end: int


class RowSettings(NamedTuple):
    """How intervals become rows.

    Attributes:
        length: L, ids of a row.
        mode: "hyenadna", one window per interval, or "subsegment", as many as fit; see `windows`.
        eos: whether [SEP] is the last id of a row.
        unknown: "keep" N as an ordinary token, as HyenaDNA does in training; or "pad": replace it
            by [PAD], which is never predicted, as in HyenaDNA's fixed test set.
    """

    length: int
    mode: Mode = "subsegment"
    eos: bool = True
    unknown: Literal["keep", "pad"] = "keep"


def letter_table(*, upper: bool = True) -> np.ndarray:
    """The id of every byte (256,); without `upper`, lower case is [UNK], as in HyenaDNA's data."""
    table = np.full(256, UNKNOWN, np.uint8)
    for i, letter in enumerate(DNA_LETTERS):
        table[ord(letter)] = len(DNA_SPECIAL) + i
        if upper:
            table[ord(letter.lower())] = len(DNA_SPECIAL) + i
    return table


def encode(bases: bytes | str, *, upper: bool = True) -> np.ndarray:
    """Ids of letters, uint8.

    Example: `encode("acgX").tolist() == [7, 8, 9, 6]`
    """
    content = bases.encode("ascii", "replace") if isinstance(bases, str) else bases
    return letter_table(upper=upper)[np.frombuffer(content, np.uint8)]


def read_fasta(path: str | Path, *, upper: bool = True) -> dict[str, np.ndarray]:
    """Ids of every record of a FASTA file, plain or .gz, by the first word of its header.

    Example: `read_fasta("data/dna/20.fa.gz")["20"].shape == (63025520,)`
    """
    path = Path(path)
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    before, *records = re.split(rb"^>", content, flags=re.MULTILINE)
    if before.strip() or not records:
        raise ValueError(f"{path} must begin with a header, '>' and a name; is it a FASTA file?")
    genome = {}
    for record in records:
        header, _, body = record.partition(b"\n")
        name = header.split()[0].decode() if header.split() else ""
        if not name or name in genome:
            raise ValueError(
                f"{path}: every header must have a distinct name, got {name!r}; rename one"
            )
        genome[name] = encode(body.translate(None, b"\r\n \t"), upper=upper)
    return genome


def read_bed(path: str | Path) -> dict[str, list[Interval]]:
    """Intervals of each split, from tab-separated lines of chromosome, start, end and split."""
    intervals: dict[str, list[Interval]] = {split: [] for split in SPLITS}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) < 4 or fields[3].strip() not in SPLITS:
            raise ValueError(
                f"{path}, line {number}: expected chromosome, start, end and one of "
                f"{', '.join(SPLITS)} with tabs between, got {line!r}"
            )
        intervals[fields[3].strip()].append(Interval(fields[0], int(fields[1]), int(fields[2])))
    return intervals


def split_by_position(
    genome: Genome,
    *,
    size: int = INTERVAL,
    shares: Sequence[float] = (0.8, 0.1, 0.1),
    max_unknown: float = 0.0,
) -> dict[str, list[Interval]]:
    """Adjacent intervals, without a BED file: splits are contiguous parts of each chromosome.

    Args:
        genome: from `read_fasta`.
        size: bases per interval.
        shares: of train, valid and test, in this order in every chromosome.
        max_unknown: intervals with a larger share of bases other than A, C, G and T, such as gaps
            of an assembly, are dropped.
    """
    if len(shares) != len(SPLITS) or abs(sum(shares) - 1) > 1e-9 or min(shares) < 0:
        raise ValueError(f"shares must be three numbers that sum to 1, got {tuple(shares)}")
    found: dict[str, list[Interval]] = {split: [] for split in SPLITS}
    for name, ids in genome.items():
        count = len(ids) // size
        borders = [round(count * sum(shares[:i])) for i in range(len(SPLITS) + 1)]
        for split, first, last in zip(SPLITS, borders[:-1], borders[1:], strict=True):
            for start in range(first * size, last * size, size):
                part = ids[start : start + size]
                if np.mean((part < A) | (part > T)) <= max_unknown:
                    found[split].append(Interval(name, start, start + size))
    return found


def windows(interval: Interval, length: int, chromosome: int, mode: Mode) -> list[Interval]:
    """The parts of an interval to read, in windows of at most `length` bases.

    "hyenadna": one window. A longer interval is cut to its first bases; a shorter one is extended
    on both sides, up to the ends of the chromosome. "subsegment": all adjacent windows that fit.

    Example:
        >>> windows(Interval("1", 10, 14), 8, 100, "hyenadna")
        [Interval(name='1', start=8, end=16)]
    """
    name, start, end = interval
    if mode == "subsegment":
        starts = range(start, end - length + 1, length)
        return [Interval(name, at, at + length) for at in starts if at + length <= chromosome]
    extra = max(0, length - (end - start))
    start, end = start - extra // 2, end + extra - extra // 2
    return [Interval(name, max(0, start), min(end, start + length, chromosome))]


def reverse_complement(ids: np.ndarray) -> np.ndarray:
    """The reverse complement: A for T, C for G; all other ids stay."""
    complement = np.arange(256, dtype=np.uint8)
    complement[[A, C, G, T]] = T, G, C, A
    return complement[ids[..., ::-1]]


def make_rows(
    genome: Genome,
    intervals: Sequence[Interval],
    settings: RowSettings,
    *,
    other_strand: bool = False,
) -> np.ndarray:
    """Rows of all windows of the intervals, (N, L) uint8.

    Args:
        genome: from `read_fasta`.
        intervals: of one split.
        settings: how they are cut.
        other_strand: whether to take the reverse complement of every window.
    """
    length = settings.length
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    found = []
    for interval in intervals:
        if interval.name not in genome:
            raise ValueError(
                f"intervals name chromosome {interval.name!r}, which the FASTA file lacks; it has "
                f"{', '.join(list(genome)[:5])}: use the file that the BED file was made for"
            )
        chromosome = len(genome[interval.name])
        found += windows(interval, length, chromosome, settings.mode)
    rows = np.full((len(found), length), PAD, np.uint8)
    num_bases = length - settings.eos
    for row, (name, start, end) in zip(rows, found, strict=True):
        ids = genome[name][start:end]
        ids = (reverse_complement(ids) if other_strand else ids)[:num_bases]
        row[num_bases - len(ids) : num_bases] = ids
        if settings.eos:
            row[-1] = SEP
    if settings.unknown == "pad":
        rows[rows == N] = PAD
    return rows


def targets_of(rows: np.ndarray, ignore: int = -100) -> np.ndarray:
    """Targets for every id of the rows but the last, (N, L - 1) int8; [PAD] is ignored."""
    targets = rows[:, 1:].astype(np.int8)
    targets[targets == PAD] = ignore
    return targets
