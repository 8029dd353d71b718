"""Time a FRAC language model beside its peers: prefill, decoding, a training step, small models.

    python benchmarks/model.py [--parts prefill decode train small] [--no-peers] [--weights int8]
    python benchmarks/model.py --parts decode --prompt 65536 --batches 1 --config CONFIG --no-peers

Random weights in bfloat16; on a CPU float32 and tiny sizes, for trying the script out.
    prefill  the backbone with its cache, batch 1: eagerly, and ours through `Generator` as well
    decode   tokens/s of steady greedy decoding after a prompt of T, batch 1 and 64: `generate`,
             and ours through transformers' loop and `Generator` as well
    train    forward and backward with labels, no optimizer: 8 x 4096 tokens
    small    forward and forward+backward of a model of width 256, our backends in turns
The kernels are checked in a small model against float64 first. Rows go to <gpu>.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_frac.bench.models import PARTS, WEIGHTS, measure_models
from flash_frac.bench.parts import default_sizes
from flash_frac.bench.peers import MODEL_PEERS
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.bench.timing import exit_if_ours_failed
from flash_frac.models import FracConfig
from flash_frac.recipes import find_config

CONFIG = find_config("frac-1.3b") / "config.json"


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "small"], default=[*PARTS, "small"])
    parser.add_argument("--config", type=Path, help="config.json of the model; default 1.3B")
    parser.add_argument("--prompt", type=int, help="tokens before those that are decoded")
    parser.add_argument("--batches", type=int, nargs="+", help="sequences decoded together")
    parser.add_argument("--weights", choices=WEIGHTS, help="quantise ours with torchao")
    add_options(parser, peers=MODEL_PEERS)
    options = parser.parse_args(typed)
    if options.config is None and not torch.cuda.is_available():
        parser.error("without a GPU a tiny model must be given with --config")
    keep = row_keeper(__file__, typed, options)
    failures: list[str] = []
    config = FracConfig.from_json_file(options.config or CONFIG)
    chosen = {"parts": options.parts, "weights": options.weights}
    chosen["peers"] = [] if options.no_peers else options.peers
    sizes = default_sizes(prompt=options.prompt, decode_batches=options.batches)
    for rows in measure_models(config, sizes=sizes, failures=failures, **chosen):
        keep(rows)
    exit_if_ours_failed(failures)


if __name__ == "__main__":
    main()
