"""Prepared data with damaged or swapped files is rejected, naming the file."""

import os
import shutil
from dataclasses import replace

import pytest

from flash_frac.data import (
    CorpusArguments,
    PreparedData,
    byte_tokenizer,
    dna_tokenizer,
)
from tests.data.test_cache import read, write_jsonl
from tests.data.test_prepared import assert_equal, cached, run


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def swap(one, other):
    for path in (one / "train", other / "train"):
        path.rename(path.parent / "swapped")
    (one / "swapped").rename(other / "train")
    (other / "swapped").rename(one / "train")


# What is done to a shard of prepared data, and what of it is told.
DAMAGE = {
    "cut": (lambda x: os.truncate(x / "train/tokens.bin", 4), "train/tokens.bin is damaged"),
    "gone": (lambda x: (x / "train/tokens.bin").unlink(), "train/tokens.bin is missing"),
    "no shard": (lambda x: shutil.rmtree(x), "000001-0000/.* is missing"),
    "foreign": (lambda x: swap(x, x.parent / "000000-0000"), "00000[01]-0000/train/.* is damaged"),
    "record": (lambda x: flip(x / "shard.json"), "000001-0000/shard.json is damaged"),
    "index": (lambda x: os.truncate(x.parents[1] / "train.npy", 99), "train.npy is damaged"),
    "meta": (lambda x: flip(x.parents[1] / "meta.json"), "meta.json is not JSON"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named(tmp_path, how):
    """The shards have equal sizes, so that only their checksums tell them apart."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i:04}" for i in range(100)])
    out = tmp_path / "out"
    run(CorpusArguments(sources=(source,), part_bytes=280), out)
    damage, message = DAMAGE[how]
    damage(out / "shards" / "000001-0000")
    with pytest.raises(ValueError, match=message):
        PreparedData(out)
    with pytest.raises(ValueError, match=message):
        cached(tmp_path, prepared_data=str(out))


def test_a_flipped_bit_is_found_by_the_check_and_repaired(arguments, tmp_path):
    out = tmp_path / "out"
    texts = read(run(arguments, out).train)
    flip(out / "shards" / "000003-0000" / "train" / "tokens.bin")
    data = PreparedData(out)
    with pytest.raises(ValueError, match=r"000003-0000/train/tokens.bin is damaged.* delete the"):
        data.check()
    shutil.rmtree(out / "shards" / "000003-0000")
    (out / "manifest.json").unlink()
    assert read(run(arguments, out).train) == texts and PreparedData(out).check() > 20


def test_a_foreign_or_damaged_shard_stops_a_restart(arguments, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    run(arguments, out)
    run(replace(arguments, seed=1), other)
    (out / "manifest.json").unlink()
    shard = out / "shards" / "000002-0000"
    shutil.rmtree(shard)
    shutil.copytree(other / "shards" / shard.name, shard)
    with pytest.raises(ValueError, match=rf"{shard} was made from other data or settings: delete"):
        run(arguments, out)
    shutil.rmtree(shard)
    os.truncate(out / "shards" / "000001-0000" / "train" / "tokens.bin", 2)
    with pytest.raises(
        ValueError, match=r"000001-0000/train/tokens.bin is damaged.*; delete (\S+),"
    ):
        run(arguments, out)
    shutil.rmtree(out / "shards" / "000001-0000")
    assert run(arguments, out).check()


def test_another_tokenizer_is_refused(arguments, tmp_path):
    out = tmp_path / "out"
    run(arguments, out)
    message = r"prepared_data .*out was tokenised by 'bytes' .*but tokenizer is 'dna' .*out/tokeni"
    with pytest.raises(ValueError, match=message):
        cached(tmp_path, dna_tokenizer(), prepared_data=str(out), tokenizer="dna")
    tokenizer = byte_tokenizer()
    tokenizer.add_bos_token = True
    with pytest.raises(ValueError, match=r"start with the tokens \[\], but .* with \[1\]: change"):
        cached(tmp_path, tokenizer, prepared_data=str(out))
    with_bos = run(replace(arguments, add_bos_token=True), tmp_path / "bos")
    splits = cached(tmp_path, tokenizer, data_files=list(arguments.sources), held_out=0.1)
    assert_equal(with_bos.train, splits.train)
