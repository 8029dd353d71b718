"""From text to training sequences: tokenizers, sources, the token store, packing, batches."""

from flash_frac.data.arguments import DataArguments
from flash_frac.data.cache import Splits, prepare, prepare_held_out
from flash_frac.data.encoding import Encoder, is_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.packing import Collator, LaneDataset, PackedDataset
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
    "DataArguments",
    "Encoder",
    "HubDocuments",
    "LaneDataset",
    "PackedDataset",
    "Splits",
    "StoreWriter",
    "StreamingDataset",
    "Streams",
    "TokenStore",
    "byte_tokenizer",
    "check_vocabulary",
    "dna_tokenizer",
    "find_files",
    "is_held_out",
    "load_tokenizer",
    "prepare",
    "prepare_held_out",
    "read_documents",
    "stream",
]
