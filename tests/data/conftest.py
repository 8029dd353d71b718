"""A corpus with files of several kinds."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flash_frac.data import CorpusArguments
from tests.data.test_cache import TEXTS, write_jsonl

# Bytes of a part.
PART = 1000


@pytest.fixture
def arguments(tmp_path):
    """Files of several kinds: one that is divided, small ones, and one that cannot be divided."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:100])
    for number in (100, 101, 102):
        (folder / f"b{number}.txt").write_text(TEXTS[number])
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[103:150])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    pq.write_table(pa.table({"text": TEXTS[150:]}), folder / "d.parquet", row_group_size=10)
    return CorpusArguments(sources=(str(folder),), held_out=0.1, part_bytes=PART)
