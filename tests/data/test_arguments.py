from pathlib import Path

import pytest
from transformers import HfArgumentParser

from flash_frac.data import DataArguments

FILES = {"data_files": ["a.txt"]}
HUB = {"dataset_name": "user/books"}
PREPARED = {"prepared_data": "tokens"}
STREAM = HUB | {"streaming": True}


def test_command_line():
    parser = HfArgumentParser(DataArguments)
    words = "--data_files a.txt b --sequence_length 64 --separate_documents --held_out 0.2"
    (arguments,) = parser.parse_args_into_dataclasses(words.split())
    assert arguments == DataArguments(
        data_files=["a.txt", "b"], sequence_length=64, separate_documents=True, held_out=0.2
    )
    assert "Fraction of the documents" in parser.format_help()
    (arguments,) = parser.parse_dict({**HUB, "streaming": True})
    assert arguments.streaming and arguments.data_files is None


def test_defaults():
    arguments = DataArguments(data_files=["nowhere.txt"])
    assert (arguments.tokenizer, arguments.sequence_length) == ("bytes", 1024)
    assert (arguments.held_out, arguments.text_field) == (0.01, "text")
    assert DataArguments(**STREAM).held_out == 0
    assert not (arguments.streaming or arguments.separate_documents or arguments.stateful)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "exactly one of data_files, prepared_data and dataset_name .*got none"),
        (FILES | HUB, "exactly one of .*got data_files and dataset_name"),
        (FILES | PREPARED, "exactly one of .*got data_files and prepared_data"),
        (PREPARED | {"held_out": 0.1}, "held_out is 0.1, but prepared_data is already split"),
        (PREPARED | {"held_out": 0.0}, "held_out is 0.0, but prepared_data"),
        (PREPARED | {"held_out_files": ["a"]}, "leave held_out_files out, or prepare"),
        (PREPARED | {"held_out_documents": 8}, "leave held_out_documents out, or prepare"),
        (PREPARED | {"text_field": "body"}, "text_field is 'body', but prepared_data is"),
        (PREPARED | {"streaming": True}, "streaming is for a hub dataset, but prepared_data was"),
        (PREPARED | {"shuffle_buffer": 8}, "shuffle_buffer is for a stream"),
        ({"data_files": []}, "data_files must hold at least one path"),
        ({"data_files": "a.txt"}, r"data_files must be a list.*'a\.txt': write \[a\.txt\]"),
        (FILES | {"held_out_files": []}, "held_out_files must hold at least one"),
        (FILES | {"held_out_files": "b"}, "held_out_files must be a list"),
        (FILES | {"streaming": True}, "streaming is for a hub dataset.*give dataset_name"),
        (FILES | {"dataset_config": "en"}, "dataset_config is for a hub dataset"),
        (FILES | {"text_field": ""}, "text_field must name a field"),
        (FILES | {"tokenizer": ""}, "tokenizer must be 'bytes'"),
        (FILES | {"sequence_length": 0}, "sequence_length must be a whole number above 0, got 0"),
        (FILES | {"sequence_length": 1.5}, r"sequence_length.*got 1\.5"),
        (FILES | {"held_out": 1.0}, r"held_out must be a fraction .* in \[0, 1\).*got 1\.0"),
        (FILES | {"held_out": -0.1}, r"held_out .*got -0\.1"),
        (FILES | {"held_out": "1e-2"}, "held_out .*got '1e-2'; .*decimal point"),
        (FILES | {"held_out": float("nan")}, "held_out .*got nan"),
        (FILES | {"stateful": True}, "stateful needs separate documents: set separate_documents"),
        (
            HUB | {"stateful": True, "separate_documents": True, "streaming": True},
            "stateful .*cannot be used with streaming",
        ),
        (STREAM | {"held_out": 0.1}, r"held_out \(0\.1\) is a fraction.*set held_out_documents"),
        (FILES | {"held_out_documents": 8}, "held_out_documents is for a stream: set streaming"),
        (HUB | {"shuffle_buffer": 8}, "shuffle_buffer is for a stream.*or shuffle_buffer to 0"),
        (STREAM | {"shuffle_buffer": -1}, "shuffle_buffer must be a whole number.*got -1"),
        (STREAM | {"held_out_documents": 0.1}, r"held_out_documents must be a whole.*got 0\.1"),
        (
            STREAM | {"held_out_documents": 8, "held_out_files": ["a"]},
            "held_out_documents and held_out_files cannot be combined; set one",
        ),
    ],
)
def test_contradictions_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DataArguments(**fields)


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert DataArguments(**FILES).cache_folder == Path("/somewhere/flash_frac/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DataArguments(**FILES).cache_folder == Path.home() / ".cache/flash_frac/tokens"
    assert DataArguments(**FILES, cache_dir="~/x").cache_folder == Path.home() / "x"
