import numpy as np
import pytest
import torch

from flash_frac.data import LaneDataset, PackedDataset
from tests.data import EOS, make_store, random_documents


def check_item(item, stream, starts, start, length):
    """An item against the stream it is cut from: ids, next tokens, documents."""
    ids = stream[start : start + length]
    assert item["input_ids"].tolist()[: len(ids)] == ids
    following = stream[start + 1 : start + length + 1]
    assert item["shift_labels"].tolist() == following + [-100] * (length - len(following))
    assert all(item[key].dtype == torch.int64 for key in ("input_ids", "shift_labels"))
    expected = [s - start for s in starts if start <= s < start + length]
    assert item["document_starts"].tolist() == expected
    assert item["document_starts"].dtype == torch.int64
    assert item["ends_document"] == (start + length in starts)


def flatten(documents):
    stream, starts = [], set()
    for ids in documents:
        starts.add(len(stream))
        stream += [*ids, EOS]
    return stream, sorted(starts)


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("keep_tail", [False, True])
def test_windows(tmp_path, length, keep_tail):
    documents = random_documents(40)
    stream, starts = flatten(documents)
    dataset = PackedDataset(make_store(tmp_path / "s", documents), length, keep_tail=keep_tail)
    seen = []
    for i in range(len(dataset)):
        check_item(dataset[i], stream, starts, i * length, length)
        seen += dataset[i]["input_ids"].tolist()
    whole = len(stream) // length * length
    if keep_tail:
        # Every token once, then the last one repeated, without labels.
        assert seen[: len(stream)] == stream and set(seen[len(stream) :]) <= {EOS}
        assert len(seen) == -(-len(stream) // length) * length
    else:
        assert seen == stream[:whole]


def test_a_last_window_that_is_whole(tmp_path):
    dataset = PackedDataset(make_store(tmp_path / "s", [[3, 4, 5]]), 2, keep_tail=True)
    assert len(dataset) == 2
    assert dataset[1]["shift_labels"].tolist() == [EOS, -100]
    assert dataset[-1]["input_ids"].tolist() == [5, EOS]
    assert not dataset[1]["ends_document"]


def test_bounds(tmp_path):
    store = make_store(tmp_path / "s", [[3, 4, 5]])
    dataset = PackedDataset(store, 2)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"index {index} is outside a dataset of 2"):
            dataset[index]
    with pytest.raises(ValueError, match=r"sequence_length is 5.*holds only 4 tokens.*lower"):
        PackedDataset(store, 5)
    assert len(PackedDataset(store, 5, keep_tail=True)) == 1
    with pytest.raises(ValueError, match="sequence_length must be at least 1, got 0"):
        PackedDataset(store, 0)


def lane_of(dataset, lane):
    items = [dataset[k] for k in range(lane, len(dataset), dataset.lanes)]
    return items, [i for item in items for i in item["input_ids"].tolist()]


@pytest.mark.parametrize("lanes, length", [(1, 5), (3, 8), (4, 1), (5, 64)])
def test_lanes_are_whole_documents(tmp_path, lanes, length):
    documents = random_documents(120)
    store = make_store(tmp_path / "s", documents)
    dataset = LaneDataset(store, length, lanes, seed=3)
    order = np.random.default_rng(3).permutation(len(documents))
    hands = [[] for _ in range(lanes)]
    for number in order:
        shortest = min(hands, key=lambda hand: sum(len(d) + 1 for d in hand))
        shortest.append(documents[number])
    cut = min(sum(len(d) + 1 for d in hand) for hand in hands) // length * length
    for lane in range(lanes):
        stream, starts = flatten(hands[lane])
        items, seen = lane_of(dataset, lane)
        assert seen == stream[:cut]
        for segment, item in enumerate(items):
            check_item(item, stream, starts, segment * length, length)
    assert len(dataset) == lanes * cut // length
    assert dataset.dropped_tokens == store.num_tokens - lanes * cut


def test_a_document_longer_than_many_segments(tmp_path):
    long = list(range(3, 250))
    dataset = LaneDataset(make_store(tmp_path / "s", [long, long]), 10, 2, seed=0)
    for lane in range(2):
        items, seen = lane_of(dataset, lane)
        assert seen == long[:240]
        assert [len(item["document_starts"]) for item in items] == [1] + [0] * 23


def test_lanes_depend_on_the_seed_alone(tmp_path):
    store = make_store(tmp_path / "s", random_documents(50))
    first, again, other = (LaneDataset(store, 8, 3, seed=s) for s in (0, 0, 1))
    assert lane_of(first, 1)[1] == lane_of(again, 1)[1] != lane_of(other, 1)[1]


def test_too_little_for_the_lanes(tmp_path):
    store = make_store(tmp_path / "s", [[3] * 9, [4]])
    with pytest.raises(ValueError, match=r"lanes is 3, but .* holds only 2 documents"):
        LaneDataset(store, 2, 3, seed=0)
    with pytest.raises(ValueError, match=r"sequence_length is 4.*shortest of 2 lanes has only 2"):
        LaneDataset(store, 4, 2, seed=0)
    with pytest.raises(ValueError, match="lanes must be at least 1, got 0"):
        LaneDataset(store, 4, 0, seed=0)
