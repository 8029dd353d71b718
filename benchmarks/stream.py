"""Time the operations of a FracStream at the shape of a model: save, load, and decode a token.

    python benchmarks/stream.py [--config flash_frac/recipes/models/frac-130m/config.json]

Random weights, in bfloat16; the 1.3B model by default. Rows go to <gpu>.csv or cpu.csv:
    save, load  a file on the local disk, fsync included; its size does not depend on T
    stream      greedy decoding with `FracStream.generate`, after feeding T tokens
The kernels are first checked against float64, in a small model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_frac.bench.models import measure_stream
from flash_frac.bench.parts import default_sizes
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.models import FracConfig
from flash_frac.recipes import find_config

CONFIG = find_config("frac-1.3b") / "config.json"


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model")
    add_options(parser)
    options = parser.parse_args(typed)
    keep = row_keeper(__file__, typed, options)
    config = FracConfig.from_json_file(options.config)
    for row in measure_stream(config, default_sizes()):
        keep([row])


if __name__ == "__main__":
    main()
