"""Train a recipe with `frac train` itself, and append its speed as a row.

    python benchmarks/train.py RECIPE [--any_training_argument VALUE] [--commit C] [--out CSV]

Tokens/s and MFU are medians over the logs of the second half of the run, and include optimizer,
loss, clipping and data. Rows go to benchmarks/results/train/<gpu>.csv.

    python benchmarks/train.py frac-1.3b --quickstart --per_device_train_batch_size 8 \\
        --gradient_accumulation_steps 1 [--compile_blocks true]

trains 60 steps on the text of the quickstart, as bytes, in a temporary folder. At the speed of the
committed rows the steps take 40 s; before them the model is built on the CPU, in about a minute.

    python benchmarks/train.py RECIPE --saves [--save_steps 40 --max_steps 140]

trains three times, and writes the cost of saving to benchmarks/results/saves/<gpu>.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from flash_frac.bench.rows import add_options, print_plain, row_keeper
from flash_frac.bench.saves import SAVE_COLUMNS, saves_rows
from flash_frac.bench.training import TRAIN_COLUMNS, short_run, training_row
from flash_frac.quickstart import corpus


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--saves", action="store_true", help="measure the cost of checkpoints")
    parser.add_argument("--quickstart", action="store_true", help="60 steps on its text")
    add_options(parser)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options, overrides = parser.parse_known_args(typed)
    kind, columns = ("saves", SAVE_COLUMNS) if options.saves else ("train", TRAIN_COLUMNS)
    keep = row_keeper(__file__, typed, options, kind=kind, columns=columns, show=print_plain)
    measure = saves_rows if options.saves else lambda *given: [training_row(*given)]
    with TemporaryDirectory() as name:
        folder, text = Path(name), Path(name) / "text.jsonl"
        if options.quickstart:
            corpus.write(corpus.load(), text)
            overrides = [*short_run(text, folder), *overrides]
        keep(measure(options.recipe, overrides))


if __name__ == "__main__":
    main()
