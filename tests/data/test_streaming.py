import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from flash_frac.data import PackedDataset, StreamingDataset, byte_tokenizer, is_held_out, streaming
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
    dataset = StreamingDataset(TEXTS, byte_tokenizer(), length, seed=0, keep_tail=keep_tail)
    same_items(dataset, PackedDataset(stored(tmp_path, TEXTS), length, keep_tail=keep_tail))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_a_stream_that_ends_with_a_window(tmp_path, length):
    texts = ["ab", "cd"]
    dataset = StreamingDataset(texts, byte_tokenizer(), length, seed=0)
    same_items(dataset, PackedDataset(stored(tmp_path, texts), length))


def test_parts_are_disjoint_and_whole(tmp_path):
    held = [t for t in TEXTS if is_held_out(t, seed=5, share=0.3)]
    rest = [t for t in TEXTS if t not in held]
    options = {"seed": 5, "held_out": 0.3}
    for part, texts in [("train", rest), ("held_out", held)]:
        dataset = StreamingDataset(TEXTS, byte_tokenizer(), 16, part=part, **options)
        same_items(dataset, PackedDataset(make_store(tmp_path / part, encoded(texts)), 16))


def encoded(texts):
    return [[3 + b for b in text.encode()] for text in texts]


def test_workers_repeat_nothing():
    dataset = StreamingDataset(TEXTS, byte_tokenizer(), 16, seed=0)
    alone = sorted(item["input_ids"].tolist() for item in dataset)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(item["input_ids"].tolist() for item in loader) == alone


def test_processes_share_the_items():
    dataset = StreamingDataset(TEXTS, byte_tokenizer(), 16, seed=0)
    rows = [item["input_ids"].tolist() for item in dataset]
    shards = [
        IterableDatasetShard(dataset, batch_size=4, num_processes=2, process_index=i)
        for i in range(2)
    ]
    parts = [[item["input_ids"].tolist() for item in shard] for shard in shards]
    dealt = [row for k in range(0, len(parts[0]), 4) for part in parts for row in part[k : k + 4]]
    assert dealt[: len(rows)] == rows


def test_wrong_arguments():
    with pytest.raises(ValueError, match="part must be 'train' or 'held_out', got 'test'"):
        StreamingDataset(TEXTS, byte_tokenizer(), 16, seed=0, part="test")
    with pytest.raises(ValueError, match="sequence_length must be at least 1"):
        StreamingDataset(TEXTS, byte_tokenizer(), 0, seed=0)
