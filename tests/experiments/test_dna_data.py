"""HyenaDNA's pipeline, against small cases by hand and the library's tokenizer."""

import gzip
import hashlib
import shutil
import subprocess

import numpy as np
import pytest

from experiments.dna import fetch
from experiments.dna.data import (
    PAD,
    SEP,
    VOCAB_SIZE,
    Interval,
    N,
    RowSettings,
    encode,
    make_rows,
    read_bed,
    read_fasta,
    reverse_complement,
    split_by_position,
    targets_of,
    windows,
)
from flash_frac.data import dna_tokenizer

FASTA = ">chr1 first\nACGT\nacgt\nNNRA\n>chr2\r\nTTTT\r\nCC\r\n"


@pytest.fixture
def genome(tmp_path):
    (tmp_path / "a.fa").write_text(FASTA)
    return read_fasta(tmp_path / "a.fa")


def letters(ids):
    return dna_tokenizer().decode(list(ids)).replace(" ", "")


def test_ids_are_those_of_the_tokenizer():
    text = "ACGTNacgtnX-R"
    assert encode(text).tolist() == dna_tokenizer()(text).input_ids
    assert encode("aCn", upper=False).tolist() == [6, 8, 6]
    assert VOCAB_SIZE % 8 == 0 and len(dna_tokenizer()) <= VOCAB_SIZE


def test_fasta_records(genome, tmp_path):
    assert list(genome) == ["chr1", "chr2"]
    assert genome["chr1"].tolist() == encode("ACGTACGTNNRA").tolist()
    assert genome["chr2"].tolist() == encode("TTTTCC").tolist()
    (tmp_path / "a.fa.gz").write_bytes(gzip.compress(FASTA.encode()))
    packed = read_fasta(tmp_path / "a.fa.gz", upper=False)
    assert packed["chr1"].tolist() == encode("ACGTacgtNNRA", upper=False).tolist()


@pytest.mark.parametrize("text", ["ACGT\n", "", "ACGT\n>a\nACGT\n"])
def test_fasta_must_begin_with_a_header(tmp_path, text):
    (tmp_path / "b.fa").write_text(text)
    with pytest.raises(ValueError, match="must begin with a header, '>' and a name"):
        read_fasta(tmp_path / "b.fa")


@pytest.mark.parametrize("text", [">a\nAC\n>a\nGT\n", ">\nAC\n"])
def test_fasta_names_are_told_apart(tmp_path, text):
    (tmp_path / "b.fa").write_text(text)
    with pytest.raises(ValueError, match="every header must have a distinct name"):
        read_fasta(tmp_path / "b.fa")


def test_bed(tmp_path):
    path = tmp_path / "a.bed"
    path.write_text("chr1\t0\t4\ttrain\nchr1\t4\t8\tvalid\n\nchr2\t1\t5\ttest\n")
    assert read_bed(path) == {
        "train": [Interval("chr1", 0, 4)],
        "valid": [Interval("chr1", 4, 8)],
        "test": [Interval("chr2", 1, 5)],
    }
    path.write_text("chr1\t0\t4\tdev\n")
    with pytest.raises(ValueError, match="line 1: expected chromosome, start, end and one of"):
        read_bed(path)


def test_splits_by_position_are_stretches_without_gaps():
    ids = encode("ACGT" * 250)
    ids[405] = N
    splits = split_by_position({"1": ids}, size=100)
    starts = {split: [interval.start for interval in found] for split, found in splits.items()}
    assert starts == {
        "train": [0, 100, 200, 300, 500, 600, 700],
        "valid": [800],
        "test": [900],
    }
    assert all(i.end - i.start == 100 for found in splits.values() for i in found)
    with_gap = split_by_position({"1": ids}, size=100, max_unknown=0.01)
    assert len(with_gap["train"]) == 8
    with pytest.raises(ValueError, match="shares must be three numbers that sum to 1"):
        split_by_position({"1": ids}, shares=(0.8, 0.1, 0.2))


@pytest.mark.parametrize(
    ("interval", "length", "expected"),
    [
        ((10, 14), 4, (10, 14)),
        ((10, 14), 3, (10, 13)),
        ((10, 14), 9, (8, 17)),
        ((1, 5), 12, (0, 9)),
        ((94, 98), 12, (90, 100)),
        ((0, 200), 150, (0, 100)),
    ],
    ids=["as it is", "first bases", "odd extension", "left end", "right end", "past the end"],
)
def test_windows_of_hyenadna(interval, length, expected):
    found = windows(Interval("1", *interval), length, 100, "hyenadna")
    assert found == [Interval("1", *expected)]


