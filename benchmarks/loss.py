"""Time the fused head and loss beside other libraries, and append the rows.

    python benchmarks/loss.py [--no-peers]

Peers, if they can be imported: liger-kernel, also with float32 accumulation, which ours always has;
cut-cross-entropy; and torch's own two steps. Needs a GPU; rows go to <gpu>.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from flash_frac.bench.loss import measure_losses
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.bench.timing import exit_if_ours_failed


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--no-peers", action="store_true", help="time only our code")
    add_options(parser)
    options = parser.parse_args(typed)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    keep = row_keeper(__file__, typed, options)
    failures: list[str] = []
    for row in measure_losses(failures, peers=not options.no_peers):
        keep([row])
    exit_if_ours_failed(failures)


if __name__ == "__main__":
    main()
