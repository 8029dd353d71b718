"""Train the models of MADLab on its tasks, over a sweep and seeds; each run is a results.csv row.

    python -m experiments.madlab.run [--tasks T ...] [--models M ...] [--preset paper] [--smoke]

Every row has the scores of the last epoch and of the one with the lowest test perplexity, so
presets that differ only in the score share their runs. Existing rows are not run again, and each
row is saved as soon as its run ends. --smoke trains tiny models on any machine, into a temporary
folder unless --out names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.language_model import num_parameters
from experiments.madlab.metric import Accuracy
from experiments.madlab.model import DESIGNS, make_model
from experiments.madlab.settings import PRESETS, Protocol
from experiments.madlab.summary import best_scores, lines
from experiments.madlab.tasks import IGNORE, TASKS, TaskSettings, generate
from experiments.table import Table, add_run_options, made_with, out_folder
from experiments.training import (
    Optimisation,
    Recorded,
    Training,
    shuffled_order,
    train_side_by_side,
)

HERE = Path(__file__).parent
KEY = ("task", "model", "lr_schedule", "epochs", "lr", "weight_decay", "seed")
SCORES = ("batch_macro", "macro", "micro", "ppl")
COLUMNS = (
    *KEY,
    *(f"{epoch}_{score}" for epoch in ("last", "best") for score in SCORES),
    *("epochs_run", "parameters", "seconds", "commit", "machine", "torch"),
)
# Batches of test sequences read at a time, to keep a GPU busy.
_BATCHES_READ = 4


class Job(NamedTuple):
    """Key of a run, in the order of KEY."""

    task: str
    model: str
    lr_schedule: str
    epochs: int
    lr: float
    weight_decay: float
    seed: int


class Arrays(NamedTuple):
    """Sequences of a task on the device, (N, T) each."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


