"""Held-out perplexity of a checkpoint, with its own and with 8-bit weights.

    python benchmarks/perplexity.py CHECKPOINT TOKENS [--quantize int8 fp8] [--length 1024]

TOKENS is a folder of `frac data prepare`, made with the checkpoint's tokenizer and held-out text.
A checkpoint without a tokenizer, such as one of `experiments.mixed_models.run --save`, needs
--tokenizer: a folder, such as TOKENS/tokenizer, a hub id, bytes or dna.
bfloat16 on a GPU, float32 on a CPU. Rows go to benchmarks/results/perplexity/<gpu>.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_frac.bench.perplexity import (
    COLUMNS,
    held_out_tokens,
    perplexity_rows,
    print_perplexities,
)
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.models.quantizing import CONFIGS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("checkpoint", help="model folder")
    parser.add_argument("tokens", type=Path, help="folder of frac data prepare")
    parser.add_argument("--tokenizer", help="of a checkpoint that has none")
    parser.add_argument("--quantize", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--length", type=int, default=1024, help="window length in tokens")
    parser.add_argument("--max-tokens", type=int, help="most tokens to score")
    add_options(parser)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(typed)
    kept = {"kind": "perplexity", "columns": COLUMNS, "show": print_perplexities}
    keep = row_keeper(__file__, typed, options, **kept)
    try:
        store = held_out_tokens(options.checkpoint, options.tokens, options.tokenizer)
    except ValueError as error:
        parser.error(str(error))
    chosen = {"kinds": options.quantize, "length": options.length}
    chosen["max_tokens"] = options.max_tokens
    for row in perplexity_rows(options.checkpoint, store, **chosen):
        keep([row])


if __name__ == "__main__":
    main()
