"""The heavy-tail probe: train at 512 tokens, evaluate at up to 128K.

    python -m experiments.heavy_tail.run [--models NAME ...] [--gammas G ...] [--seeds S ...]

Each row of results.csv is the accuracy of one trained model (or fixed kernel) at one length.
Existing rows are skipped; rows of a model are saved as soon as it is evaluated. On a GPU several
models train side by side. --smoke takes a minute on a CPU, in a temporary folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.heavy_tail.data import Law, draw
from experiments.heavy_tail.kernels import accuracies, yardsticks
from experiments.heavy_tail.model import DESIGNS, Probe
from experiments.language_model import num_parameters
from experiments.table import Table, add_run_options, made_with, out_folder, parse_options
from experiments.training import Optimisation, Training, train_side_by_side, training_device

HERE = Path(__file__).parent
LENGTHS = (512, 2048, 8192, 16384, 32768, 65536, 131072)
# Seed of the evaluation sequences, shared by all models; training uses the model's seed.
EVALUATION_SEED = 1_000_003
COLUMNS = (
    *("model", "gamma", "seed", "length", "accuracy", "sequences", "parameters", "steps", "lr"),
    *("loss", "train_s", "evaluate_s", "commit", "machine", "torch"),
)
# Tokens embedded at once in evaluation, over all rows.
_TOKENS_AT_ONCE = 2**19


class Job(NamedTuple):
    """One model to train."""

    model: str
    gamma: float
    seed: int


class Protocol(NamedTuple):
    """Settings shared by all models of a run."""

    lengths: tuple[int, ...]
    train_length: int
    num_sequences: int
    optimisation: Optimisation
    device: torch.device
    made_with: dict


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), labels.long())


def make_training(job: Job, protocol: Protocol) -> Training:
    """Training of a new model with the job's seed; it sees each sequence once."""
    plan = protocol.optimisation
    num = plan.steps * plan.batch_size
    tokens, labels = training_data(job.seed, num, protocol.train_length, job.gamma)
    torch.manual_seed(job.seed)
    model = Probe(DESIGNS[job.model]).to(protocol.device)
    order = torch.arange(num).view(plan.steps, plan.batch_size)
    data = (x.to(protocol.device) for x in (tokens, labels))
    return Training(model, loss_of, *data, order, plan)


@lru_cache(maxsize=4)
def training_data(seed: int, num: int, length: int, gamma: float) -> tuple[Tensor, Tensor]:
    tokens, labels = draw(seed, num, length, Law(gamma=gamma))
    return torch.from_numpy(tokens), torch.from_numpy(labels)


@lru_cache(maxsize=len(LENGTHS))
def evaluation_data(num: int, length: int, gamma: float) -> tuple[Tensor, Tensor]:
    tokens, labels = draw(EVALUATION_SEED, num, length, Law(gamma=gamma))
    return torch.from_numpy(tokens), torch.from_numpy(labels)


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, labels: Tensor, device: torch.device) -> float:
    """Accuracy, from 0 to 1."""
    length = tokens.shape[1] - 1
    piece = min(length, 8192)
    right = 0
    for part, label in zip(
        tokens.split(_TOKENS_AT_ONCE // piece),
        labels.split(_TOKENS_AT_ONCE // piece),
        strict=True,
    ):
        logits = model(part.to(device), piece)
        right += int((logits.argmax(-1) == label.to(device)).sum())
    return right / len(labels)


def train_rows(jobs: Sequence[Job], protocol: Protocol) -> Iterator[list[dict]]:
    """Train the jobs side by side, then yield the rows of each."""
    start = time.perf_counter()
    trainings = [make_training(job, protocol) for job in jobs]
    train_side_by_side(trainings)
    train_s = time.perf_counter() - start
    for job, training in zip(jobs, trainings, strict=True):
        model = training.model.eval()
        loss = training.losses[-100:].mean().item()
        rows = []
        for length in protocol.lengths:
            start = time.perf_counter()
            data = evaluation_data(protocol.num_sequences, length, job.gamma)
            rows.append(
                make_row(job, length, accuracy(model, *data, protocol.device), protocol)
                | {
                    "parameters": num_parameters(model),
                    "steps": protocol.optimisation.steps,
                    "lr": protocol.optimisation.lr,
                    "loss": f"{loss:.4f}",
                    "train_s": f"{train_s / len(jobs):.1f}",
                    "evaluate_s": f"{time.perf_counter() - start:.1f}",
                }
            )
        yield rows


def make_row(job: Job, length: int, right: float, protocol: Protocol) -> dict:
    """A row with the columns that fixed kernels have too."""
    return dict.fromkeys(COLUMNS) | {
        **job._asdict(),
        "length": length,
        "accuracy": f"{right:.4f}",
        "sequences": protocol.num_sequences,
        **protocol.made_with,
    }


def kernel_rows(gamma: float, protocol: Protocol) -> list[dict]:
    """Rows of the fixed kernels, on the same sequences as the models; their seed is 0."""
    by_length = {}
    for length in protocol.lengths:
        sequences = draw(EVALUATION_SEED, protocol.num_sequences, length, Law(gamma=gamma))
        by_length[length] = accuracies(sequences, gamma)
    return [
        make_row(Job(name, gamma, 0), length, right, protocol)
        for name, along in yardsticks(by_length).items()
        for length, right in along.items()
    ]


def results(folder: Path) -> Table:
    """The table of a folder; model, gamma, seed and length identify a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=4)


def run(
    jobs: Sequence[Job], gammas: Sequence[float], table: Table, at_once: int, p: Protocol
) -> None:
    """Run all jobs that the table does not have yet."""

    def missing(job: Job) -> bool:
        return any((*job, length) not in table for length in p.lengths)

    for gamma in gammas:
        if missing(Job("sum", gamma, 0)):
            table.append(kernel_rows(gamma, p))
    jobs = [job for job in jobs if missing(job)]
    for start in range(0, len(jobs), at_once):
        for rows in train_rows(jobs[start : start + at_once], p):
            table.append(rows)
            right = " ".join(f"{100 * float(row['accuracy']):.1f}" for row in rows)
            name, gamma, seed = (rows[0][column] for column in ("model", "gamma", "seed"))
            print(f"{name} gamma={gamma} seed={seed} loss={rows[0]['loss']}: {right}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=list(DESIGNS))
    parser.add_argument("--gammas", nargs="+", type=float, default=[0.1, 0.5])
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=list(range(10)), help="none: only fixed kernels"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--train-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sequences", type=int, default=2000, help="sequences per length")
    parser.add_argument("--at-once", type=int, default=8, help="models trained side by side")
    add_run_options(parser)
    smoke = {
        **{"gammas": [0.1], "seeds": [0], "lengths": [64], "train_length": 64},
        **{"steps": 5, "batch_size": 8, "sequences": 64},
    }
    return parse_options(parser, arguments, smoke)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    optimisation = Optimisation(
        lr=options.lr,
        steps=options.steps,
        batch_size=options.batch_size,
        weight_decay=0.01,
        warmup=0.05,
        min_lr=1e-5,
        clip=1.0,
    )
    protocol = Protocol(
        lengths=tuple(sorted(options.lengths)),
        train_length=options.train_length,
        num_sequences=options.sequences,
        optimisation=optimisation,
        device=training_device(),
        made_with=made_with(options.commit),
    )
    jobs = [
        Job(model, gamma, seed)
        for gamma in options.gammas
        for seed in options.seeds
        for model in options.models
    ]
    table = results(out_folder(options, HERE))
    run(jobs, options.gammas, table, options.at_once, protocol)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