class EpochScores(NamedTuple):
    """Test scores after an epoch; ppl is the mean over batches, as in the official logs."""

    batch_macro: float
    macro: float
    micro: float
    ppl: float


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the scored tokens of a batch."""
    return _cross_entropy(model(inputs), targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def evaluate(
    model: nn.Module, num_classes: int, inputs: Tensor, targets: Tensor, protocol: Protocol
) -> Tensor:
    """`EpochScores` on the test sequences, batch by batch, as a tensor on the device."""
    size, losses = protocol.batch_size, []
    accuracy = Accuracy(num_classes)
    read = _BATCHES_READ * size
    for rows, answers in zip(inputs.split(read), targets.split(read), strict=True):
        half = protocol.bfloat16
        # Without autocast's cache, whose casts would outlive the graph that made them.
        with torch.autocast(inputs.device.type, torch.bfloat16, half, cache_enabled=False):
            logits = model(rows)
        for part, target in zip(logits.split(size), answers.split(size), strict=True):
            accuracy.update(part.argmax(-1), target)
            losses.append(_cross_entropy(part, target))
    ppl = torch.stack(losses).exp().mean()
    return torch.stack([accuracy.batch_mean(), accuracy.macro(), accuracy.micro(), ppl])


class Run:
    """A running job: its training, and the scores of all epochs so far."""

    def __init__(self, job: Job, task: TaskSettings, data: Arrays, protocol: Protocol) -> None:
        self.job, self.protocol = job, protocol
        self.scores: list[EpochScores] = []
        self.start = time.perf_counter()
        self.model = make_model(job.model, task, job.seed).to(data.train_inputs.device)
        steps = protocol.num_steps(len(data.train_inputs))
        optimisation = Optimisation(
            lr=job.lr,
            steps=steps,
            batch_size=protocol.batch_size,
            weight_decay=job.weight_decay,
            decay_all=True,
            schedule=protocol.lr_schedule,
            min_lr=protocol.min_lr,
            bfloat16=protocol.bfloat16,
        )
        self.training = Training(
            self.model,
            token_loss,
            data.train_inputs,
            data.train_targets,
            shuffled_order(len(data.train_inputs), steps, protocol.batch_size, job.seed),
            optimisation,
        )
        test = data.test_inputs, data.test_targets
        scores = partial(evaluate, self.model, task.vocab_size, *test, protocol)
        self.test = Recorded(scores, self.training.stream)

    def epoch_ended(self) -> bool:
        """Score the epoch; True if the run is good enough to stop."""
        self.scores.append(EpochScores(*self.test().tolist()))
        return self.scores[-1].batch_macro > self.protocol.stop_accuracy

    def row(self) -> dict[str, object]:
        """The columns that the run fills in."""
        best = min(self.scores, key=lambda scores: scores.ppl)
        row: dict[str, object] = dict(zip(KEY, self.job, strict=True))
        for epoch, scores in (("last", self.scores[-1]), ("best", best)):
            row |= {f"{epoch}_{k}": round(v, 6) for k, v in scores._asdict().items()}
        return row | {
            "epochs_run": len(self.scores),
            "parameters": num_parameters(self.model),
            "seconds": round(time.perf_counter() - self.start, 1),
        }


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=len(KEY))


def make_data(task: TaskSettings, seed: int, device: torch.device) -> Arrays:
    """The sequences of a task, drawn from a seed."""
    return Arrays(*(torch.from_numpy(array).to(device) for array in generate(task, seed)))


def train_together(
    runs: Sequence[Run], steps_per_epoch: int, keep: Callable[[dict[str, object]], None]
) -> None:
    """Train runs side by side; pass the row of each to `keep` as soon as it ends."""
    by_training = {run.training: run for run in runs}

    def epoch_ended(training: Training) -> bool:
        run = by_training[training]
        stop = run.epoch_ended()
        if stop or training.done:
            keep(run.row())
        return stop

    train_side_by_side(list(by_training), after=epoch_ended, every=steps_per_epoch)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Protocol]:
    """The options, and the protocol that they set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--models", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--lrs", nargs="+", type=float)
    parser.add_argument("--wds", nargs="+", type=float, dest="weight_decays")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--at-once", type=int, default=6, help="runs trained side by side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    protocol = PRESETS[options.preset]
    if options.smoke:
        protocol = dataclasses.replace(
            protocol, epochs=2, batch_size=16, lrs=(1e-3,), weight_decays=(0.0,), seeds=(0,),
            bfloat16=False,
        )  # fmt: skip
    given = {
        name: value if name == "epochs" else tuple(value)
        for name in ("seeds", "lrs", "weight_decays", "epochs")
        if (value := getattr(options, name)) is not None
    }
    return options, dataclasses.replace(protocol, **given)


def main(arguments: Sequence[str] | None = None) -> None:
    options, protocol = parse(arguments)
    table, facts = results(out_folder(options, HERE)), made_with(options.commit)

    def keep(row: dict[str, object]) -> None:
        table.append([row | facts])
        print(*(row[name] for name in (*KEY, "epochs_run", *COLUMNS[len(KEY) :][:4])), flush=True)

    for name, seed in product(options.tasks, protocol.seeds):
        task = TASKS[name]
        if options.smoke:
            task = dataclasses.replace(task, num_train=32, num_test=32)
        jobs = [
            Job(name, model, protocol.lr_schedule, protocol.epochs, *pair, seed)
            for model, pair in product(options.models, protocol.sweep)
        ]
        jobs = [job for job in jobs if job not in table]
        data = make_data(task, seed, torch.device(options.device)) if jobs else None
        for start in range(0, len(jobs), options.at_once):
            together = jobs[start : start + options.at_once]
            runs = [Run(job, task, data, protocol) for job in together]
            train_together(runs, task.num_train // protocol.batch_size, keep)
    print("\n".join(lines(best_scores(table.rows.values(), protocol))))


if __name__ == "__main__":
    main()
