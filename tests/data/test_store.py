import json
import pickle

import numpy as np
import pytest

from flash_frac.data import StoreWriter, TokenStore
from tests.data import EOS, make_store, random_documents


def test_round_trip(tmp_path):
    documents = random_documents(20)
    store = make_store(tmp_path / "s", documents)
    flat = [i for ids in documents for i in [*ids, EOS]]
    assert store.num_documents == 20 and store.num_tokens == len(flat)
    assert store.tokens(0, store.num_tokens).tolist() == flat
    assert store.tokens(3, 7).tolist() == flat[3:7] and store.tokens(3, 7).dtype == np.int64
    assert store.tokens(5, 5).shape == (0,)
    for i, ids in enumerate(documents):
        assert store.tokens(store.starts[i], store.starts[i + 1]).tolist() == [*ids, EOS]
    assert (tmp_path / "s/tokens.bin").stat().st_size == 2 * len(flat)


def test_four_bytes_and_pieces(tmp_path):
    writer = StoreWriter(tmp_path / "s", np.dtype("<u4"))
    writer.write(np.array([1, 70_000]), ends=False)
    writer.write(np.array([2]), ends=True)
    writer.close({"sources": ["x"]})
    store = TokenStore(tmp_path / "s")
    assert store.tokens(0, 3).tolist() == [1, 70_000, 2] and store.starts.tolist() == [0, 3]
    assert store.meta["sources"] == ["x"]


@pytest.mark.parametrize("start, stop", [(-1, 2), (2, 1), (0, 99)])
def test_outside(tmp_path, start, stop):
    store = make_store(tmp_path / "s", [[3, 4]])
    with pytest.raises(ValueError, match=rf"stop <= 3, got {start} and {stop}"):
        store.tokens(start, stop)


def test_a_worker_reopens_it(tmp_path):
    """Tokens are not copied to processes that are spawned."""
    store = make_store(tmp_path / "s", [range(3, 200)] * 100)
    content = pickle.dumps(store)
    assert len(content) < 1000
    assert pickle.loads(content).tokens(0, 50).tolist() == store.tokens(0, 50).tolist()


def test_unfinished(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a complete token store: .*meta\.json"):
        TokenStore(tmp_path / "nowhere")
    writer = StoreWriter(tmp_path / "half", np.dtype("<u2"))
    writer.write(np.arange(5), ends=True)
    writer.abandon()
    with pytest.raises(ValueError, match="half is not a complete token store"):
        TokenStore(tmp_path / "half")


def change_meta(folder, **changes):
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_starts(folder, change):
    np.save(folder / "documents.npy", change(np.load(folder / "documents.npy")))


def change_bytes(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


# What is done to a store, and what of it is told. The second kind is told without checksums, too.
DAMAGED = {
    "flipped": (lambda x: change_bytes(x, "tokens.bin", lambda y: b"\x07" + y[1:]), "tokens.bin"),
    "zeroed": (lambda x: change_bytes(x, "tokens.bin", lambda y: bytes(len(y))), "tokens.bin"),
    "moved boundary": (
        lambda x: change_starts(x, lambda y: np.array([y[0], y[1] + 1, *y[2:]])),
        "documents.npy",
    ),
    "other source": (lambda x: change_meta(x, sources=["other"]), "meta.json"),
    "no manifest": (lambda x: (x / "manifest.json").unlink(), "manifest.json is missing"),
}
NONSENSE = {
    "cut": (lambda x: change_bytes(x, "tokens.bin", lambda y: y[:-2]), "tokens.bin"),
    "empty": (lambda x: (x / "tokens.bin").write_bytes(b""), "tokens.bin|empty file"),
    "gone": (lambda x: (x / "documents.npy").unlink(), "documents.npy"),
    "reversed": (lambda x: change_starts(x, lambda y: y[::-1].copy()), "documents.npy"),
    "lost": (lambda x: change_starts(x, lambda y: y[[0, -1]]), "documents.npy"),
    "doubled": (lambda x: change_starts(x, lambda y: y[[0, 1, 1, -1]]), "documents.npy"),
    "floats": (lambda x: change_starts(x, lambda y: y.astype(float)), "documents.npy"),
    "half": (lambda x: change_meta(x, dtype="<f2"), "meta.json has dtype '<f2', this version"),
    "objects": (lambda x: change_meta(x, dtype="O"), "meta.json has dtype 'O', this version"),
    "big-endian": (lambda x: change_meta(x, dtype=">u2"), "meta.json has dtype"),
    "list": (lambda x: change_meta(x, dtype=["<u2"]), "meta.json has dtype"),
    "count": (
        lambda x: change_meta(x, num_tokens="9"),
        "meta.json needs a whole number as num_tokens",
    ),
    "format": (lambda x: change_meta(x, format=99), "meta.json has format 99, this version reads"),
    "cut meta": (lambda x: change_bytes(x, "meta.json", lambda y: y[:9]), "meta.json is not JSON"),
    "other JSON": (
        lambda x: (x / "meta.json").write_text("[1]"),
        "meta.json must be a JSON object",
    ),
}


@pytest.mark.parametrize("how", [*DAMAGED, *NONSENSE])
def test_damage_is_named(tmp_path, how):
    folder = make_store(tmp_path / "s", [[3, 4], [5], [6, 7, 8]]).folder
    damage, message = {**DAMAGED, **NONSENSE}[how]
    damage(folder)
    with pytest.raises(ValueError, match=rf"s is not a complete token store: .*({message})"):
        TokenStore(folder)
    if how in NONSENSE:
        with pytest.raises(ValueError, match=rf"s is not a complete token store: .*({message})"):
            TokenStore(folder, check=False)
