"""Errors name the damaged file, and the line if it has lines."""

import json
import math

import numpy as np
import pytest

from flash_frac.files import (
    read_object,
    read_objects,
    read_record,
    read_table,
    write_json,
    write_record,
    write_rows,
)

BROKEN = {
    b"": "is not JSON",
    b"{": "is not JSON",
    b'{"a": 1}}': "is not JSON",
    b"[1, 2]": "must be a JSON object, got",
    b"null": "must be a JSON object, got None",
    b"{\xff}": "is not UTF-8 text",
    b"\0" * 99: "is not JSON",
    b"[" * 100_000: "is not JSON",
    b"{}": "is damaged: 'step' must be of type int, got None",
    b'{"step": "one"}': "is damaged: 'step' must be of type int, got one",
}


@pytest.mark.parametrize("content", BROKEN, ids=[*map(str, range(len(BROKEN)))])
def test_a_damaged_object_is_named(tmp_path, content):
    path = tmp_path / "one.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_object(path, {"step": int})
    assert str(caught.value).startswith(f"{path} {BROKEN[content]}")
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    path.write_bytes(b'{"step": 1}\n' + content + b"\n")
    with pytest.raises(ValueError) as caught:
        read_objects(path, {"step": int})
    assert str(caught.value).startswith(f"{path} line 2 {BROKEN[content]}")


def test_json_has_no_nan(tmp_path):
    """Strict readers, such as browsers, refuse a file with NaN in it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    value = {"a": math.nan, "b": [1.5, -math.inf, (math.inf,)], "c": np.float64("nan")}
    text = write_json(tmp_path / "one.json", value).read_text()
    expected = {"a": None, "b": [1.5, None, [None]], "c": None}
    assert json.loads(text, parse_constant=refuse) == expected
    text = write_rows(tmp_path / "rows.jsonl", [value]).read_text()
    assert json.loads(text, parse_constant=refuse) == expected


def test_a_line_that_was_cut_off_can_be_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    assert read_objects(path, cut_off=True) == [{"a": 1}]
    with pytest.raises(ValueError, match=r"log\.jsonl line 2 is not JSON"):
        read_objects(path)


TABLE = b'name,value,note\na,1.25,"x, y"\nb,2.5,z\n'


def test_a_table(tmp_path):
    path = tmp_path / "results.csv"
    path.write_bytes(TABLE)
    columns, rows = read_table(path)
    assert columns == ["name", "value", "note"]
    assert rows == [
        {"name": "a", "value": "1.25", "note": "x, y"},
        {"name": "b", "value": "2.5", "note": "z"},
    ]


def test_a_table_cut_anywhere_is_named(tmp_path):
    """Between two lines nothing shows, and nothing is half."""
    path, ends = tmp_path / "results.csv", [n + 1 for n in range(len(TABLE)) if TABLE[n] == 10]
    for size in range(1, len(TABLE)):
        path.write_bytes(TABLE[:size])
        if size in ends:
            assert len(read_table(path)[1]) == ends.index(size)
            continue
        with pytest.raises(ValueError, match=r"results\.csv line \d .*: restore the file"):
            read_table(path)


@pytest.mark.parametrize(
    "content", [b"a,b\n1,2,3\n", b"a,b\n1,\x00\xff\n", b'a,b\n"1"2,3\n', b"a,b\n1,\x00\x00\n"]
)
def test_other_damage_of_tables_is_named(tmp_path, content):
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"results\.csv (line 2|is not UTF-8 text)"):
        read_table(path)


def test_a_record_knows_its_values(tmp_path):
    """Any bit that is flipped shows, unless the values stay the same."""
    path, value = tmp_path / "piqa.json", {"task": "piqa", "results": {"acc": 0.625, "nan": None}}
    write_record(path, {**value, "results": {"acc": 0.625, "nan": math.nan}})
    assert read_record(path, {"task": str}) == value
    whole = path.read_bytes()
    for index in range(len(whole) * 8):
        content = bytearray(whole)
        content[index // 8] ^= 1 << index % 8
        path.write_bytes(content)
        try:
            found = read_record(path)
        except ValueError as error:
            assert str(error).startswith(f"{path} ") and "\n" not in str(error)
        else:
            # The name of the checksum itself.
            assert {key: found[key] for key in value} == value


def test_a_record_of_an_earlier_version(tmp_path):
    write_json(tmp_path / "piqa.json", {"acc": 0.5})
    assert read_record(tmp_path / "piqa.json") == {"acc": 0.5}
