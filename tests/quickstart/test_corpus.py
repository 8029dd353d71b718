"""The embedded text: its content, and how it is split."""

import hashlib
import json
import lzma

from flash_frac.data import read_documents
from flash_frac.quickstart import corpus

CONTENT = "afa3bf01fc6d37097980b8d85144b8f7840fe8492b2099450b0a7c25889cfb17"


def test_content_is_the_one_that_numbers_were_measured_on():
    assert hashlib.sha256(lzma.decompress(corpus.FILE.read_bytes())).hexdigest() == CONTENT
    assert corpus.FILE.stat().st_size < 2.6e6
    assert "PDDL" in corpus.FILE.with_name("SOURCE.txt").read_text()


def test_split_is_by_year_and_disjoint():
    addresses = corpus.load()
    training, validation = corpus.split(addresses)
    assert [*training, *validation] == addresses
    assert [address.year for address in validation] == list(range(2012, 2022))
    assert not {a.text for a in training} & {a.text for a in validation}
    sizes = [sum(len(a.text.encode()) for a in part) for part in (training, validation)]
    assert 0.03 < sizes[1] / sum(sizes) < 0.05


def test_written_files_are_read_by_the_trainer(tmp_path):
    addresses = corpus.load()[:3]
    path = corpus.write(addresses, tmp_path / "some.jsonl")
    assert list(read_documents(path)) == [address.text for address in addresses]


def test_packing_is_deterministic(tmp_path):
    for year, name in ((1901, "b"), (1900, "a")):
        content = {"year": year, "name": name, "party": "none", "text": "not read"}
        (tmp_path / f"{year}_{name}.json").write_text(json.dumps(content))
        (tmp_path / f"{year}_{name}.txt").write_text("Some “words” \n")
    packed = corpus.pack(tmp_path)
    assert packed == corpus.pack(tmp_path)
    lines = lzma.decompress(packed).decode().splitlines()
    assert json.loads(lines[0]) == {"year": 1900, "name": "a", "text": "Some “words”"}
    assert len(lines) == 2
