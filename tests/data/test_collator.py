import numpy as np
import pytest
import torch

from flash_frac.data import Collator, LaneDataset, PackedDataset
from flash_frac.data.packing import make_item
from tests.data import make_store, random_documents


def item(tokens, starts, length=4):
    return make_item(np.array(tokens), np.array(starts, np.int64), sequence_length=length)


# Documents begin at 0 and 2 of the first row, at 1 and 3 of the second, and behind both.
ROWS = [item([10, 11, 20, 21, 30], [0, 2, 4]), item([30, 40, 41, 50, 60], [1, 3, 4])]


def values(batch):
    assert all(isinstance(value, torch.Tensor) for value in batch.values())
    return {key: value.tolist() for key, value in batch.items()}


def test_flowing():
    labels = [[11, 20, 21, 30], [40, 41, 50, 60]]
    assert values(Collator(False)(ROWS)) == {
        "input_ids": [[10, 11, 20, 21], [30, 40, 41, 50]],
        "labels": labels,
        "shift_labels": labels,
    }


def test_separate():
    batch = Collator(True)(ROWS)
    labels = [[11, -100, 21, -100, -100, 41, -100, -100]]
    assert values(batch) == {
        "input_ids": [[10, 11, 20, 21, 30, 40, 41, 50]],
        "labels": labels,
        "shift_labels": labels,
        "cu_seqlens": [0, 2, 4, 5, 7, 8],
    }
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["labels"].dtype == batch["input_ids"].dtype == torch.int64


def test_separate_keeps_the_label_across_windows_of_one_document():
    row = item([10, 11, 12, 13, 14], [0])
    assert Collator(True)([row])["shift_labels"].tolist() == [[11, 12, 13, 14]]


def test_lanes_leave_an_empty_sequence_before_a_document_at_the_start():
    batch = Collator(True, lanes=True)(ROWS)
    # Row 0 begins with a document: nothing continues, then [0, 2) and [2, 4). Row 1 continues.
    assert batch["cu_seqlens"].tolist() == [0, 0, 2, 4, 5, 7, 8]
    assert batch["first_sequence"].tolist() == [0, 3]
    assert batch["first_sequence"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32
    plain = Collator(True)(ROWS)
    assert torch.equal(batch["labels"], plain["labels"])
    assert torch.equal(batch["input_ids"], plain["input_ids"])


def test_lanes_without_any_document_start():
    batch = Collator(True, lanes=True)([item([1, 2, 3, 4, 5], []), item([6, 7, 8, 9], [0])])
    assert batch["cu_seqlens"].tolist() == [0, 4, 4, 8]
    assert batch["first_sequence"].tolist() == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_flowing_slices_make_the_whole(count):
    whole = Collator(False)(ROWS)
    parts = [Collator(False, shard=(r, count))(ROWS) for r in range(count)]
    for key, value in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts], 1), value)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_separate_slices_make_the_whole(tmp_path, count):
    dataset = PackedDataset(make_store(tmp_path / "s", random_documents(40, longest=9)), 12)
    for k in range(len(dataset)):
        whole = Collator(True)([dataset[k]])
        parts = [Collator(True, shard=(r, count))([dataset[k]]) for r in range(count)]
        for key in ("input_ids", "labels", "shift_labels"):
            assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
        width, joined = 12 // count, {0}
        for r, part in enumerate(parts):
            bounds = part["cu_seqlens"].tolist()
            assert bounds[0] == 0 and bounds[-1] == width and "first_sequence" not in part
            # The first sequence continues the slice before, so only the later ones are new; an
            # empty first one means that a document begins with the slice.
            joined |= {b + r * width for b in (bounds[1:-1] if r else bounds[:-1])}
            starts = dataset[k]["document_starts"].tolist()
            assert (bounds[1] == 0) == (r > 0 and r * width in starts)
        assert sorted(joined | {12}) == whole["cu_seqlens"].tolist()


def test_slices_mask_the_label_into_the_next_slice():
    row = [item([10, 11, 20, 21, 22], [0, 2])]
    first, second = (Collator(True, shard=(r, 2))(row) for r in range(2))
    assert first["shift_labels"].tolist() == [[11, -100]]
    assert first["cu_seqlens"].tolist() == [0, 2]
    assert second["shift_labels"].tolist() == [[21, 22]]
    assert second["cu_seqlens"].tolist() == [0, 0, 2]


def test_lanes_from_a_dataset_never_mix_documents(tmp_path):
    """Each label of a separate batch is the next token of the same document."""
    documents = random_documents(60)
    dataset = LaneDataset(make_store(tmp_path / "s", documents), 10, 3, seed=0)
    known = {(a, b) for d in documents for a, b in zip([*d], [*d[1:], 2], strict=True)}
    for k in range(0, len(dataset), 3):
        batch = Collator(True, lanes=True)([dataset[k + lane] for lane in range(3)])
        ids, labels = batch["input_ids"][0], batch["shift_labels"][0]
        assert torch.equal(labels[ids == 2], torch.full_like(labels[ids == 2], -100))
        pairs = zip(ids[labels >= 0].tolist(), labels[labels >= 0].tolist(), strict=True)
        assert set(pairs) <= known
        assert ((labels == -100) == (ids == 2)).all()


def test_batches_do_not_change_the_items():
    before = ROWS[0]["shift_labels"].clone()
    batch = Collator(True)(ROWS)
    batch["labels"].zero_()
    assert batch["shift_labels"].any() and torch.equal(ROWS[0]["shift_labels"], before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"separate": False, "lanes": True}, "lanes needs separate"),
        ({"separate": True, "shard": (2, 2)}, r"shard must be \(r, n\).*got \(2, 2\)"),
        ({"separate": True, "lanes": True, "shard": (0, 2)}, r"lanes cannot be combined with sha"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ValueError, match=message):
        Collator(**options)


def test_rows_that_cannot_be_divided():
    with pytest.raises(ValueError, match=r"sequence_length is 4: make it a multiple of 3"):
        Collator(False, shard=(0, 3))(ROWS)
    with pytest.raises(ValueError, match=r"one row at a time, got 2: set per_device_train_batch_"):
        Collator(True, shard=(1, 2))(ROWS)
