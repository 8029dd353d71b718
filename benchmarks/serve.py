"""Load-test a real server on loopback: tokens/s, time to first token, inter-token time, memory.

    python benchmarks/serve.py [--smoke]

Random weights; the 1.3B model by default. Peers of `frac serve`: Qwen3 of the same size in
`transformers serve --continuous-batching`, and `frac serve --sequential`. Rows go to
benchmarks/results/serve/<gpu>.csv; flash_frac/bench/serve.py describes their columns:
    plain                   prompts that share nothing, from 1, 8, 64 and 256 clients
    beside prompts of 16384 how long prompts affect 64 running streams
    shared prompt           a system prompt of 4K tokens, with and without the prefix cache
    4096 conversations      started, then each continued from its state
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flash_frac.bench.rows import add_options, print_plain, row_keeper
from flash_frac.bench.serve import SERVE_COLUMNS, SMOKE, SMOKE_CONFIG, Load, measure
from flash_frac.models import FracConfig
from flash_frac.recipes import find_config

CONFIG = find_config("frac-1.3b") / "config.json"


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--conversations", type=int, help="number of conversations")
    parser.add_argument("--device-gib", type=float, help="GPU memory for prefix states")
    parser.add_argument("--servers", nargs="+", default=["ours", "qwen3", "sequential"])
    parser.add_argument("--logs", type=Path, help="folder for server logs")
    add_options(parser)
    options = parser.parse_args(typed)
    kept = {"kind": "serve", "columns": SERVE_COLUMNS, "show": print_plain}
    keep = row_keeper(__file__, typed, options, **kept)
    config = SMOKE_CONFIG if options.smoke else FracConfig.from_json_file(options.config)
    sizes = {name: getattr(options, name) for name in ("conversations", "device_gib")}
    load = replace(SMOKE if options.smoke else Load(), **{k: v for k, v in sizes.items() if v})
    for row in measure(config, load, servers=options.servers, logs=options.logs):
        keep([row])


if __name__ == "__main__":
    main()
