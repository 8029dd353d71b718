"""Turn text into training sequences: tokenizers, sources, token store, packing, batches."""

from flash_frac.data.arguments import DataArguments
from flash_frac.data.cache import Splits, prepare, prepare_held_out
from flash_frac.data.corpus import CorpusArguments
from flash_frac.data.encoding import Encoder, is_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.packing import Collator, LaneDataset, PackedDataset
from flash_frac.data.prepared import PreparedData, ShardedStore, fingerprint_of
from flash_frac.data.preparing import prepare_corpus
from flash_frac.data.sources import find_files, read_documents
from flash_frac.data.store import StoreWriter, TokenStore
from flash_frac.data.streaming import Bookmark, StreamingDataset, Streams, stream
from flash_frac.data.tokenizer import (
    byte_tokenizer,
    check_vocabulary,
    dna_tokenizer,
    load_tokenizer,
)

__all__ = [
    "Bookmark",
    "Collator",
    "CorpusArguments",
    "DataArguments",
    "Encoder",
    "HubDocuments",
    "LaneDataset",
    "PackedDataset",
    "PreparedData",
    "ShardedStore",
    "Splits",
    "StoreWriter",
    "StreamingDataset",
    "Streams",
    "TokenStore",
    "byte_tokenizer",
    "check_vocabulary",
    "dna_tokenizer",
    "find_files",
    "fingerprint_of",
    "is_held_out",
    "load_tokenizer",
    "prepare",
    "prepare_corpus",
    "prepare_held_out",
    "read_documents",
    "stream",
]
