"""Time forward and backward of the scans beside other formulations, and append the rows.

    python benchmarks/ops.py [--no-peers | --peers NAME ...] [--profile] [--time T] [--repeats R]
    python benchmarks/ops.py --delta [--no-peers] [--profile]

On a GPU: our backends at the shape of the 1.3B model and the peers that can be imported, in
bfloat16; rows go to <gpu>.csv. With --delta: the delta rule beside fla's, instead of the scan.
On a CPU: the torch backend of the scan and of the delta rule, each beside a textbook form; rows go
to cpu.csv. `flash_frac/bench/ops.py` describes how each is checked and timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from flash_frac.bench.delta import DELTA
from flash_frac.bench.ops import ON_CPU, SCAN, measure_cpu, measure_operations, print_profile
from flash_frac.bench.peers import OP_PEERS
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.bench.timing import exit_if_ours_failed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--time", type=int, default=4096, help="number of tokens, on a CPU")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs, on a CPU")
    parser.add_argument("--profile", action="store_true", help="print kernel times, no rows")
    parser.add_argument("--delta", action="store_true", help="time the delta rule, on a GPU")
    add_options(parser, peers=OP_PEERS)
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    if (options.profile or options.delta) and not torch.cuda.is_available():
        parser.error("--profile and --delta need a GPU")
    subject = DELTA if options.delta else SCAN
    if options.profile:
        for sizes in subject.sizes:
            print_profile(sizes, subject)
        return
    keep = row_keeper(__file__, typed, options)
    failures: list[str] = []
    if torch.cuda.is_available():
        peers = [] if options.no_peers else [x for x in options.peers if x in subject.peers]
        for sizes in subject.sizes:
            keep(measure_operations(sizes, failures, subject=subject, peers=peers))
    else:
        for operator in ON_CPU:
            keep(measure_cpu(operator, options.time, options.repeats))
    exit_if_ours_failed(failures)


if __name__ == "__main__":
    main()
