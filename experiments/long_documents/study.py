"""Train language models on one corpus by one protocol, and record measurements of each.

Shared by `experiments/long_documents`, `experiments/ablation`, `experiments/mixed_models` and
`experiments/parametrisation`: the protocol, the command-line options, and the rows of results.csv.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.language_model import CausalModel, loss
from experiments.long_documents.corpus import Corpus, read_corpus, toy_corpus, training_rows
from experiments.long_documents.measure import perplexity_rows, recall_rows
from experiments.long_documents.models import num_inner_parameters
from experiments.table import Table, add_run_options, made_with
from experiments.training import (
    Optimisation,
    Schedule,
    Training,
    shuffled_order,
    train_side_by_side,
    training_device,
)
from flash_frac.files import write_json

KEY = ("model", "lr", "seed", "steps", "measurement", "length")
COLUMNS = (
    *KEY,
    *("loss", "perplexity", "accuracy", "exact", "control_loss", "control_accuracy", "scored"),
    *("batch_size", "train_length", "train_loss", "parameters", "train_s", "measure_s"),
    *("commit", "machine", "torch"),
)
# Steps averaged in train_loss and in progress reports, and steps between reports.
_LAST_STEPS = 50
_REPORT_EVERY = 100
# The last file of a checkpoint.
FACTS = "facts.json"
SMOKE = {
    **{"seeds": [0], "lrs": [2e-3], "steps": 3},
    **{"batch_size": 4, "train_length": 64, "lengths": [64, 128]},
}
"""Options of a smoke test."""


class Job(NamedTuple):
    """A model to train; the fields are the first columns of its rows."""

    model: str
    lr: float
    seed: int
    steps: int

    def checkpoint(self, parent: Path) -> Path:
        """Its folder among the checkpoints of --save."""
        return parent / f"{self.model}-lr{self.lr:g}-seed{self.seed}-steps{self.steps}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings shared by all models of a run.

    Attributes:
        train_length, batch_size: tokens per training row, and rows per step.
        lengths: window lengths for perplexity.
        distances: of the planted facts; recall is not measured if empty.
        num_questions: per distance.
        max_tokens: most held-out tokens to score; all if None.
        at_once: models trained side by side.
    """

    corpus: Corpus
    device: torch.device
    train_length: int
    batch_size: int
    lengths: tuple[int, ...]
    distances: tuple[int, ...]
    num_questions: int
    max_tokens: int | None
    at_once: int
    bfloat16: bool
    made_with: dict[str, object]

    @property
    def measurements(self) -> list[tuple[str, int]]:
        """The last columns of KEY, for all rows of a model."""
        return [
            *(("perplexity", length) for length in self.lengths),
            *(("recall", distance) for distance in self.distances),
        ]


# Makes the model of a name and a seed, on the CPU.
Make = Callable[[str, int], CausalModel]
# Saves what rows do not have: called with the job, a trained model before it is measured, and the
# columns known by then.
Keep = Callable[[Job, CausalModel, dict[str, object]], None]
# Makes the schedule of changes to a job's model during training; None for no changes.
Schedules = Callable[[Job], Schedule | None]


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=len(KEY))


def optimisation(job: Job, protocol: Protocol) -> Optimisation:
    """AdamW as in experiments/rfc, except for its second beta, which is 0.999 here."""
    return Optimisation(
        lr=job.lr,
        steps=job.steps,
        batch_size=protocol.batch_size,
        weight_decay=0.1,
        warmup=0.05,
        clip=1.0,
        bfloat16=protocol.bfloat16,
    )


def train_rows(
    jobs: Sequence[Job],
    make: Make,
    protocol: Protocol,
    keep: Keep | None = None,
    schedules: Schedules = lambda job: None,
) -> Iterator[list[dict]]:
    """Train the jobs side by side, then yield the rows of each."""
    start = time.perf_counter()
    # For models that draw random numbers in training.
    torch.manual_seed(jobs[0].seed)
    data = training_rows(protocol.corpus.train, protocol.train_length)
    inputs, targets = (rows.to(protocol.device) for rows in data)
    trainings = [
        Training(
            make(job.model, job.seed).to(protocol.device),
            loss,
            inputs,
            targets,
            shuffled_order(len(inputs), job.steps, protocol.batch_size, job.seed),
            optimisation(job, protocol),
            schedules(job),
        )
        for job in jobs
    ]
    train_side_by_side(trainings, after=report)
    train_s = (time.perf_counter() - start) / len(jobs)
    for job, training in zip(jobs, trainings, strict=True):
        assert isinstance(training.model, CausalModel)
        facts = {
            **job._asdict(),
            "batch_size": protocol.batch_size,
            "train_length": protocol.train_length,
            "train_loss": round(training.losses[-_LAST_STEPS:].mean().item(), 5),
            "parameters": num_inner_parameters(training.model),
            "train_s": round(train_s, 1),
            **protocol.made_with,
        }
        if keep is not None:
            keep(job, training.model, facts)
        yield measured_rows(training.model, facts, protocol)


