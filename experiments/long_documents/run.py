"""Perplexity and recall against length, of models of 30M parameters trained at 4K on the RFCs.

    python -m experiments.long_documents.run --corpus data/rfc_tokens [--models frac mamba2 ...]

Each model reads the same rows in the same order. Its rows go to results.csv when it is done, and a
model that is there is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.language_model import CausalModel, LanguageModel, make_model
from experiments.long_documents import study
from experiments.long_documents.models import DESIGNS, fitted, save_frac
from experiments.table import out_folder

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
    parser.add_argument("--questions", type=int, default=128, help="for each distance")
    parser.add_argument("--save", type=Path, help="folder for checkpoints of the Frac models")
    study.add_options(parser, steps=STEPS)
    options = parser.parse_args(arguments)
    if options.smoke:
        study.shrink(options)
        options.distances, options.questions = [64, 256], 4
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    protocol = study.make_protocol(options, options.distances, options.questions)

    def make(name: str, seed: int) -> LanguageModel:
        design = fitted(DESIGNS[name], protocol.corpus.vocab_size, smoke=options.smoke)
        return make_model(design, seed)

    def keep(facts: dict, model: CausalModel) -> None:
        if options.save is not None and facts["model"] == "frac":
            assert isinstance(model, LanguageModel)
            save_frac(model, options.save / f"frac-lr{facts['lr']:g}-seed{facts['seed']}")

    table = study.results(out_folder(options, HERE))
    study.run(study.make_jobs(options, options.models), make, table, protocol, keep)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
