"""Hub datasets, by a folder that `load_dataset` takes for one; nothing is downloaded."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from flash_frac.data import (
    Bookmark,
    Collator,
    DataArguments,
    Encoder,
    HubDocuments,
    PackedDataset,
    StreamingDataset,
    byte_tokenizer,
    is_held_out,
    prepare,
    stream,
)
from tests.data.test_cache import read
from tests.data.test_streaming import same_items

TEXTS = [f"row {i} é" for i in range(300)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
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


def test_workers_repeat_and_miss_nothing(name):
    """The package would divide its files among workers by itself, and we once more."""
    dataset = StreamingDataset(HubDocuments(name, streaming=True), byte_tokenizer(), 50, seed=0)
    alone = sorted(item["input_ids"].tolist() for item in dataset)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(item["input_ids"].tolist() for item in loader) == alone


@pytest.mark.parametrize("streaming", [False, True])
def test_wrong_column(name, streaming):
    with pytest.raises(ValueError, match=r"no column 'body' \(there: .*text.*set text_field"):
        list(HubDocuments(name, streaming=streaming, text_field="body"))
    with pytest.raises(ValueError, match=r"row 1: the field 'n' must be text, got int"):
        list(HubDocuments(name, streaming=streaming, text_field="n"))


def make_stream(name):
    return StreamingDataset(
        HubDocuments(name, streaming=True), byte_tokenizer(), 20, seed=0, held_out=0.1
    )


def saved(bookmark):
    """As a checkpoint gives it back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.json"
        path.write_text(bookmark.to_json())
        return Bookmark.read(path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"item": 1, "tokens": ["a"], "starts": []}'])
def test_a_damaged_bookmark_is_named(tmp_path, content):
    path = tmp_path / "stream.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"stream\.json (is|must)"):
        Bookmark.read(path)


def test_a_stream_is_read_on_from_a_bookmark(name, monkeypatch):
    monkeypatch.setattr("flash_frac.data.streaming.BATCH_CHARACTERS", 1)
    whole = list(make_stream(name))
    encode, read = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda self, x: [read.extend(x), encode(self, x)][1])
    for k in (2, 9, len(whole) // 2, len(whole) - 1):
        mark = saved(whole[k]["bookmark"])
        assert mark.item <= k < mark.item + 5
        resumed = make_stream(name)
        resumed.resume(mark, 2)
        read.clear()
        items = list(resumed)
        same_items(items[:2] + items[k:], whole[:2] + whole[k:])
        same_items(resumed, items)
        # Beside the first two items, nothing before the bookmark is tokenised again.
        assert not set(read) & set(TEXTS[10 : mark.position["row"] - 1])
        resumed.restart()
        same_items(resumed, whole)


@pytest.mark.parametrize(("workers", "processes"), [(0, 1), (2, 1), (0, 2), (2, 3)])
def test_any_number_of_readers_resumes_exactly(name, workers, processes):
    """The first process saves the bookmark of its last batch, and all go on from it."""

    def loader(rank, mark=None):
        dataset = make_stream(name)
        if mark is not None:
            dataset.resume(mark, 3 * processes * max(workers, 1))
        shard = IterableDatasetShard(dataset, 3, num_processes=processes, process_index=rank)
        return DataLoader(shard, 3, num_workers=workers, collate_fn=Collator(True))

    whole = [list(loader(rank)) for rank in range(processes)]
    for trained in (2, 5, len(whole[0]) - 1):
        mark = saved(whole[0][trained - 1]["bookmark"])
        for rank in range(processes):
            again = list(loader(rank, mark))
            assert len(again) == len(whole[rank])
            for a, b in zip(again[trained:], whole[rank][trained:], strict=True):
                assert torch.equal(a["input_ids"], b["input_ids"])
                assert torch.equal(a["labels"], b["labels"])
                assert torch.equal(a["cu_seqlens"], b["cu_seqlens"])


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


def test_stream_equals_prepare(name, tmp_path):
    arguments = DataArguments(
        dataset_name=name, held_out=0.1, cache_dir=str(tmp_path / "cache"), sequence_length=50
    )
    splits = prepare(arguments, byte_tokenizer(), seed=0, progress=False)
    streams = stream(replace(arguments, streaming=True), byte_tokenizer(), seed=0)
    same_items(streams.train, PackedDataset(splits.train, 50))
    same_items(streams.held_out, PackedDataset(splits.held_out, 50, keep_tail=True))


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
    whole = StreamingDataset(TEXTS, byte_tokenizer(), 4, seed=0)
    same_items(streams.train, list(whole))
    assert len(streams.held_out) == 2
    without = replace(arguments, held_out_files=None, held_out=0.0)
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