def measured_rows(model: CausalModel, facts: dict[str, object], protocol: Protocol) -> list[dict]:
    """The rows of a trained model; `facts` are the columns known without measuring."""
    return [dict.fromkeys(COLUMNS) | facts | row for row in measure(model, protocol)]


def report(training: Training) -> bool:
    """Print progress from time to time, to estimate the time of a run; never stops it."""
    if training.taken % _REPORT_EVERY == 0:
        recent = training.losses[training.taken - _LAST_STEPS : training.taken].mean().item()
        clock = time.strftime("%H:%M:%S")
        print(f"    {clock} step {training.taken}: loss {recent:.4f}", flush=True)
    return False


def measure(model: CausalModel, protocol: Protocol) -> list[dict]:
    """All measurements of a model."""
    start = time.perf_counter()
    with torch.autocast(protocol.device.type, torch.bfloat16, protocol.bfloat16):
        rows = [
            *perplexity_rows(
                model, protocol.corpus, protocol.lengths, max_tokens=protocol.max_tokens
            ),
            *recall_rows(
                model, protocol.corpus, protocol.distances, num_questions=protocol.num_questions
            ),
        ]
    seconds = round(time.perf_counter() - start, 1)
    return [{**row, "measure_s": seconds} for row in rows]


def run(
    jobs: Sequence[Job],
    make: Make,
    table: Table,
    protocol: Protocol,
    keep: Keep | None = None,
    kept: Callable[[Job], bool] = lambda job: True,
    schedules: Schedules = lambda job: None,
) -> None:
    """Run all jobs without rows in the table; each model's rows are added together.

    Args:
        keep, kept: what else to save of a model, and whether it is there; a job without it runs
            again, and its new rows replace the old ones.
    """
    jobs = [job for job in jobs if is_missing(job, table, protocol) or not kept(job)]
    for job in jobs:
        if not is_missing(job, table, protocol):
            print(f"{job.checkpoint(Path())} has rows but is not saved: trained again", flush=True)
    for start in range(0, len(jobs), protocol.at_once):
        together = jobs[start : start + protocol.at_once]
        for rows in train_rows(together, make, protocol, keep, schedules):
            add_rows(table, rows)


def is_missing(job: Job, table: Table, protocol: Protocol) -> bool:
    """Whether the table lacks a measurement of the job's model."""
    return any((*job, *kind) not in table for kind in protocol.measurements)


def write_facts(folder: Path, facts: dict[str, object]) -> None:
    """Complete a checkpoint with the first columns of its rows."""
    write_json(folder / FACTS, facts)


def has_checkpoint(job: Job, parent: Path | None) -> bool:
    """Whether the folder of --save, if there is one, has the complete checkpoint of a job."""
    return parent is None or (job.checkpoint(parent) / FACTS).exists()


def add_rows(table: Table, rows: Sequence[dict]) -> None:
    """Save the rows of a model, and print them."""
    table.append(rows)
    values = [f"{row['length']}:{row['perplexity'] or row['accuracy']}" for row in rows]
    first = rows[0]
    print(*(first[name] for name in (*Job._fields, "train_s", "measure_s")), flush=True)
    print("   ", *values, flush=True)


def add_options(parser: argparse.ArgumentParser, *, steps: int) -> None:
    """Add the options that these experiments share."""
    parser.add_argument("--corpus", type=Path, help="folder written by prepare.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step")
    parser.add_argument("--train-length", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, help="most held-out tokens to score; default all")
    parser.add_argument("--at-once", type=int, default=1, help="models trained side by side")
    add_run_options(parser)


def make_protocol(
    options: argparse.Namespace, distances: Sequence[int] = (), num_questions: int = 0
) -> Protocol:
    """The protocol set by the options, which must include `lengths`."""
    if options.corpus is None and not options.smoke:
        raise SystemExit(
            "--corpus must name a folder written by python -m experiments.long_documents.prepare; "
            "or use --smoke"
        )
    device = training_device()
    return Protocol(
        corpus=toy_corpus() if options.smoke else read_corpus(options.corpus),
        device=device,
        train_length=options.train_length,
        batch_size=options.batch_size,
        lengths=tuple(sorted(options.lengths)),
        distances=tuple(sorted(distances)),
        num_questions=num_questions,
        max_tokens=options.max_tokens,
        at_once=options.at_once,
        bfloat16=device.type == "cuda",
        made_with=made_with(options.commit),
    )


def make_jobs(options: argparse.Namespace, models: Sequence[str]) -> list[Job]:
    """Jobs with seeds outermost, so that an interrupted run has complete comparisons."""
    return [
        Job(model, lr, seed, options.steps)
        for seed, lr, model in product(options.seeds, options.lrs, models)
    ]
