"""Tokenise a corpus once, so that training needs only numpy to read it.

    python -m experiments.long_documents.prepare data/rfc.jsonl data/tokenizer-32k data/rfc_tokens

The documents, from experiments/rfc/prepare.py, are split and joined as in experiments/rfc: 2% are
held out by a hash of their text, and an eos token follows each. --train-tokens drops the last
training tokens, for a machine that takes only small files.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.long_documents.corpus import Corpus, write_corpus
from experiments.long_documents.recall import find_phrases
from flash_frac.data import DataArguments, Encoder, load_tokenizer, prepare

HELD_OUT, SPLIT_SEED = 0.02, 0


def make_corpus(documents: Path, tokenizer_name: str, train_tokens: int | None) -> Corpus:
    """The documents of a file, tokenised; the vocabulary has at most 65,536 tokens."""
    tokenizer = load_tokenizer(tokenizer_name)
    encoder = Encoder(tokenizer)
    if encoder.dtype.itemsize > 2:
        raise ValueError(
            f"tokenizer must have at most 65,536 tokens, got {tokenizer_name!r} with "
            f"{len(tokenizer)}; choose a smaller one"
        )
    phrases = find_phrases(lambda text: encoder.encode([text])[0].tolist())
    with tempfile.TemporaryDirectory() as cache:
        arguments = DataArguments(
            data_files=[str(documents)],
            tokenizer=tokenizer_name,
            held_out=HELD_OUT,
            cache_dir=cache,
        )
        splits = prepare(arguments, tokenizer, seed=SPLIT_SEED)
        held_out = splits.held_out
        assert held_out is not None
        count = min(splits.train.num_tokens, train_tokens or splits.train.num_tokens)
        return Corpus(
            splits.train.tokens(0, count).astype(encoder.dtype),
            held_out.tokens(0, held_out.num_tokens).astype(encoder.dtype),
            held_out.num_documents,
            max(tokenizer.get_vocab().values()) + 1,
            phrases,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("documents", type=Path, help="a .jsonl file with the field text")
    parser.add_argument("tokenizer", help="a folder, or 'bytes'")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train-tokens", type=int, help="most training tokens; default all")
    options = parser.parse_args(arguments)
    corpus = make_corpus(options.documents, options.tokenizer, options.train_tokens)
    write_corpus(options.out, corpus)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} of "
        f"{corpus.held_out_documents} documents held out; {size / 1e6:.1f} MB in {options.out}"
    )


if __name__ == "__main__":
    main()
