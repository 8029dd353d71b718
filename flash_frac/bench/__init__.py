"""Throughput of prefill, decoding and training, with peers, in the layout of the paper's table."""

from flash_frac.bench.table import (
    bench,
    check_parts_and_peers,
    choose_config,
    choose_modes,
    choose_sizes,
    paper_table,
)

__all__ = [
    "bench",
    "check_parts_and_peers",
    "choose_config",
    "choose_modes",
    "choose_sizes",
    "paper_table",
]
