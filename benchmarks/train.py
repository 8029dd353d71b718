"""Train by a recipe with `frac train` itself, and append its speed as a row.

    python benchmarks/train.py RECIPE [--any_training_argument VALUE] [--commit C] [--out CSV]

Tokens/s and MFU are medians of the logs of the second half of the run, optimizer, loss, clipping
and data included. Rows go to benchmarks/results/train/<gpu>.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_frac.bench.rows import (
    add_options,
    append_rows,
    check_header,
    default_path,
    describe_machine,
)
from flash_frac.bench.training import TRAIN_COLUMNS, training_row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipe")
    add_options(parser)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options, overrides = parser.parse_known_args(typed)
    path = options.out or default_path(Path(__file__).parent / "results" / "train")
    check_header(path, TRAIN_COLUMNS)
    machine = describe_machine(__file__, typed, options.commit)
    row = training_row(options.recipe, overrides)
    append_rows([row | machine], path, TRAIN_COLUMNS)
    print(row)


if __name__ == "__main__":
    main()
