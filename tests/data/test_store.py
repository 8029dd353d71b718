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


def test_unfinished_or_damaged(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no readable token store.*delete it"):
        TokenStore(tmp_path / "nowhere")
    writer = StoreWriter(tmp_path / "half", np.dtype("<u2"))
    writer.write(np.arange(5), ends=True)
    writer.abandon()
    with pytest.raises(ValueError, match="half is no readable token store"):
        TokenStore(tmp_path / "half")
    store = make_store(tmp_path / "short", [[3, 4, 5]])
    content = (store.folder / "tokens.bin").read_bytes()
    (store.folder / "tokens.bin").write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"short is damaged: .*4 tokens.*hold 3"):
        TokenStore(store.folder)


def test_other_format(tmp_path):
    store = make_store(tmp_path / "s", [[3]])
    (store.folder / "meta.json").write_text(json.dumps(store.meta | {"format": 99}))
    with pytest.raises(ValueError, match=r"format 99, this version reads 1.*delete it"):
        TokenStore(store.folder)
