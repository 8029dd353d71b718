"""Prepared data equals the token cache, even if writing it is interrupted."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import datasets
import numpy as np
import pytest

from flash_frac.data import (
    CorpusArguments,
    DataArguments,
    Encoder,
    HubDocuments,
    PreparedData,
    byte_tokenizer,
    is_held_out,
    prepare,
    prepare_corpus,
    prepared,
)
from flash_frac.data.drafts import holding
from tests.commands import frac
from tests.data.test_cache import TEXTS, read, write_jsonl
from tests.test_full_disk import files_of_at_most

ONE_OR_TWO = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])


def run(arguments, out, *, processes=1, shard_characters=600):
    options = {"processes": processes, "shard_characters": shard_characters, "progress": False}
    return prepare_corpus(arguments, out, **options)[0]


def cached(tmp_path, reader=None, **fields):
    arguments = DataArguments(cache_dir=str(tmp_path / "cache"), **fields)
    return prepare(arguments, reader or byte_tokenizer(), seed=0, progress=False)


def shards(out):
    return sorted(path.name for path in (out / "shards").iterdir())


def assert_equal(store, other):
    assert store.num_documents == other.num_documents
    assert np.array_equal(store.starts, other.starts)
    assert np.array_equal(store.tokens(0, store.num_tokens), other.tokens(0, other.num_tokens))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_tokens_are_those_of_data_files(arguments, tmp_path, processes):
    data = run(arguments, tmp_path / "out", processes=processes)
    splits = cached(tmp_path, data_files=[str(tmp_path / "source")], held_out=0.1)
    assert_equal(data.train, splits.train)
    assert_equal(data.held_out, splits.held_out)
    assert read(data.train) == [t for t in TEXTS if not is_held_out(t, seed=0, share=0.1)]
    # Spans, a group of small files, and several shards of the one that is not divided.
    names = shards(tmp_path / "out")
    assert len(names) > 10 and any(name.endswith("-0002") for name in names)
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]
    again = cached(tmp_path, prepared_data=str(tmp_path / "out"))
    assert_equal(again.train, splits.train)
    assert_equal(again.held_out, splits.held_out)


def test_any_range_of_many_shards(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "OPEN_SHARDS", 2)
    store = run(arguments, tmp_path / "out").train
    whole, draw = store.tokens(0, store.num_tokens), np.random.default_rng(0)
    for start, stop in np.sort(draw.integers(0, store.num_tokens + 1, (100, 2))):
        assert store.tokens(start, stop).tolist() == whole[start:stop].tolist()
    assert store._open.cache_info().currsize == 2
    with pytest.raises(ValueError, match=rf"stop <= {store.num_tokens}, got 0 and 999999"):
        store.tokens(0, 999_999)
    content = pickle.dumps(store)
    assert len(content) < 1000
    assert pickle.loads(content).tokens(0, 99).tolist() == whole[:99].tolist()


def test_a_large_vocabulary_takes_four_bytes(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("flash_frac.data.encoding.vocabulary_size", lambda _: 1 << 17)
    data = run(arguments, tmp_path / "out")
    assert data.meta["dtype"] == "<u4" and data.train.tokens(0, 3).tolist() == [103, 114, 102]


def test_the_first_documents_are_held_out(tmp_path):
    """Over several parts, and no copy of one of them is trained on."""
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:40], TEXTS[3], *TEXTS[40:], TEXTS[20]])
    arguments = CorpusArguments(sources=(path,), held_out_documents=30, part_bytes=400)
    data = run(arguments, tmp_path / "out")
    assert read(data.held_out) == TEXTS[:30] and read(data.train) == TEXTS[30:]
    assert data.meta["dropped_documents"] == 2
    with pytest.raises(ValueError, match="--held-out-documents is 999, but the source has only"):
        run(replace(arguments, held_out_documents=999), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match=r"no document to train on: .*all of it is held out"):
        run(replace(arguments, held_out_documents=202), tmp_path / "other")


def test_without_held_out(arguments, tmp_path):
    data = run(replace(arguments, held_out=0.0), tmp_path / "out")
    assert data.held_out is None and read(data.train) == TEXTS


@ONE_OR_TWO
def test_a_dataset(tmp_path, processes):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        write_jsonl(folder / f"part{number}.jsonl", TEXTS[number * 50 : number * 50 + 50])
    arguments = CorpusArguments(sources=(str(folder),), split="train", held_out_documents=60)
    data = run(arguments, tmp_path / "out", processes=processes)
    texts = list(HubDocuments(str(folder), streaming=True))
    assert texts == TEXTS[:150]
    assert read(data.held_out) == texts[:60] and read(data.train) == texts[60:]
    with pytest.raises(ValueError, match=r"was made from other data .*has changed"):
        os.utime(folder / "part1.jsonl", (1, 1))
        run(arguments, tmp_path / "out")
    with pytest.raises(ValueError, match="no column 'body'"):
        run(replace(arguments, text_field="body"), tmp_path / "other")
    with pytest.raises(ValueError, match="apply to one dataset, got 2 sources"):
        replace(arguments, sources=("a", "b"))


def test_a_source_that_is_not_there(tmp_path, monkeypatch):
    for name in ("user/absent.jsonl", "./absent", "/absent/folder"):
        with pytest.raises(ValueError, match=rf"SOURCE: {name.removeprefix('./')} does not exist"):
            run(CorpusArguments(sources=(name,)), tmp_path / "out")

    def fail(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="SOURCE 'user/absent' is not a local file or folder, and"):
        run(CorpusArguments(sources=("user/absent",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_done_twice(arguments, tmp_path, monkeypatch):
    """Not even in the middle of a file that cannot be divided."""
    out = tmp_path / "out"
    data = run(arguments, out)
    train, names = read(data.train), shards(out)
    # The next to last shard of the .gz file, and one of the other parts.
    part = next(name for name in names if name.endswith("-0002")).split("-")[0]
    of_file = [name for name in names if name.startswith(part)]
    removed = [*of_file[-2:], next(name for name in names if name > f"{part}-9999")]
    lost = [text for name in removed for text in read_shard(out / "shards" / name)]
    times = {name: os.stat(out / "shards" / name) for name in names if name not in removed}
    (out / "manifest.json").unlink()
    for name in removed:
        shutil.rmtree(out / "shards" / name)
    with pytest.raises(ValueError, match=r"out is not finished: run the same `frac data prepare"):
        PreparedData(out)
    encode, seen = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda self, x: seen.extend(x) or encode(self, x))
    assert read(run(arguments, out).train) == train and shards(out) == names
    assert sorted(seen) == sorted(lost) and len(seen) < 30
    for name, before in times.items():
        assert os.stat(out / "shards" / name).st_ino == before.st_ino, name
    again, finished = prepare_corpus(arguments, out, shard_characters=600, progress=False)
    assert finished and again.train.num_tokens == data.train.num_tokens and len(seen) == len(lost)


def read_shard(folder):
    """The texts of one shard, of both splits."""
    texts = []
    for split in folder.iterdir():
        if split.is_dir():
            ids = np.fromfile(split / "tokens.bin", "<u2")
            texts += byte_tokenizer().decode(ids).split("<eos>")[:-1]
    return texts


SCRIPT = """
import sys
from flash_frac.data import CorpusArguments, prepare_corpus
if __name__ == "__main__":
    arguments = CorpusArguments(sources=(sys.argv[1],), held_out=0.1, part_bytes=300)
    prepare_corpus(arguments, sys.argv[2], processes=2, progress=False)
