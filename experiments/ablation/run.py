"""Perplexity of Frac without each of its parts, on the RFCs, at the training length and at 16K.

    python -m experiments.ablation.run --corpus data/rfc_tokens [--variants baseline alpha_1 ...]

The corpus, the training and the held-out documents are those of experiments/long_documents. A
variant's rows go to results.csv when it is done; a variant that has rows is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.ablation.variants import VARIANTS, make_variant
from experiments.language_model import LanguageModel
from experiments.long_documents import study
from experiments.long_documents.run import STEPS
from experiments.table import out_folder, parse_options

HERE = Path(__file__).parent
LENGTHS = [4096, 16384]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    study.add_options(parser, steps=STEPS)
    return parse_options(parser, arguments, study.SMOKE)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    protocol = study.make_protocol(options)

    def make(name: str, seed: int) -> LanguageModel:
        vocab_size = protocol.corpus.vocab_size
        return make_variant(name, seed, vocab_size=vocab_size, smoke=options.smoke)

    table = study.results(out_folder(options, HERE))
    study.run(study.make_jobs(options, options.variants), make, table, protocol)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
