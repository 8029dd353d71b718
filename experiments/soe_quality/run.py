"""Errors of banks of M exponentials against fractional relaxation, by order α.

    python -m experiments.soe_quality.run [--variants NAME ...] [--out FOLDER] [--smoke]

For each variant below, number of modes M, window of s and order α, one row of results.csv has

    error = max_s |E_α(-s^α) - Σ_m c_m exp(-s/τ_m)|

on a logarithmic grid ten times finer than the one on which c was fitted. Existing rows are not
recomputed, and each row is saved as soon as it is known. --smoke computes a few rows on a coarse
grid, into a temporary folder unless --out names one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.table import Table, add_run_options, made_with, out_folder
from flash_frac.ops import log_prior
from flash_frac.theory import (
    PAPER_ALPHAS,
    PAPER_WINDOW,
    geometric_bank,
    minimax_fit,
    named_bank,
    optimise_bank,
    sup_error,
)

HERE = Path(__file__).parent
MADE_WITH = ("commit", "python", "numpy", "scipy", "torch")
COLUMNS = ("variant", "modes", "window", "alpha", "error", "seconds", *MADE_WITH)
# W1 is the paper's window; W2 has a margin on both sides.
WINDOWS = {"W1": PAPER_WINDOW, "W2": (1e-2, 1e6)}
# Ends of the best geometric bank of 16 modes under the simplex constraint, for each window: lowest
# mean error over the 90 orders, on a grid of ends a quarter octave apart.
BEST_RANGE = {"W1": (0.42, 1.76e5), "W2": (0.0025, 1.3e7)}

Array = NDArray[np.float64]


class Task(NamedTuple):
    """Input of a variant: M, the order, the name of the window, and the size of its grid."""

    modes: int
    alpha: float
    window: str
    num_points: int


class Bank(NamedTuple):
    """Timescales and coefficients, (M,) each."""

    tau: Array
    c: Array


class Variant(NamedTuple):
    """A way to choose a bank, and the numbers of modes M and windows to try it with."""

    build: Callable[[Task], Bank]
    modes: tuple[int, ...] = (16,)
    windows: tuple[str, ...] = ("W1", "W2")


def fitted(tau: Array, task: Task, constraint: str = "simplex") -> Bank:
    """The best coefficients of a given bank, on the window of the task."""
    window = WINDOWS[task.window]
    fit = minimax_fit(
        tau, task.alpha, window=window, constraint=constraint, num_points=task.num_points
    )
    return Bank(tau, fit.c)


def free_nodes(task: Task) -> Bank:
    """Timescales fitted to each order, by descents from the bank shared by all orders."""
    tau = named_bank(f"{task.window}_M{task.modes}_simplex")
    # Perturbed, because a descent may find no first step at the shared optimum.
    tau[0] *= 0.8
    best = math.inf
    # Each restarts with a wide trust region, to escape from where the last one stalled.
    for _ in range(6):
        found = optimise_bank(
            task.modes,
            window=WINDOWS[task.window],
            alphas=[task.alpha],
            start=tau,
            num_points=task.num_points // 2,
        )
        tau = found.tau
        if found.mean_error > 0.9 * best:
            break
        best = found.mean_error
    return fitted(tau, task)


def with_prior(tau: Array, task: Task, prior: str) -> Bank:
    """The layer's initial weights: the softmax of its prior, with nothing fitted."""
    alpha = torch.tensor(task.alpha, dtype=torch.float64)
    log_tau = torch.from_numpy(np.log(tau))
    return Bank(tau, log_prior(alpha, log_tau, prior).softmax(-1).numpy())


VARIANTS = {
    "paper": Variant(lambda task: fitted(geometric_bank(task.modes), task), modes=(8, 16, 32)),
    "paper_sum_le_1": Variant(
        lambda task: fitted(geometric_bank(task.modes), task, "sum_le_1"), modes=(8, 16, 32)
    ),
    "best_range": Variant(
        lambda task: fitted(geometric_bank(task.modes, *BEST_RANGE[task.window]), task)
    ),
    "shared_W1": Variant(
        lambda task: fitted(named_bank(f"W1_M{task.modes}_simplex"), task), modes=(8, 16)
    ),
    "shared_W1_sum_le_1": Variant(
        lambda task: fitted(named_bank(f"W1_M{task.modes}_sum_le_1"), task, "sum_le_1")
    ),
    "shared_W2": Variant(lambda task: fitted(named_bank(f"W2_M{task.modes}_simplex"), task)),
    "free_nodes": Variant(free_nodes),
    "prior_asymptotic": Variant(
        lambda task: with_prior(geometric_bank(task.modes), task, "asymptotic")
    ),
    "prior_exact": Variant(lambda task: with_prior(geometric_bank(task.modes), task, "exact")),
    "prior_exact_W2": Variant(
        lambda task: with_prior(named_bank(f"W2_M{task.modes}_simplex"), task, "exact")
    ),
}


def key_of(variant: str, task: Task) -> tuple[str, ...]:
    """Key of a row, as text in the CSV."""
    return (variant, str(task.modes), task.window, f"{task.alpha:.2f}")


def results(folder: Path) -> Table:
    """The table of a folder; variant, modes, window and alpha identify a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=4)


def tasks(
    names: Iterable[str], alphas: Iterable[float], num_points: int
) -> Iterator[tuple[str, Task]]:
    """Variant and task of every row of the given variants."""
    for name in names:
        for window in VARIANTS[name].windows:
            for modes in VARIANTS[name].modes:
                for alpha in alphas:
                    yield name, Task(modes, float(alpha), window, num_points)


def measure(variant: str, task: Task) -> dict[str, str]:
    """The row of one task."""
    start = time.perf_counter()
    bank = VARIANTS[variant].build(task)
    seconds = time.perf_counter() - start
    low, high = WINDOWS[task.window]
    error = sup_error(np.geomspace(low, high, 10 * task.num_points + 1), *bank, task.alpha)
    values = (*key_of(variant, task), f"{error:.6e}", f"{seconds:.2f}")
    return dict(zip(COLUMNS, values, strict=False))


def summary(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """For each variant, window and M: the mean and the largest error over the orders."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        groups.setdefault((row["variant"], row["window"], row["modes"]), []).append(
            float(row["error"])
        )
    for (variant, window, modes), errors in groups.items():
        yield (
            f"{variant:20} {window} M {modes:>2}  mean {np.mean(errors):.3e}"
            f"  max {np.max(errors):.3e}  over {len(errors)} orders"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_run_options(parser, smoke="three orders on a coarse grid")
    options = parser.parse_args(arguments)
    table, facts = results(out_folder(options, HERE)), made_with(options.commit, MADE_WITH)
    alphas, num_points = ((0.1, 0.5, 0.9), 200) if options.smoke else (PAPER_ALPHAS, 2000)
    todo = [
        (name, task)
        for name, task in tasks(options.variants, alphas, num_points)
        if key_of(name, task) not in table
    ]
    print(f"{len(todo)} rows to compute, {len(table.rows)} in {table.path}", flush=True)
    for name, task in todo:
        table.append([measure(name, task) | facts])
    print("\n".join(summary(table.rows.values())))


if __name__ == "__main__":
    main()
