"""Parametrisations of the Frac layer: perplexity up to 64K, and how each uses its bank.

    python -m experiments.parametrisation.run --corpus data/rfc_tokens [--variants rw_norm ...]

Corpus, training and perplexity are those of experiments/long_documents. A model's rows go to
memory.csv and results.csv when it is done; a model that has rows, and with --save a checkpoint, is
not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.language_model import CausalModel
from experiments.long_documents import study
from experiments.long_documents.run import LENGTHS, STEPS
from experiments.mixed_models.models import LibraryModel, make_config, make_model
from experiments.mixed_models.run import save_checkpoint
from experiments.parametrisation import memory
from experiments.parametrisation.variants import MODELS, VARIANTS, design
from experiments.table import out_folder, parse_options

HERE = Path(__file__).parent


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    study.add_options(parser, steps=STEPS)
    # One seed shows which variants deserve more.
    parser.set_defaults(seeds=[0])
    return parse_options(parser, arguments, study.SMOKE)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    protocol = study.make_protocol(options)
    folder = out_folder(options, HERE)
    table, memories = study.results(folder), memory.results(folder)
    tokens = memory.held_out_row(protocol.corpus.held_out, protocol.train_length)

    def make(name: str, seed: int) -> CausalModel:
        config = make_config(design(name), protocol.corpus.vocab_size, smoke=options.smoke)
        return make_model(config, seed)

    def keep(job: study.Job, model: CausalModel, facts: dict) -> None:
        assert isinstance(model, LibraryModel)
        if options.save is not None:
            save_checkpoint(job.checkpoint(options.save), model, facts)
        memories.append(memory.memory_rows(model.model, tokens, facts))

    def kept(job: study.Job) -> bool:
        measured = any(key[: len(job)] == tuple(map(str, job)) for key in memories.rows)
        return measured and study.has_checkpoint(job, options.save)

    # Models innermost, so that an interrupted run has each variant in both models.
    names = [f"{model}.{variant}" for variant in options.variants for model in options.models]
    study.run(study.make_jobs(options, names), make, table, protocol, keep, kept)
    print(f"{table.path}: {len(table.rows)} rows")
    print(f"{memories.path}: {len(memories.rows)} rows")


if __name__ == "__main__":
    main()
