"""Run the trials, two at a time, and count them: `python -m tests.faults --seed 7`."""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.commands import CONTEXT
from tests.faults.trials import KINDS, run_trial, work_in


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="of an earlier run, to repeat it")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--number", type=int, help="the one trial of a kind with this number")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed} (repeat with: make test-faults SEED={seed})", flush=True)
    numbers = {
        kind: range(row.count) if options.number is None else [options.number]
        for kind, row in KINDS.items()
        if options.only in kind
    }
    sys.exit(run_all(seed, numbers))


def run_all(seed, numbers, processes=2) -> int:
    """Run trials by their kinds and numbers, and print what became of them; 1 if any lost."""
    began, faults, losses = time.time(), Counter(), Counter()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        ProcessPoolExecutor(processes, CONTEXT, work_in, (folder,)) as pool,
    ):
        waiting = {
            pool.submit(run_trial, kind, seed, number): (kind, number)
            for kind, some in numbers.items()
            for number in some
        }
        for done in as_completed(waiting):
            kind, number = waiting[done]
            faults[kind] += 1
            if (error := done.exception()) is not None:
                losses[kind] += 1
                print(f"LOST {kind}, number {number}: {_describe(error)}", flush=True)
    for kind in numbers:
        print(f"{kind:45} {faults[kind]:4d} faults {losses[kind]:4d} lost")
    lost = losses.total()
    print(f"{time.time() - began:.0f} s")
    print(f"{faults.total()} faults, {lost} lost" + (f" (seed {seed})" if lost else ""))
    return 1 if lost else 0


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


if __name__ == "__main__":
    main()
