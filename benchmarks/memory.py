"""Measure peak memory of short training runs on one GPU, beside the estimate of `frac plan`.

    python benchmarks/memory.py [--cases 30m 1.3b] [--cap GIB] [--commit C] [--out CSV]
    python benchmarks/memory.py --cases "frac-1.3b --gradient_accumulation_steps 2" --cap 80

A case is a name in `CASES` of flash_frac/bench/memory.py, or a recipe with its arguments. Each runs
six steps on the text of the quickstart. --cap limits the allocator, to simulate a smaller GPU. Each
row goes to benchmarks/results/memory/<gpu>.csv as soon as it is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from flash_frac.bench.memory import CASES, MEMORY_COLUMNS, memory_row
from flash_frac.bench.rows import add_options, print_plain, row_keeper
from flash_frac.quickstart import corpus


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", default=[*CASES], help=f"of {', '.join(CASES)}")
    parser.add_argument("--cap", type=float, help="limit of the allocator in GiB")
    add_options(parser)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(typed)
    kept = {"kind": "memory", "columns": MEMORY_COLUMNS, "show": print_plain}
    keep = row_keeper(__file__, typed, options, **kept)
    for case in options.cases:
        with TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "text").mkdir()
            corpus.write(corpus.load(), folder / "text" / "text.jsonl")
            keep([memory_row(CASES.get(case, case), folder, cap_gib=options.cap)])


if __name__ == "__main__":
    main()
