"""Train frac-mini and a Gated DeltaNet of its size side by side, and keep the best of frac-mini.

    python -m experiments.frac_mini.run --out FOLDER [--minutes 8] [--data data/frac-mini]

Needs torch, transformers and numpy, and the tokens of `prepare`. After each part of the training,
the weights, rounded to bfloat16, are evaluated on the validation documents. Those with the fewest
bits per byte so far are saved at once and evaluated on the test documents, which influence nothing.
A run that is cut off leaves its best model. FOLDER holds
- `model`: config.json, generation_config.json and model.safetensors of frac-mini;
- `curve.csv`: bits per byte of training and validation by step, for both models;
- `results.json`: the measurements, all settings that determine them, and whether the run finished.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.frac_mini.fetch import DATA
from experiments.frac_mini.models import FIELDS, dropping_out, make_config, make_model
from experiments.frac_mini.prepare import Corpus, read_corpus
from experiments.language_model import CausalModel, loss, num_parameters, token_losses
from experiments.mixed_models.models import LibraryModel
from experiments.table import Table, made_with
from experiments.training import Optimisation, Training, train_side_by_side, training_device
from flash_frac.files import write_files, write_json

EOS = 2
COLUMNS = ("model", "step", "epochs", "train", "validation", "seconds")
# A third of the steps of a speed measurement.
PACE_STEPS = 20
# Tokens read at once in evaluation.
TOKENS_AT_ONCE = 2**16
# Share of --minutes for training; the rest is for evaluating and saving.
TRAINING_SHARE = 0.94


@dataclass
class Run:
    """One model in training.

    Attributes:
        rounded: a copy in bfloat16, with the weights that were last evaluated.
        best: its entry in results.json, at the best step so far; empty before the first.
    """

    name: str
    training: Training
    rounded: LibraryModel
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> LibraryModel:
        assert isinstance(self.training.model, LibraryModel)
        return self.training.model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Training settings; results.json records all of them."""

    epochs: float
    measurements: int
    length: int
    batch_size: int
    lr: float
    weight_decay: float
    dropout: float
    seed: int
    smoke: bool

    def steps(self, num_tokens: int) -> int:
        return max(1, round(self.epochs * num_tokens / (self.batch_size * self.length)))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--data", type=Path, default=DATA, help="folder written by prepare.py")
    parser.add_argument("--minutes", type=float, help="time limit; reduces the epochs to fit")
    parser.add_argument("--epochs", type=float, default=24)
    parser.add_argument("--measurements", type=int, default=24, help="number of validations")
    parser.add_argument("--length", type=int, default=4096, help="tokens per training row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit to record if git is not available")
    parser.add_argument("--smoke", action="store_true", help="tiny models, for a test on a CPU")
    options = parser.parse_args(arguments)
    names = Plan.__dataclass_fields__
    return options, Plan(**{name: getattr(options, name) for name in names})


def random_starts(num_tokens: int, plan: Plan) -> Tensor:
    """Start positions of the rows of each step, (steps, batch).

    Each epoch is cut at its own offset, so that a token's position in its row varies.
    """
    steps, generator = plan.steps(num_tokens), torch.Generator().manual_seed(plan.seed)
    num_rows = (num_tokens - 1) // plan.length - 1
    if num_rows < plan.batch_size:
        raise SystemExit(
            f"--batch-size {plan.batch_size} rows of --length {plan.length} need more than the "
            f"{num_tokens} tokens of the text; use smaller values"
        )
    starts = []
    while sum(map(len, starts)) < steps * plan.batch_size:
        offset = torch.randint(plan.length, (1,), generator=generator)
        starts.append(offset + plan.length * torch.randperm(num_rows, generator=generator))
    return torch.cat(starts)[: steps * plan.batch_size].view(steps, plan.batch_size)


def make_run(name: str, plan: Plan, corpus: Corpus, device: torch.device) -> Run:
    """A model before its first step."""
    tokens = torch.from_numpy(corpus.train.astype(np.int32)).to(device)
    window = torch.arange(plan.length + 1, device=device)

    def loss_at(model: nn.Module, starts: Tensor, _: Tensor) -> Tensor:
        rows = tokens[starts + window]
        return loss(model, rows[:, :-1], rows[:, 1:])

    starts = random_starts(len(corpus.train), plan)
    rows, order = starts.flatten()[:, None].to(device), torch.arange(starts.numel())
    config = make_config(name, corpus.facts["vocab_size"], smoke=plan.smoke)
    optimisation = Optimisation(
        lr=plan.lr,
        steps=len(starts),
        batch_size=plan.batch_size,
        weight_decay=plan.weight_decay,
        warmup=0.05,
        clip=1.0,
        bfloat16=device.type == "cuda",
    )
    model = make_model(config, plan.seed).to(device)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    training = Training(model, loss_at, rows, rows, order.view(starts.shape), optimisation)
    return Run(name, training, rounded)


