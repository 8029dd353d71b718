from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from flash_frac.data import PackedDataset, StreamingDataset, byte_tokenizer, streaming
from tests.data import make_store

TEXTS = [f"text {i} " * (1 + i % 7) for i in range(60)]


def same_items(left, right):
    left, right = list(left), [right[i] for i in range(len(right))]
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        a, b = ({k: v for k, v in item.items() if k != "bookmark"} for item in (a, b))
        assert a.keys() == b.keys() and a["ends_document"] == b["ends_document"]
        assert all(torch.equal(a[k], b[k]) for k in a if k != "ends_document")


def stored(tmp_path, texts):
    return make_store(tmp_path / "s", [[3 + b for b in text.encode()] for text in texts])


@pytest.mark.parametrize("length", [1, 9, 64, 300])
@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize("batch", [1, 1 << 16])
def test_same_items_as_from_a_store(tmp_path, monkeypatch, length, keep_tail, batch):
    monkeypatch.setattr(streaming, "BATCH_CHARACTERS", batch)
    dataset = StreamingDataset(TEXTS, byte_tokenizer(), length, keep_tail=keep_tail)
    same_items(dataset, PackedDataset(stored(tmp_path, TEXTS), length, keep_tail=keep_tail))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_stream_that_ends_with_a_window(tmp_path, length):
    texts = ["ab", "cd"]
    dataset = StreamingDataset(texts, byte_tokenizer(), length)
    same_items(dataset, PackedDataset(stored(tmp_path, texts), length))


def test_documents_left_out_are_not_read(tmp_path):
    texts = ["ab", "cd", "ab", "ef"]
    dataset = StreamingDataset(texts, byte_tokenizer(), 2, left_out=["ab", "not there"])
    same_items(dataset, PackedDataset(stored(tmp_path, ["cd", "ef"]), 2))


def rows(items):
    return [item["input_ids"].tolist() for item in items]


@pytest.mark.parametrize("ranks", [1, 3])
def test_workers_and_ranks_share_the_documents(ranks):
    """Each of them packs every sixth document, or every second one."""
    read = []
    for rank in range(ranks):
        dataset = StreamingDataset(TEXTS, byte_tokenizer(), 16, rank=rank, ranks=ranks)
        read += rows(DataLoader(dataset, batch_size=None, num_workers=2))
    parts = [TEXTS[k :: 2 * ranks] for k in range(2 * ranks)]
    alone = [row for part in parts for row in rows(StreamingDataset(part, byte_tokenizer(), 16))]
    assert sorted(read) == sorted(alone)


def test_an_endless_stream_packs_one_pass_behind_the_other(tmp_path):
    dataset = StreamingDataset(["ab", "cd"], byte_tokenizer(), 5, endless=True)
    whole = PackedDataset(stored(tmp_path, ["ab", "cd"] * 4), 5)
    same_items(islice(dataset, len(whole)), whole)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"rank must be in \[0, ranks\), got rank 2 and ranks 2"):
        StreamingDataset(TEXTS, byte_tokenizer(), 16, rank=2, ranks=2)
    with pytest.raises(ValueError, match="sequence_length must be at least 1"):
        StreamingDataset(TEXTS, byte_tokenizer(), 0)
    nothing = StreamingDataset(["a"], byte_tokenizer(), 4, rank=1, ranks=2, endless=True)
    with pytest.raises(ValueError, match="reader 2 of 2 has no document to train on: use fewer"):
        next(iter(nothing))
