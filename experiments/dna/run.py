"""Train DNA models at several lengths and test each at its own; each run is a results.csv row.

    python -m experiments.dna.run [--models M ...] [--lengths L ...] [--lrs LR ...] [--smoke]

Every model sees the same number of tokens, in batches of the same size in tokens, at every length.
Existing rows are not run again, and each row is saved as soon as its run ends. The default genome
comes from experiments.dna.fetch; HG38 is --fasta hg38.ml.fa --bed human-sequences.bed --mode
hyenadna. --smoke trains tiny models on any machine, into a temporary folder unless --out names one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.dna.data import (
    INTERVAL,
    PAD,
    SPLITS,
    A,
    Genome,
    Interval,
    RowSettings,
    T,
    make_rows,
    read_bed,
    read_fasta,
    split_by_position,
    targets_of,
)
from experiments.dna.designs import make_design
from experiments.dna.protocol import COLUMNS, KEY, Job, Protocol, parse
from experiments.dna.summary import best_rows, lines
from experiments.language_model import LanguageModel, loss, make_model, num_parameters, token_losses
from experiments.table import Table, made_with, out_folder
from experiments.training import (
    Optimisation,
    Training,
    shuffled_order,
    train_side_by_side,
    training_device,
)

HERE = Path(__file__).parent
# Tokens evaluated at once, over all rows and of one row; longer rows are read in pieces.
_TOKENS_AT_ONCE, _PIECE = 2**17, 2**16


class Arrays(NamedTuple):
    """Rows of one length: training inputs and targets (strands N, L - 1); whole rows for tests."""

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    test: Tensor


class Scores(NamedTuple):
    """Perplexity over all targets and over the bases A, C, G and T, and the number of bases."""

    ppl: float
    base_ppl: float
    num_tokens: int


def make_arrays(
    genome: Genome,
    splits: dict[str, list[Interval]],
    settings: RowSettings,
    protocol: Protocol,
    device: torch.device,
) -> Arrays:
    """The rows of all splits; in training the second strand follows the first."""
    made = {split: make_rows(genome, found, settings) for split, found in splits.items()}
    for split, rows in made.items():
        if not len(rows):
            raise ValueError(
                f"length {settings.length} leaves no row of the {split} split; choose a shorter "
                "one, --mode hyenadna, or more data"
            )
    train = made["train"]
    if protocol.strands == 2:
        other = make_rows(genome, splits["train"], settings, other_strand=True)
        train = np.concatenate([train, other])
    return Arrays(
        torch.from_numpy(train[:, :-1]).to(device),
        torch.from_numpy(targets_of(train)).to(device),
        *(torch.from_numpy(some_rows(made[name], protocol.eval_tokens)) for name in SPLITS[1:]),
    )


def some_rows(rows: np.ndarray, max_tokens: int) -> np.ndarray:
    """Evenly spread rows of at most this many tokens in total (at least one row); 0 for all."""
    if not max_tokens:
        return rows
    every = -(-rows.size // max_tokens)
    return np.ascontiguousarray(rows[::every])


def row_order(num_rows: int, steps: int, batch_size: int, strands: int, seed: int) -> Tensor:
    """Row indices of each step, (steps, batch_size); a random strand each time if there are two."""
    order = shuffled_order(num_rows // strands, steps, batch_size, seed)
    if strands == 1:
        return order
    coin = torch.Generator().manual_seed(seed + 1)
    return order + num_rows // 2 * torch.randint(2, order.shape, generator=coin)


def make_training(job: Job, data: Arrays, protocol: Protocol) -> Training:
    """Training of a new model with the job's seed; all models see rows in the same order."""
    plan = Optimisation(
        lr=job.lr,
        steps=protocol.steps,
        batch_size=protocol.batch_size(job.length),
        weight_decay=protocol.weight_decay,
        warmup=protocol.warmup,
        clip=protocol.clip,
        bfloat16=data.inputs.is_cuda,
    )
    model = make_model(make_design(job.model, protocol.core, small=protocol.small), job.seed)
    order = row_order(len(data.inputs), plan.steps, plan.batch_size, protocol.strands, job.seed)
    model = model.to(data.inputs.device)
    return Training(model, loss, data.inputs, data.targets, order, plan)