def bits_per_byte(model: CausalModel, corpus: Corpus, split: str, length: int) -> float:
    """Bits per byte of a split, including ends of documents, read in windows of `length`."""
    text = getattr(corpus, split).astype(np.int64)
    # Each window starts with the token before it, the first one with an eos token.
    ids = torch.from_numpy(np.concatenate([[EOS], text]))
    whole = (len(ids) - 1) // length
    rows = ids[: whole * length + 1].unfold(0, length + 1, length) if whole else ids[:0]
    parts = [*rows.split(max(1, TOKENS_AT_ONCE // length))] if whole else []
    if (len(ids) - 1) % length:
        parts.append(ids[whole * length :][None])
    half = model.lm_head.weight.is_cuda
    with torch.autocast(model.lm_head.weight.device.type, torch.bfloat16, half):
        nats = sum(token_losses(model, part, length).double().sum().item() for part in parts)
    return nats / math.log(2) / corpus.facts["splits"][split]["bytes"]


def evaluate(run: Run, plan: Plan, corpus: Corpus) -> tuple[float, bool]:
    """Bits per byte of the validation documents now; whether they are the fewest so far."""
    # Evaluation waits for its result, so this copy has ended before training goes on.
    run.rounded.load_state_dict(run.model.state_dict())
    found = bits_per_byte(run.rounded, corpus, "validation", plan.length)
    if not found < run.best.get("validation", math.inf):
        return found, False
    run.best = {
        "parameters": num_parameters(run.rounded),
        "steps": run.training.optimisation.steps,
        "best_step": run.training.taken,
        "validation": found,
        "test": bits_per_byte(run.rounded, corpus, "test", plan.length),
    }
    return found, True


def train(
    runs: Sequence[Run], plan: Plan, corpus: Corpus, table: Table, improved: Callable[[Run], None]
) -> None:
    """Train side by side; call `improved` with a run whenever it is better than before."""
    every = math.ceil(runs[0].training.optimisation.steps / plan.measurements)
    per_token = 1 / math.log(2) / corpus.bytes_per_token("train")
    begin = time.perf_counter()

    def after(training: Training) -> bool:
        run = next(run for run in runs if run.training is training)
        found, better = evaluate(run, plan, corpus)
        recent = training.losses[max(0, training.taken - every) : training.taken].mean().item()
        row = {
            "model": run.name,
            "step": training.taken,
            "epochs": round(training.taken * plan.batch_size * plan.length / len(corpus.train), 3),
            "train": round(recent * per_token, 5),
            "validation": round(found, 5),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        table.append([row])
        print(*(f"{key} {value}" for key, value in row.items()), flush=True)
        if better:
            improved(run)
        return not math.isfinite(recent)

    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(dropping_out(run.model, plan.dropout))
        train_side_by_side([run.training for run in runs], after=after, every=every)


def epochs_that_fit(plan: Plan, minutes: float, corpus: Corpus, device: torch.device) -> float:
    """The plan's epochs, or as many as fit into the time, estimated from a few steps."""
    begin, tokens = time.perf_counter(), plan.batch_size * plan.length
    short = replace(plan, epochs=3 * PACE_STEPS * tokens / len(corpus.train))
    runs = [make_run(name, short, corpus, device) for name in FIELDS]
    times: list[float] = []

    def after(_: Training) -> bool:
        times.append(time.perf_counter())
        return False

    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(dropping_out(run.model, plan.dropout))
        train_side_by_side([run.training for run in runs], after=after, every=PACE_STEPS)
    # The first third compiles kernels and captures graphs; so does the first evaluation.
    seconds = (times[-1] - times[len(runs) - 1]) / (2 * PACE_STEPS)
    measuring = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for run in runs:
            run.best = {}
            evaluate(run, plan, corpus)
        measuring = time.perf_counter() - start
    left = TRAINING_SHARE * 60 * minutes - (time.perf_counter() - begin)
    fitting = (left - plan.measurements * measuring) / seconds * tokens / len(corpus.train)
    print(f"{seconds:.4f} s per step: {fitting:.1f} epochs fit", flush=True)
    if fitting < 1:
        raise SystemExit(f"--minutes {minutes:g} is too short for one epoch; use more")
    return min(plan.epochs, math.floor(fitting))


def save(model: LibraryModel, folder: Path) -> None:
    """Save a model; at any time, each file in the folder is complete."""
    with TemporaryDirectory() as draft:
        model.model.save_pretrained(draft)
        write_files(folder, {path.name: path.read_bytes() for path in Path(draft).iterdir()})


def main(arguments: Sequence[str] | None = None) -> None:
    options, plan = parse(arguments)
    begin, device, corpus = time.perf_counter(), training_device(), read_corpus(options.data)
    versions = made_with(options.commit, ("commit", "machine", "torch", "transformers"))
    table = Table(options.out / "curve.csv", COLUMNS, num_key=2)
    if table.rows:
        raise SystemExit(f"{table.path} exists; choose another folder with --out")
    # For dropout.
    torch.manual_seed(plan.seed)
    if options.minutes is not None:
        epochs = epochs_that_fit(plan, options.minutes, corpus, device)
        plan = replace(plan, epochs=epochs)
    runs = [make_run(name, plan, corpus, device) for name in FIELDS]

    def write_results(*, finished: bool) -> None:
        found = {
            "models": {run.name: run.best for run in runs if run.best},
            "plan": asdict(plan),
            "seconds": round(time.perf_counter() - begin, 1),
            "finished": finished,
            **versions,
        }
        write_json(options.out / "results.json", found)

    def improved(run: Run) -> None:
        if run is runs[0]:
            save(run.rounded, options.out / "model")
        write_results(finished=False)

    train(runs, plan, corpus, table, improved)
    for run in runs:
        if not run.best:
            raise SystemExit(f"{run.name}: the loss was never finite; use a smaller --lr")
    write_results(finished=True)
    for run in runs:
        row = run.best
        print(f"{run.name}: test {row['test']:.4f} bits per byte, best at step {row['best_step']}")


if __name__ == "__main__":
    main()
