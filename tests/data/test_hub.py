"""Hub datasets, from a local folder that `load_dataset` accepts; nothing is downloaded."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flash_frac.data import (
    Collator,
    DataArguments,
    Encoder,
    HubDocuments,
    StreamingDataset,
    byte_tokenizer,
    is_held_out,
    prepare,
    stream,
    streaming,
)
from flash_frac.data.hub import beginning_of
from flash_frac.data.packing import SKIPPED
from tests.data.test_cache import read
from tests.data.test_streaming import same_items

TEXTS = [f"row {i} é" for i in range(300)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    # A small stream without end would be read many times for one call of the tokenizer.
    monkeypatch.setattr(streaming, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


@pytest.fixture
def name(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for part in range(2):
        rows = [{"text": t, "n": 1} for t in TEXTS[part * 150 : part * 150 + 150]]
        rows.append({"text": " ", "n": 2})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"part{part}.jsonl").write_text(lines)
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_in_order_again_and_again(name, streaming):
    documents = HubDocuments(name, streaming=streaming)
    assert list(documents) == list(documents) == TEXTS


def test_fingerprint(name):
    documents = HubDocuments(name)
    assert documents.fingerprint == HubDocuments(name).fingerprint
    assert documents.fingerprint != HubDocuments(name, split="train[:10]").fingerprint
    with pytest.raises(ValueError, match="a stream cannot be cached; set streaming to false"):
        _ = HubDocuments(name, streaming=True).fingerprint


def shuffled(name, seed=1):
    return HubDocuments(name, streaming=True).shuffled(seed=seed, buffer=20)


@pytest.mark.parametrize("parts", [1, 2, 4, 3])
@pytest.mark.parametrize("make", [lambda name: HubDocuments(name, streaming=True), shuffled])
def test_parts_have_each_document_once(name, parts, make):
    """By shards if there are enough, and else by rows."""
    documents = make(name)
    read = [[text for _, text in documents.read(part=k, parts=parts)] for k in range(parts)]
    assert sorted(chain.from_iterable(read)) == sorted(TEXTS)
    assert max(map(len, read)) - min(map(len, read)) <= 4


@pytest.mark.parametrize("make", [lambda name: HubDocuments(name, streaming=True), shuffled])
def test_uneven_parts_read_their_own_shards_only(name, make):
    lines = "".join(json.dumps({"text": f"more {i}", "n": 1}) + "\n" for i in range(7))
    (Path(name) / "part2.jsonl").write_text(lines)
    documents = make(name)
    shards = [set(TEXTS[:150]), set(TEXTS[150:]), {f"more {i}" for i in range(7)}]
    read = [[text for _, text in documents.read(part=k, parts=2)] for k in range(2)]
    assert Counter(chain.from_iterable(read)) == Counter(set().union(*shards))
    sources = [[k for k in range(3) if shards[k] & set(texts)] for texts in read]
    assert sorted(map(len, sources)) == [1, 2]


def test_a_shuffled_stream_has_another_order_in_each_pass(name):
    documents = shuffled(name)
    first, second = ([text for _, text in documents.read(beginning_of(k))] for k in range(2))
    assert len({*map(tuple, (TEXTS, first, second))}) == 3 and sorted(second) == sorted(TEXTS)
    assert first == list(documents) == list(shuffled(name))
    # The files come in random order, and so do the documents of each buffer.
    begins = {next(iter(shuffled(name, seed))) in TEXTS[:150] for seed in range(8)}
    assert begins == {False, True} and first[:20] != sorted(first[:20], key=TEXTS.index)


@pytest.mark.parametrize("make", [lambda name: HubDocuments(name, streaming=True), shuffled])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_part_is_read_on_from_any_position(name, make, parts):
    whole = list(make(name).read(beginning_of(1), part=parts - 1, parts=parts))
    for k in range(0, len(whole), 17):
        position = json.loads(json.dumps(whole[k][0]))
        again = make(name).read(position, part=parts - 1, parts=parts)
        # The state of a dataset can be told in several ways.
        assert [text for _, text in again] == [text for _, text in whole[k + 1 :]]


@pytest.mark.parametrize("streaming", [False, True])
def test_wrong_column(name, streaming):
    with pytest.raises(ValueError, match=r"no column 'body', only .*text.*; set text_field"):
        list(HubDocuments(name, streaming=streaming, text_field="body"))
    with pytest.raises(ValueError, match=r"row 1: the field 'n' must be text, got int"):
        list(HubDocuments(name, streaming=streaming, text_field="n"))


def make_stream(name, **options):
    documents = HubDocuments(name, streaming=True).shuffled(seed=0, buffer=32)
    left_out = [TEXTS[0], TEXTS[200]]
    return StreamingDataset(documents, byte_tokenizer(), 20, left_out=left_out, **options)


def test_a_stream_is_read_on_from_a_bookmark(name, monkeypatch):
    """Nothing but the document that a bookmark is in is tokenised again."""
    whole = list(islice(make_stream(name, endless=True), 400))
    encode, read = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda self, x: [read.extend(x), encode(self, x)][1])
    documents = [text for epoch in range(3) for text in pass_over(name, epoch)]
    for k in (0, 1, 9, 150, 399 - 20):
        mark = whole[k]["bookmark"]
        assert (mark.worker, mark.items) == (0, k + 1)
        resumed = make_stream(name, endless=True)
        resumed.resume([mark])
        read.clear()
        items = list(islice(resumed, k + 1 + 20))
        assert items[: k + 1] == [SKIPPED] * (k + 1)
        same_items(items[k + 1 :], whole[k + 1 : k + 21])
        # As many characters and ends of documents as there are tokens before.
        sizes = np.cumsum([len(text.encode()) + 1 for text in documents])
        current = int(np.searchsorted(sizes, 20 * (k + 1), side="right"))
        assert read[:50] == documents[current : current + len(read)][:50]


def pass_over(name, epoch):
    texts = make_stream(name).documents.read(beginning_of(epoch))
    return [text for _, text in texts if text not in (TEXTS[0], TEXTS[200])]


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 1), (0, 2), (2, 3)])
def test_readers_resume_exactly(name, workers, ranks):
    """Each rank keeps the last bookmark of each of its workers."""

    def loader(rank, marks=()):
        dataset = make_stream(name, rank=rank, ranks=ranks, endless=True)
        dataset.resume(marks)
        batches = DataLoader(dataset, 3, num_workers=workers, collate_fn=Collator(True))
        return list(islice(batches, 9))

    for rank in range(ranks):
        whole = loader(rank)
        for trained in (1, 4):
            marks = [batch["bookmark"] for batch in whole[:trained]][-max(workers, 1) :]
            again = loader(rank, marks)
            assert again[:trained] == [{}] * trained
            for a, b in zip(again[trained:], whole[trained:], strict=True):
                assert all(torch.equal(a[x], b[x]) for x in ("input_ids", "labels", "cu_seqlens"))


@pytest.mark.parametrize(("ranks", "said"), [(1, False), (2, False), (3, True)])
def test_reading_everything_is_said(name, ranks, said):
    with mock.patch.object(streaming.logger, "warning") as warning:
        for rank in range(ranks):
            next(iter(make_stream(name, rank=rank, ranks=ranks)))
    text = "has 2 shards, fewer than 3 ranks x 1 dataloader workers"
    assert [text in str(call) for call in warning.mock_calls] == [True] * said


def test_what_cannot_be_loaded(name, tmp_path):
    with pytest.raises(ValueError, match=r"dataset_split 'nowhere'\) cannot be loaded"):
        HubDocuments(name, split="nowhere")
    with pytest.raises(ValueError, match=r"dataset_name '.*absent' .*cannot be loaded"):
        HubDocuments(str(tmp_path / "absent"))


def test_prepare(name, tmp_path, monkeypatch):
    arguments = DataArguments(dataset_name=name, held_out=0.1, cache_dir=str(tmp_path / "cache"))
    splits = prepare(arguments, byte_tokenizer(), seed=0, progress=False)
    assert read(splits.held_out) == [t for t in TEXTS if is_held_out(t, seed=0, share=0.1)]
    assert len(read(splits.train)) + len(read(splits.held_out)) == len(TEXTS)
    monkeypatch.setattr(Encoder, "encode", None)
    again = prepare(arguments, byte_tokenizer(), seed=0, progress=False)
    assert again.train.folder == splits.train.folder


def test_the_first_documents_of_a_stream_are_held_out(name):
    """And what equals one of them is not trained on, wherever it is."""
    with open(Path(name) / "part1.jsonl", "a") as file:
        file.write(json.dumps({"text": TEXTS[3], "n": 1}) + "\n")
    arguments = DataArguments(
        dataset_name=name, streaming=True, held_out_documents=40, sequence_length=50
    )
    streams = stream(arguments, byte_tokenizer(), seed=0)
    held_out = StreamingDataset(TEXTS[:40], byte_tokenizer(), 50, keep_tail=True)
    same_items(streams.held_out, list(held_out))
    whole = list(StreamingDataset(TEXTS[40:], byte_tokenizer(), 50))
    same_items(islice(streams.train, len(whole) - 1), whole[:-1])
    apart = replace(arguments, shuffle_buffer=50)
    streams = [stream(apart, byte_tokenizer(), seed=0, rank=k, ranks=2) for k in range(2)]
    assert all(len(x.held_out) == len(streams[0].held_out) for x in streams)
    too_many = replace(arguments, held_out_documents=302)
    with pytest.raises(ValueError, match=r"held_out_documents is 302, but .* has only 301 doc"):
        stream(too_many, byte_tokenizer(), seed=0)
    all_of_them = stream(replace(arguments, held_out_documents=300), byte_tokenizer(), seed=0)
    with pytest.raises(ValueError, match="reader 1 of 1 has no document to train on"):
        next(iter(all_of_them.train))


def test_stream_with_files_held_out(name, tmp_path):
    (tmp_path / "other.txt").write_text("other")
    arguments = DataArguments(
        dataset_name=name,
        streaming=True,
        held_out_files=[str(tmp_path / "other.txt")],
        cache_dir=str(tmp_path / "cache"),
        sequence_length=4,
    )
    streams = stream(arguments, byte_tokenizer(), seed=0, progress=False)
    whole = list(StreamingDataset(TEXTS, byte_tokenizer(), 4))
    same_items(islice(streams.train, len(whole)), whole)
    assert len(streams.held_out) == 2
    without = replace(arguments, held_out_files=None)
    assert stream(without, byte_tokenizer(), seed=0).held_out is None
    with pytest.raises(ValueError, match="stream needs streaming set to true"):
        stream(replace(arguments, streaming=False), byte_tokenizer(), seed=0)


def test_import_does_not_load_what_only_some_need():
    code = (
        "import sys, flash_frac.data\n"
        "print(*{'datasets', 'pyarrow', 'zstandard', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
