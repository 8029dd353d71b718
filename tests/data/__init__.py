"""Helpers for the data tests."""

import numpy as np

from flash_frac.data import StoreWriter, TokenStore

EOS = 2


def make_store(folder, documents):
    """A store of documents given as lists of ids, each without its eos."""
    writer = StoreWriter(folder, np.dtype("<u2"))
    for ids in documents:
        writer.write(np.array([*ids, EOS]), ends=True)
    writer.close({})
    return TokenStore(folder)


def random_documents(count, *, longest=30, seed=0):
    """Lists of ids above eos, of uneven length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, rng.integers(1, longest)).tolist() for _ in range(count)]
