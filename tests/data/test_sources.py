import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from flash_frac.data import find_files, read_documents, sources
from flash_frac.data.sources import divide_file

PACKERS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
TEXTS = ["one\nline", "é 👍\r\n", "\x00three"]
CONTENTS = {
    ".txt": ("a\r\nb\u2028é\n".encode(), ["a\r\nb\u2028é\n"]),
    ".jsonl": (
        "\n\n".join(
            json.dumps({"text": t, "x": 1}, ensure_ascii=t == TEXTS[0]) for t in TEXTS
        ).encode(),
        TEXTS,
    ),
    ".fa": (b"\n>one x\nACG\nTT\r\n\n>none\n>two\nacgtn", ["ACGTT", "acgtn"]),
}
CONTENTS[".fasta"] = CONTENTS[".fa"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("kind", CONTENTS)
def test_text_files(tmp_path, kind, packed, mark):
    content, texts = CONTENTS[kind]
    path = tmp_path / f"a{kind}{packed}"
    path.write_bytes(PACKERS[packed](mark + content))
    counts = []
    assert list(read_documents(path, progress=counts.append)) == texts
    assert sum(counts) == path.stat().st_size
    assert find_files([str(tmp_path)]) == [path]


def test_parquet_by_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_ROWS", 2)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "body": TEXTS}), path)
    counts = []
    assert list(read_documents(path, text_field="body", progress=counts.append)) == TEXTS
    assert len(counts) == 2 and sum(counts) == path.stat().st_size


def test_zst_of_several_frames_and_long_windows(tmp_path):
    path = tmp_path / "a.txt.zst"
    options = zstandard.ZstdCompressionParameters(window_log=28)
    long = zstandard.ZstdCompressor(compression_params=options).compressobj()
    frames = PACKERS[".zst"](b"one ") + long.compress(b"two " * 100_000) + long.flush()
    path.write_bytes(frames)
    assert list(read_documents(path)) == ["one " + "two " * 100_000]


def test_blank_documents_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": " \\n"}\n{"text": "x"}\n')
    assert list(read_documents(path)) == ["x"]


BROKEN = {
    "malformed JSON": (
        ".jsonl",
        b'{"text": "a"}\n\n{"text": \n',
        r"line 3: malformed JSON.*fix or remove the line",
    ),
    "no object": (".jsonl", b'{"text": "a"}\n["b"]\n', r"line 2: expected a JSON object.*list"),
    "no field": (".jsonl", b'{"text": "a"}\n{"body": 1}', r"line 2: no field 'text', only body"),
    "no string": (".jsonl", b'{"text": null}', r"line 1: .*'text' must be text, got NoneType"),
    "half letter": (".jsonl", b'{"text": "\\uD83d"}', r"line 1: .*surrogate"),
    "deep JSON": (".jsonl", b"[" * 200_000, r"line 1: malformed JSON"),
    "latin1 jsonl": (
        ".jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}',
        r"line 2: not UTF-8.*0xe9.*conv",
    ),
    "latin1 txt": (".txt", b"a\nb\nc \xe9", r"line 3: not UTF-8 \(byte 0xe9\)"),
    "latin1 fasta": (".fa", b">a\nA\nC\xe9\n", r"line 3: not UTF-8"),
    "no header": (".fasta", b"\nACGT\n", r"line 2: a FASTA file must start with a header"),
    "empty": (".txt", b"", "holds no text; add some, or leave the file out"),
    "blank": (".txt", b" \n\t\n", "holds no text"),
    "blank jsonl": (".jsonl", b'\n{"text": " "}\n', "holds no text"),
    "blank fasta": (".fa", b">a\n>b\n", "holds no text"),
}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_content_is_named(tmp_path, name, packed):
    suffix, content, message = BROKEN[name]
    path = tmp_path / f"broken{suffix}{packed}"
    path.write_bytes(PACKERS[packed](content))
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["short", "other"])
def test_damaged_packing(tmp_path, packed, damage):
    path = tmp_path / f"a.jsonl{packed}"
    content = PACKERS[packed](b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))
    path.write_bytes(content[: len(content) // 2] if damage == "short" else b"plain text")
    with pytest.raises(ValueError, match=r"truncated or damaged.*download it again") as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "table, message",
    [
        ({"body": ["a"]}, r"no field 'text', only body; set text_field"),
        ({"text": ["a", None]}, "row 2: .*must be text, got NoneType"),
        ({"text": [1]}, "row 1: .*must be text, got int"),
        ({"text": ["a", " "][1:]}, "holds no text"),
    ],
)
def test_broken_parquet(tmp_path, table, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


def test_parquet_that_is_none_or_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(ValueError, match=r"a\.parquet.*cannot be read as parquet"):
        list(read_documents(path))
    offsets = pa.py_buffer((0).to_bytes(4, "little") + b"\x04\0\0\0" + b"\x05\0\0\0")
    raw = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"fine\xff"))
    pq.write_table(pa.table({"text": raw}), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: not UTF-8"):
        list(read_documents(path))


def test_folders_are_searched_in_order(tmp_path):
    names = ["b.txt", "a/z.JSONL", "a/b/c.fa.gz", "x.csv", ".hidden.txt", ".git/d.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [str(path.relative_to(tmp_path)) for path in find_files([str(tmp_path)])]
    assert found == ["a/b/c.fa.gz", "a/z.JSONL", "b.txt"]
    hidden = tmp_path / ".hidden.txt"
    assert find_files([str(tmp_path / "b.txt"), str(hidden)]) == [tmp_path / "b.txt", hidden]


def test_paths_that_cannot_be_used(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/none.txt").write_text("")
    cases = {
        "missing.txt": r"held_out_files: .*missing\.txt does not exist .* pass your own",
        "empty": r"held_out_files: the folder .*empty holds no readable file; expected .*\.jsonl",
        "a.csv": r"held_out_files: .*a\.csv has an unknown suffix; expected .*\.parquet",
        "full": r"none\.txt holds no text",
        "full/none.txt": r"none\.txt holds no text",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            find_files([str(tmp_path / name)], argument="held_out_files")
    with pytest.raises(ValueError, match=r"a\.csv has an unknown suffix"):
        list(read_documents(tmp_path / "a.csv"))


def test_a_file_given_twice(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"data_files: .*a\.txt is given twice"):
        find_files([str(tmp_path), str(tmp_path / "a.txt")])


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_the_spans_of_a_file_hold_each_document_once(tmp_path, size):
    """Also a mark of the byte order, blank lines, a line without its end, one longer than spans."""
    texts = [f"text {i} " * (1 + 20 * (i == 3)) for i in range(8)]
    lines = [json.dumps({"text": text}) for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode())
    spans = divide_file(path, size)
    assert (spans is None) == (path.stat().st_size <= size)
    if spans:
        parts = [list(read_documents(path, span=span)) for span in spans]
        assert sum(parts, []) == texts and len(parts) >= path.stat().st_size / size  # noqa: RUF017
        assert any(not part for part in parts) == (size < 100)


def test_an_error_in_a_span_has_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 9 + '{"text": 1}\n' + '{"text": "fine"}\n' * 9)
    spans = divide_file(path, 60)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 10: the field 'text' must be text"):
        for span in reversed(spans):
            list(read_documents(path, span=span))


def test_the_row_groups_of_parquet_are_spans(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(20)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
    assert divide_file(path, 1 << 20) is None
    spans = divide_file(path, 1)
    assert spans == [(k, k + 1) for k in range(7)]
    counts = []
    read = [list(read_documents(path, span=span, progress=counts.append)) for span in spans]
    assert sum(read, []) == texts  # noqa: RUF017
    assert 0 <= path.stat().st_size - sum(counts) < len(spans)
    pq.write_table(pa.table({"text": [*texts, None]}), path, row_group_size=3)
    with pytest.raises(ValueError, match=r"a\.parquet, row 21: the field 'text' must be text"):
        list(read_documents(path, span=(6, 7)))
    path.write_bytes(b"PAR1" * 4)
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read as parquet"):
        divide_file(path, 1)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.fa"])
def test_what_is_read_as_a_whole_has_no_spans(tmp_path, name):
    (tmp_path / name).write_bytes(b"x" * 100)
    assert divide_file(tmp_path / name, 10) is None
