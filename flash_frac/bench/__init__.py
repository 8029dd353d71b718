"""Throughput in the layout of the paper's table: prefill, decoding and training, with peers."""

from flash_frac.bench.table import bench, choose_config, choose_sizes, paper_table

__all__ = ["bench", "choose_config", "choose_sizes", "paper_table"]