def score(model: LanguageModel, rows: Tensor) -> Scores:
    """Perplexities of the rows (N, L); [PAD] is not scored."""
    device = model.lm_head.weight.device
    # Summed loss and count, of all targets and of the bases among them.
    sums = torch.zeros(2, 2, dtype=torch.float64, device=device)
    for part in rows.split(max(1, _TOKENS_AT_ONCE // rows.shape[1])):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = token_losses(model, part, _PIECE).double()
        targets = part[:, 1:].to(device)
        for i, asked in enumerate((targets != PAD, (targets >= A) & (targets <= T))):
            sums[i, 0] += (losses * asked).sum()
            sums[i, 1] += asked.sum()
    every, bases = (total / count for total, count in sums.tolist())
    return Scores(_exp(every), _exp(bases), int(sums[0, 1]))


def _exp(mean_loss: float) -> float:
    # The loss of a diverged model is NaN, or its exponential overflows.
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def make_row(job: Job, training: Training, data: Arrays, protocol: Protocol) -> dict[str, Any]:
    """The columns that a finished run fills in, except for its training seconds."""
    start = time.perf_counter()
    model = training.model
    assert isinstance(model, LanguageModel)
    valid, test = score(model, data.valid), score(model, data.test)
    return dict(zip(KEY, job.key(protocol), strict=True)) | {
        "valid_ppl": round(valid.ppl, 6),
        "test_ppl": round(test.ppl, 6),
        "valid_base_ppl": round(valid.base_ppl, 6),
        "test_base_ppl": round(test.base_ppl, 6),
        "test_tokens": test.num_tokens,
        "train_loss": round(training.losses[-max(1, protocol.steps // 10) :].mean().item(), 6),
        "parameters": num_parameters(model),
        "evaluate_s": round(time.perf_counter() - start, 1),
    }


def train_together(
    jobs: Sequence[Job], data: Arrays, protocol: Protocol, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Train jobs on the same rows side by side; pass the result row of each to `keep`."""
    start = time.perf_counter()
    trainings = [make_training(job, data, protocol) for job in jobs]
    train_side_by_side(trainings)
    train_s = round(time.perf_counter() - start, 1)
    for job, training in zip(jobs, trainings, strict=True):
        keep(make_row(job, training, data, protocol) | {"train_s": train_s})


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=len(KEY))


def load(options: argparse.Namespace) -> tuple[Genome, dict[str, list[Interval]]]:
    """The genome, and the intervals of its splits."""
    if not options.fasta.exists():
        raise SystemExit(
            f"--fasta {options.fasta} does not exist; run python -m experiments.dna.fetch"
        )
    genome = read_fasta(options.fasta)
    if options.bed is not None:
        return genome, read_bed(options.bed)
    return genome, split_by_position(genome, size=512 if options.smoke else INTERVAL)


def main(arguments: Sequence[str] | None = None) -> None:
    options, protocol = parse(__doc__.splitlines()[0], arguments)
    table, device = results(out_folder(options, HERE)), training_device(options.device)
    facts = made_with(options.commit)

    def keep(row: dict[str, Any]) -> None:
        table.append([row | facts])
        shown = (*KEY[6:], "valid_ppl", "test_ppl", "train_s", "evaluate_s")
        print(*(row[name] for name in shown), flush=True)

    loaded = None
    for length in options.lengths:
        jobs = [
            job
            for model, lr, seed in product(options.models, options.lrs, options.seeds)
            if (job := Job(model, length, lr, seed)).key(protocol) not in table
        ]
        if not jobs:
            continue
        loaded = loaded or load(options)
        settings = protocol.rows._replace(length=length)
        data = make_arrays(*loaded, settings, protocol, device)
        for start in range(0, len(jobs), options.at_once):
            train_together(jobs[start : start + options.at_once], data, protocol, keep)
    print("\n".join(lines(best_rows(table.rows.values()))))


if __name__ == "__main__":
    main()
