"""Perplexity and recall against length, for mixed models trained at 4K: 30M parameters without
embeddings.

    python -m experiments.mixed_models.run --corpus data/rfc_tokens [--models frac_delta ...]
    python -m experiments.mixed_models.run --corpus data/rfc_tokens --measure-only runs/CHECKPOINT

Corpus, training and measurements are those of experiments/long_documents. A model's rows go to
results.csv when it is done; a model that has rows, and with --save a checkpoint, is not trained
again. --measure-only trains nothing: it evaluates checkpoints of --save with attention temperatures
that they were not trained with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.language_model import CausalModel
from experiments.long_documents import study
from experiments.long_documents.run import LENGTHS, STEPS
from experiments.mixed_models.models import (
    DESIGNS,
    LibraryModel,
    growing_window,
    make_config,
    make_model,
)
from experiments.table import Table, out_folder, parse_options
from experiments.training import Schedule
from flash_frac.files import read_object
from flash_frac.models import FracConfig, FracForCausalLM

HERE = Path(__file__).parent
# Up to twice the distance of experiments/long_documents.
DISTANCES = [2**n for n in range(8, 17)]
SLOPES = (0.06, 0.12, 0.24)
"""Slopes of attention temperatures; by default, a model trained at 4,096 tokens has 0.12."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--distances", nargs="*", type=int, default=DISTANCES)
    parser.add_argument("--questions", type=int, default=128, help="questions per distance")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--measure-only", nargs="+", type=Path, help="checkpoints of --save")
    parser.add_argument("--slopes", nargs="*", type=float, default=SLOPES, help="none: as trained")
    study.add_options(parser, steps=STEPS)
    smoke = study.SMOKE | {"distances": [64, 256], "questions": 4}
    return parse_options(parser, arguments, smoke)


def save_checkpoint(folder: Path, model: LibraryModel, facts: dict) -> None:
    """Save a trained model, with the first columns of its rows."""
    model.model.save_pretrained(folder)
    study.write_facts(folder, facts)


def train(options: argparse.Namespace, table: Table, protocol: study.Protocol) -> None:
    """Train and measure all models that the table does not have."""

    def make(name: str, seed: int) -> CausalModel:
        config = make_config(DESIGNS[name], protocol.corpus.vocab_size, smoke=options.smoke)
        model = make_model(config, seed)
        print(f"{name}: {len(config.mixer_types)} layers, MLP {config.mlp_intermediate_size}")
        return model

    def schedules(job: study.Job) -> Schedule | None:
        grows = DESIGNS[job.model].grows
        return growing_window(job.steps, protocol.train_length) if grows else None

    def keep(job: study.Job, model: CausalModel, facts: dict) -> None:
        if options.save is not None:
            assert isinstance(model, LibraryModel)
            save_checkpoint(job.checkpoint(options.save), model, facts)

    def kept(job: study.Job) -> bool:
        return study.has_checkpoint(job, options.save)

    jobs = study.make_jobs(options, options.models)
    study.run(jobs, make, table, protocol, keep, kept, schedules)


def check_checkpoints(folders: Sequence[Path], *, warm: bool) -> None:
    """SystemExit naming the first folder that cannot be measured; `warm` with temperatures."""
    for folder in folders:
        if not (folder / study.FACTS).exists():
            raise SystemExit(
                f"--measure-only must name checkpoints of --save, got {folder}, which has no "
                f"{study.FACTS}"
            )
        config = FracConfig.from_pretrained(folder)
        if warm and "attention" not in (config.mixer_types or ()):
            raise SystemExit(
                f"--measure-only {folder} has no full attention, whose temperature --slopes "
                "changes; leave it out, or give --slopes no value"
            )
        if warm and config.attention_temperature_length is not None:
            raise SystemExit(
                f"--measure-only {folder} was trained with a temperature, which --slopes would "
                "replace; leave it out, or give --slopes no value"
            )


def measure_again(options: argparse.Namespace, table: Table, protocol: study.Protocol) -> None:
    """Measure checkpoints with each slope; the model name in their rows includes the slope."""
    check_checkpoints(options.measure_only, warm=bool(options.slopes))
    for folder in options.measure_only:
        facts = read_object(
            folder / study.FACTS, {"model": str, "lr": float, "seed": int, "steps": int}
        )
        facts |= protocol.made_with
        names = {f"{facts['model']}_temperature_{slope:g}": slope for slope in options.slopes}
        for name, slope in names.items() or ((facts["model"], None),):
            job = study.Job(name, facts["lr"], facts["seed"], facts["steps"])
            if not study.is_missing(job, table, protocol):
                continue
            fields = {}
            if slope is not None:
                fields["attention_temperature_length"] = protocol.train_length
                fields["attention_temperature_slope"] = slope
            model = LibraryModel(FracForCausalLM.from_pretrained(folder, **fields))
            rows = study.measured_rows(model.to(protocol.device), facts | {"model": name}, protocol)
            study.add_rows(table, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    protocol = study.make_protocol(options, options.distances, options.questions)
    table = study.results(out_folder(options, HERE))
    if options.measure_only:
        measure_again(options, table, protocol)
    else:
        train(options, table, protocol)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
