"""The distributions of MADLab's generators; their arrays equal the official ones."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from experiments.madlab.tasks import IGNORE, TASKS, TaskSettings, generate

SMALL = {name: replace(task, num_train=200, num_test=200) for name, task in TASKS.items()}
SEED = 12345


@pytest.fixture(scope="module")
def data():
    return {name: generate(task, SEED) for name, task in SMALL.items()}


def digest(arrays):
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]


@pytest.mark.parametrize("name", TASKS)
def test_shapes_ids_and_dtype(data, name):
    task = SMALL[name]
    length = task.seq_len - 1 if task.kind == "recall" else task.seq_len
    for array in data[name]:
        assert array.shape == (200, length) and array.dtype == np.int64
    for inputs in (data[name].train_inputs, data[name].test_inputs):
        assert inputs.min() >= 0 and inputs.max() < task.vocab_size
    for targets in (data[name].train_targets, data[name].test_targets):
        assert set(np.unique(targets)) <= {IGNORE, *range(task.vocab_size)}


@pytest.mark.parametrize("name", TASKS)
def test_only_the_seed_matters(data, name):
    before = np.random.get_state()[1].copy()
    assert digest(generate(SMALL[name], SEED)) == digest(data[name])
    assert digest(generate(SMALL[name], SEED + 1)) != digest(data[name])
    assert (np.random.get_state()[1] == before).all(), "numpy's global state was used"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compression", "37dd9cedd5631352"),
        ("in-context-recall", "1907f4bbde622b66"),
        ("noisy-in-context-recall", "aad3fa12bf883dd5"),
        ("fuzzy-in-context-recall", "7fc0fa6d861f677b"),
        ("memorization", "b882a7f5cc9d5562"),
        ("selective-copying", "c80d6c5d686a2414"),
    ],
)
def test_arrays_are_the_official_ones(data, name, expected):
    """Checksums of arrays that were found equal, bit by bit, to those of the official code."""
    assert digest(data[name]) == expected


def test_baseline_sizes():
    sizes = {name: (t.vocab_size, t.seq_len, t.num_train, t.num_test) for name, t in TASKS.items()}
    assert sizes == {
        "compression": (16, 32, 12800, 1280),
        "in-context-recall": (16, 128, 12800, 1280),
        "noisy-in-context-recall": (32, 128, 12800, 1280),
        "fuzzy-in-context-recall": (16, 128, 12800, 1280),
        "memorization": (256, 32, 256, 1280),
        "selective-copying": (16, 256, 12800, 1280),
    }


def recall_scores(row, num_keys):
    """What is to be scored of the pairs in a row of inputs, told from the row itself."""
    seen, expected = {}, []
    for i in range(0, len(row) - 1, 2):
        key, value = row[i], row[i + 1]
        expected.append(value if key in seen else IGNORE)
        if key < num_keys:
            assert seen.setdefault(key, value) == value, "a key changed its value"
    return expected, seen


@pytest.mark.parametrize("name", ["in-context-recall", "noisy-in-context-recall"])
def test_recall_scores_values_of_known_keys(data, name):
    for row, targets in zip(data[name].test_inputs, data[name].test_targets, strict=True):
        expected, seen = recall_scores(row, num_keys=8)
        assert targets[:-1:2].tolist() == expected
        assert set(targets[1::2]) == {IGNORE}
        assert targets[-1] == seen[row[-1]], "the last pair repeats one that was shown"


def test_recall_keys_and_values(data):
    inputs = data["in-context-recall"].train_inputs
    assert set(inputs[:, ::2].ravel()) == set(range(8))
    assert set(inputs[:, 1::2].ravel()) == set(range(8, 16))
    counts = np.bincount(inputs[:, :-1:2].ravel())
    expected = 200 * 63 / 8
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)


def test_training_scores_every_next_token(data):
    for name in ("in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"):
        found = data[name]
        assert (found.train_targets[:, :-1] == found.train_inputs[:, 1:]).all()


def test_noise_is_a_fifth_of_the_pairs(data):
    pairs = data["noisy-in-context-recall"].train_inputs[:, :-1].reshape(200, 63, 2)
    noise = pairs >= 16
    assert (noise[..., 0] == noise[..., 1]).all()
    share = 0.2 * 63 / 64  # one of the 64 pairs is spared
    assert noise[..., 0].mean() == pytest.approx(share, abs=4 * np.sqrt(0.16 / noise[..., 0].size))


@pytest.mark.parametrize(
    ("name", "mean", "spread"),
    [
        ("in-context-recall", 56.0, 0.2),
        ("noisy-in-context-recall", 43.4, 1.0),
        ("fuzzy-in-context-recall", 4.3, 0.7),
        ("memorization", 16, 0),
        ("compression", 32, 0),
        ("selective-copying", 16, 0),
    ],
)
def test_scored_tokens_per_test_sequence(data, name, mean, spread):
    assert (data[name].test_targets != IGNORE).sum(1).mean() == pytest.approx(mean, abs=spread)


def test_fuzzy_pads_are_on_the_left(data):
    for inputs in (
        data["fuzzy-in-context-recall"].train_inputs,
        data["fuzzy-in-context-recall"].test_inputs,
    ):
        pads = inputs == 15
        counts = pads.sum(1)
        assert all(row[:count].all() for row, count in zip(pads, counts, strict=True))
        assert counts.min() == 2 and counts.max() == 7


def motif_pairs(row):
    """Key and value motifs of a row, by their ids: keys below 7, values from 7 to 14."""
    pairs, kind = [], None
    for token in row:
        if token < 7 and kind != "key":
            pairs.append(([], []))
        kind = "key" if token < 7 else "value"
        pairs[-1][kind == "value"].append(int(token))
    return [(tuple(key), tuple(value)) for key, value in pairs]


@pytest.mark.parametrize("split", ["train", "test"])
def test_fuzzy_motifs(data, split):
    found = data["fuzzy-in-context-recall"]
    inputs = found.train_inputs if split == "train" else found.test_inputs
    targets = found.train_targets if split == "train" else found.test_targets
    key_sizes, value_sizes, missing = set(), set(), 0
    for row, last in zip(inputs, targets[:, -1], strict=True):
        pairs = motif_pairs([*row[row != 15], last])
        key_sizes |= {len(key) for key, _ in pairs}
        value_sizes |= {len(value) for _, value in pairs}
        assert all(len(set(motif)) == len(motif) for pair in pairs for motif in pair)
        seen = {}
        for key, value in pairs:
            assert seen.setdefault(key, value) == value
        missing += pairs[-1] not in pairs[:-1]
    # A probe that is due only at the end of the sequence may find no room before it.
    assert 0 < missing <= 0.05 * len(inputs)
    assert key_sizes == ({1, 2, 3} if split == "train" else {3})
    assert value_sizes == {1, 2, 3}


def test_fuzzy_scores_values_of_known_keys(data):
    found = data["fuzzy-in-context-recall"]
    for row, targets in zip(found.test_inputs, found.test_targets, strict=True):
        pads = (row == 15).sum()
        whole = [*row[pads:], targets[-1]]
        expected, seen = [], set()
        for key, value in motif_pairs(whole):
            expected += [IGNORE] * len(key)
            expected += value if key in seen else [IGNORE] * len(value)
            seen.add(key)
        # The probe is asked for at the end whether it was shown or not.
        expected[-len(value) :] = value
        assert [IGNORE] * pads + expected == [IGNORE, *targets]


def test_memorization_pairs_are_fixed(data):
    found = data["memorization"]
    value_of = {}
    for inputs, targets in (
        (found.train_inputs, found.train_targets),
        (found.test_inputs, found.test_targets),
    ):
        assert (inputs[:, 1::2] == 255).all() and (targets[:, ::2] == IGNORE).all()
        for key, value in zip(inputs[:, ::2].ravel(), targets[:, 1::2].ravel(), strict=True):
            assert value_of.setdefault(key, value) == value
    assert set(value_of) == set(range(127))
    assert len(set(value_of.values())) == 127 and set(value_of.values()) <= set(range(127, 255))


def test_compression_asks_for_everything(data):
    found = data["compression"]
    assert (found.test_inputs == found.test_targets).all()
    assert (found.test_inputs[:, -1] == 15).all() and found.test_inputs[:, :-1].max() == 14


def test_copying_answers_in_order(data):
    for row, targets in zip(
        data["selective-copying"].test_inputs, data["selective-copying"].test_targets, strict=True
    ):
        content = row[row < 14]
        assert targets[-16:].tolist() == content.tolist()
        assert (targets[:-16] == IGNORE).all()
        assert row[239] == 15 and (row[240:] == 14).all()
        assert row[238] < 14, "no blank falls behind the last content token"


def test_blanks_fall_evenly(data):
    inputs = data["selective-copying"].train_inputs[:, :239]
    first = (inputs < 14).argmax(1)
    assert first.mean() == pytest.approx(223 / 16, abs=4 * np.sqrt(223 / 16 / 200))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sorting"}, "kind must be one of recall"),
        ({"num_train": 0}, "num_train must be at least 1"),
        ({"noise": 0.2}, "needs noise_vocab >= 1"),
        ({"seq_len": 127}, "seq_len must be even"),
        ({"kind": "copying", "seq_len": 33}, "seq_len must be at least 34"),
    ],
)
def test_settings_are_checked(changes, message):
    settings = {"kind": "recall", "vocab_size": 16, "seq_len": 128}
    with pytest.raises(ValueError, match=message):
        TaskSettings(**(settings | changes))
