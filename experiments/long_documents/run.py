"""Perplexity and recall against length, for models trained at 4K on the RFCs: 30M parameters
without embeddings.

    python -m experiments.long_documents.run --corpus data/rfc_tokens [--models frac mamba2 ...]

Each model reads the same rows in the same order. Its results go to results.csv when it is done; a
model that has results, and with --save a checkpoint, is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.language_model import CausalModel, LanguageModel, make_model
from experiments.long_documents import study
from experiments.long_documents.models import DESIGNS, fitted, save_frac
from experiments.table import out_folder, parse_options

HERE = Path(__file__).parent
LENGTHS = [2**n for n in range(10, 17)]
DISTANCES = [2**n for n in range(8, 16)]
# One epoch of 79.6M tokens in steps of 8 x 4,096.
STEPS = 2400


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--distances", nargs="*", type=int, default=DISTANCES)
    parser.add_argument("--questions", type=int, default=128, help="questions per distance")
    parser.add_argument("--save", type=Path, help="folder for checkpoints of the Frac models")
    study.add_options(parser, steps=STEPS)
    smoke = study.SMOKE | {"distances": [64, 256], "questions": 4}
    return parse_options(parser, arguments, smoke)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    protocol = study.make_protocol(options, options.distances, options.questions)

    def make(name: str, seed: int) -> LanguageModel:
        design = fitted(DESIGNS[name], protocol.corpus.vocab_size, smoke=options.smoke)
        return make_model(design, seed)

    def keep(job: study.Job, model: CausalModel, facts: dict) -> None:
        assert isinstance(model, LanguageModel)
        if options.save is not None and model.design.mixer == "frac":
            save_frac(model, job.checkpoint(options.save))
            study.write_facts(job.checkpoint(options.save), facts)

    def kept(job: study.Job) -> bool:
        return DESIGNS[job.model].mixer != "frac" or study.has_checkpoint(job, options.save)

    table = study.results(out_folder(options, HERE))
    study.run(study.make_jobs(options, options.models), make, table, protocol, keep, kept)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