"""


def test_a_killed_preparation_goes_on(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 5)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), source, str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment)
    folder, limit = tmp_path / "out" / "shards", time.monotonic() + 120
    while not folder.is_dir() or len(list(folder.glob("0*"))) < 5:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = file.read().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(children) >= 2 and not (tmp_path / "out" / "manifest.json").exists()
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < limit, "the processes of the pool must not outlive the first"
        time.sleep(0.01)
    finished = {path: path.stat() for path in folder.glob("0*")}
    arguments = CorpusArguments(sources=(source,), held_out=0.1, part_bytes=300)
    data, _ = prepare_corpus(arguments, tmp_path / "out", processes=1, progress=False)
    splits = cached(tmp_path, data_files=[source], held_out=0.1)
    assert_equal(data.train, splits.train)
    assert_equal(data.held_out, splits.held_out)
    assert 5 <= len(finished) < len(list(folder.iterdir())) and data.check() > 500
    assert all(path.stat().st_ino == before.st_ino for path, before in finished.items())
    # Drafts of killed processes are gone.
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@ONE_OR_TWO
def test_an_error_stops_all_processes_and_keeps_shards(tmp_path, processes):
    source = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in TEXTS]
    source.write_text("\n".join([*rows[:150], "{", *rows[150:]]))
    arguments = CorpusArguments(sources=(str(source),), part_bytes=500)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 151: malformed JSON"):
        run(arguments, tmp_path / "out", processes=processes)
    names = shards(tmp_path / "out")
    assert names and all(re.fullmatch(r"\d{6}-\d{4}", name) for name in names)
    source.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"from other data or settings \(.*a\.jsonl has changed\)"):
        run(arguments, tmp_path / "out")


def test_other_data_and_settings_are_refused(arguments, tmp_path):
    out = tmp_path / "out"
    run(arguments, out)
    other = write_jsonl(tmp_path / "other.jsonl", TEXTS)
    for changes, message in [
        ({"tokenizer": "dna"}, r"tokenizer \w{12} -> \w{12}"),
        ({"text_field": "body"}, "no field 'body'"),
        ({"held_out": 0.2}, r"held_out 0\.1 -> 0\.2"),
        ({"held_out": 0.0, "held_out_documents": 3}, "held_out_documents 0 -> 3"),
        ({"seed": 1}, "seed 0 -> 1"),
        ({"add_bos_token": True}, r"beginning \[\] -> \[1\]"),
        ({"part_bytes": 1001}, "part_bytes 1000 -> 1001"),
        (
            {"sources": (other,)},
            r"source .*a\.jsonl \(6 in total\) -> .*other\.jsonl \(1 in total\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            run(replace(arguments, **changes), out)
    with pytest.raises(ValueError, match="shard_characters 600 -> 601"):
        run(arguments, out, shard_characters=601)
    # A source that has moved is the same one.
    (tmp_path / "source").rename(tmp_path / "moved")
    assert run(replace(arguments, sources=(str(tmp_path / "moved"),)), out).train.num_tokens > 0
    (tmp_path / "moved" / "b100.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"OUT .*out was made from other data.*-> .*: name anoth"):
        run(replace(arguments, sources=(str(tmp_path / "moved"),)), out)


def test_other_folders_are_refused(arguments, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"OUT .*mine is not empty and holds no prepared data"):
        run(arguments, tmp_path / "mine")
    with pytest.raises(ValueError, match=r"thesis\.txt is a file"):
        run(arguments, tmp_path / "mine" / "thesis.txt" / "out")
    with pytest.raises(ValueError, match=r"mine holds no prepared data \(meta\.json is missing\)"):
        PreparedData(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"OUT .*tokens is inside SOURCE .*source: name a folder"):
        run(arguments, tmp_path / "source" / "tokens")
    run(arguments, tmp_path / "out")
    with holding(tmp_path / "out"), pytest.raises(ValueError, match="out is being written by an"):
        run(arguments, tmp_path / "out")
    with pytest.raises(ValueError, match="--processes must be at least 1, got 0"):
        run(arguments, tmp_path / "new", processes=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk(tmp_path, processes):
    """A limit on the size of files stands for the disk. The small shards before it stay."""
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:100], "long " * 4000, *TEXTS[100:]])
    arguments = CorpusArguments(sources=(source,), part_bytes=800)
    with files_of_at_most(20_000), pytest.raises(ValueError, match="File too large") as caught:
        run(arguments, tmp_path / "out", processes=processes)
    message = str(caught.value)
    assert message.startswith(
        f"OUT: cannot write tokens to {tmp_path / 'out' / 'shards'} (File too"
    )
    assert message.endswith("run the same command again: finished shards are kept")
    names = shards(tmp_path / "out")
    assert names and all(re.fullmatch(r"\d{6}-\d{4}", name) for name in names)
    data = run(arguments, tmp_path / "out")
    assert read(data.train) == [*TEXTS[:100], "long " * 4000, *TEXTS[100:]] and data.check()


def test_commands(tmp_path):
    source, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    done = frac("data", "prepare", source, out, "--held-out-documents", 20, "--processes", 1)
    assert done.returncode == 0, done.stderr
    assert "Held out: 20 documents" in done.stdout and "(the first 20 documents)" in done.stdout
    assert "Train: 180 documents, " in done.stdout and "is already finished" not in done.stdout
    again = frac("data", "prepare", source, out, "--held-out-documents", 20)
    assert again.returncode == 0 and f"{out} is already finished" in again.stdout
    info = frac("data", "info", out, "--check", "--samples", 2)
    lengths = [len(text) + 1 for text in TEXTS[20:]]
    stated = f"mean {np.mean(lengths):.1f}, median {np.median(lengths):.0f}, maximum {max(lengths)}"
    assert stated in info.stdout and "1 shards" in info.stdout
    assert "tokenizer: bytes" in info.stdout.lower() and "no special token" in info.stdout
    counts = re.findall(r"^ +([\d,]+) to [\d,]+ +([\d,]+) #+$", info.stdout, re.M)
    assert [int(count) for _, count in counts] == [
        sum(low <= length < 4 * low for length in lengths) for low in (4, 16, 64)
    ]
    samples = re.findall(r"^Document (\d+) \((\d+) tokens\): (.*)$", info.stdout, re.M)
    assert len(samples) == 2
    for number, length, text in samples:
        whole = TEXTS[20 + int(number)]
        assert int(length) == len(whole) + 1 and text.startswith(whole.strip())
    assert "14 files match their checksums" in info.stdout
    assert frac("data", "info", out, "--samples", 2).stdout in info.stdout
    both = ("--held-out", 0.1, "--held-out-documents", 2)
    for arguments, message in [
        (("info", tmp_path / "absent"), "absent holds no prepared data"),
        (("prepare", source, out), "held_out_documents 20 -> 0"),
        (("prepare", source, tmp_path / "new", *both), "cannot be combined; pass one"),
        (("prepare", source, tmp_path / "new", "--held-out", 2), "must be a fraction in [0, 1)"),
        (("prepare", tmp_path / "b.jsonl", tmp_path / "new"), "b.jsonl does not exist"),
    ]:
        done = frac("data", *arguments)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert done.stderr.startswith("frac: ") and "\n" not in done.stderr.strip()


def test_ctrl_c_says_what_is_kept(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(Encoder, "encode", interrupt)
    done = frac("data", "prepare", source, tmp_path / "out", "--processes", 1)
    assert done.returncode == 130 and "finished shards are kept" in done.stdout
    assert "Traceback" not in done.stderr and shards(tmp_path / "out") == []


def test_progress_is_shown(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flash_frac.data.cache.BAR_DELAY", 0)
    prepare_corpus(replace(arguments, part_bytes=None), tmp_path / "out", processes=1)
    shown = capsys.readouterr().err
    assert "tokenising: 100%" in shown and "hashing: 100%" in shown