def test_windows_side_by_side():
    found = windows(Interval("1", 10, 31), 5, 100, "subsegment")
    assert [(w.start, w.end) for w in found] == [(10, 15), (15, 20), (20, 25), (25, 30)]
    assert windows(Interval("1", 10, 14), 5, 100, "subsegment") == []
    assert len(windows(Interval("1", 90, 110), 5, 100, "subsegment")) == 2


def test_reverse_complement():
    assert letters(reverse_complement(encode("AACGTN"))) == "NACGTT"
    ids = np.random.default_rng(0).integers(0, 12, (3, 50)).astype(np.uint8)
    assert np.array_equal(reverse_complement(reverse_complement(ids)), ids)


def test_rows_end_with_sep(genome):
    train = [Interval("chr1", 0, 8)]
    rows = make_rows(genome, train, RowSettings(4))
    assert rows.dtype == np.uint8
    assert rows.tolist() == [[7, 8, 9, SEP], [7, 8, 9, SEP]]
    bare = make_rows(genome, train, RowSettings(4, eos=False))
    assert [letters(row) for row in bare] == ["ACGT", "ACGT"]
    one = make_rows(genome, train, RowSettings(4, "hyenadna", eos=False))
    assert [letters(row) for row in one] == ["ACGT"]


def test_other_strand(genome):
    rows = make_rows(genome, [Interval("chr2", 2, 6)], RowSettings(4), other_strand=True)
    assert rows.tolist() == [[*encode("GGA").tolist(), SEP]]


def test_short_rows_are_padded_on_the_left(genome):
    rows = make_rows(genome, [Interval("chr2", 3, 6)], RowSettings(9, "hyenadna"))
    assert rows.tolist() == [[PAD, PAD, *encode("TTTTCC").tolist(), SEP]]
    assert targets_of(rows).tolist() == [[-100, *encode("TTTTCC").tolist(), SEP]]


def test_unknown_bases_are_kept_or_left_out(genome):
    gap = [Interval("chr1", 6, 12)]
    keep = make_rows(genome, gap, RowSettings(6, eos=False))
    assert targets_of(keep).tolist() == [[10, N, N, 6, 7]]
    pad = make_rows(genome, gap, RowSettings(6, eos=False, unknown="pad"))
    assert pad.tolist() == [[9, 10, PAD, PAD, 6, 7]]
    assert targets_of(pad).tolist() == [[10, -100, -100, 6, 7]]


def test_rows_are_checked(genome):
    with pytest.raises(ValueError, match=r"chromosome 'chr3'.*it has chr1, chr2"):
        make_rows(genome, [Interval("chr3", 0, 4)], RowSettings(4))
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        make_rows(genome, [], RowSettings(1))


@pytest.fixture
def package(tmp_path):
    """A Debian package with one file where the chromosome would be."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a <a@a>\nDescription: a\n"
    )
    (root / fetch.MEMBER).parent.mkdir(parents=True)
    (root / fetch.MEMBER).write_bytes(b"bases")
    deb = tmp_path / "a.deb"
    subprocess.run(["dpkg-deb", "--build", root, deb], check=True, capture_output=True)
    return deb


def test_fetch_from_a_package(package, tmp_path, monkeypatch, capsys):
    out = tmp_path / "data" / "20.fa.gz"
    arguments = ["--deb", str(package), "--out", str(out)]
    with pytest.raises(SystemExit, match="the chromosome must have the checksum 83c80b"):
        fetch.main(arguments)
    assert not out.exists()
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(b"bases").hexdigest())
    fetch.main(arguments)
    assert out.read_bytes() == b"bases"
    fetch.main(arguments)
    assert "already exists" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no usr/nothing"):
        fetch.member_of(package, "usr/nothing")


def test_fetch_without_apt(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match=r"apt-get is not installed.* --deb"):
        fetch.download("vt-examples", tmp_path)
    with pytest.raises(SystemExit, match="dpkg-deb is not installed"):
        fetch.member_of(tmp_path / "a.deb", "b")
