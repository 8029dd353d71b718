"""Train a tokenizer on the documents and tokenise them, so that reading them needs only numpy.

    python -m experiments.frac_mini.prepare [--vocab-size 4096] [--data data/frac-mini]

Reads the documents of `fetch` and writes to the folder
- `tokenizer`: byte-level BPE of the training documents, in the format of transformers;
- `train.npy`, `validation.npy`, `test.npy`: (S,) uint16, an eos token after each document;
- `corpus.json`: documents, bytes and tokens of each split, and the sources of the text.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.frac_mini.clean import Document
from experiments.frac_mini.fetch import DATA, DOCUMENTS
from flash_frac.data import Encoder, load_tokenizer
from flash_frac.files import read_object, read_objects, write_json

SPLITS = ("train", "validation", "test")
VOCABULARY = 4096
SPECIAL = ["<pad>", "<bos>", "<eos>"]


class Corpus(NamedTuple):
    """Token ids of the three splits, (S,) uint16 each, and the content of corpus.json."""

    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    test: NDArray[np.uint16]
    facts: dict[str, Any]

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of the text per token; the end of a document is a token, but no byte."""
        counts = self.facts["splits"][split]
        return counts["bytes"] / counts["tokens"]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with <pad> 0, <bos> 1 and <eos> 2; any text round-trips."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size must be at most the {core.get_vocab_size()} tokens that the text has "
            f"merges for, got {vocab_size}; use more text or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def read_documents(path: Path) -> list[Document]:
    """The documents of `fetch`."""
    if not path.exists():
        raise SystemExit(f"{path} must exist; run python -m experiments.frac_mini.fetch")
    rows = read_objects(path, dict.fromkeys(Document._fields, str))
    return [Document(**row) for row in rows]


def write_corpus(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Write tokenizer and tokens; corpus.json comes last, so its presence means whole files.

    Example: `write_corpus(DATA, read_documents(DOCUMENTS), 4096)`
    """
    parts = {name: [d.text for d in documents if d.split == name] for name in SPLITS}
    if missing := [name for name, texts in parts.items() if not texts]:
        raise ValueError(f"documents must have all of {', '.join(SPLITS)}, got no {missing[0]}")
    tokenizer = train_tokenizer(parts["train"], vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder, counts = Encoder(tokenizer), {}
    for name, texts in parts.items():
        rows = [np.append(ids, encoder.eos_token_id) for ids in encoder.encode(texts)]
        tokens = np.concatenate(rows).astype(np.uint16)
        np.save(folder / f"{name}.npy", tokens)
        counts[name] = {
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(tokens),
        }
    sources = Counter()
    for document in documents:
        sources[document.name.partition("/")[0]] += len(document.text.encode())
    held_out = {name: [d.name for d in documents if d.split == name] for name in SPLITS[1:]}
    facts = {"vocab_size": vocab_size, "splits": counts, "bytes_of_sources": sources}
    write_json(folder / "corpus.json", facts | {"held_out": held_out})


def read_corpus(folder: Path) -> Corpus:
    """Read the tokens of a folder written by `write_corpus`."""
    if not (folder / "corpus.json").exists():
        raise SystemExit(
            f"{folder} must hold corpus.json; run python -m experiments.frac_mini.prepare"
        )
    facts = read_object(folder / "corpus.json", {"vocab_size": int, "splits": dict})
    parts = [np.load(folder / f"{name}.npy") for name in SPLITS]
    for name, tokens in zip(SPLITS, parts, strict=True):
        expected = facts["splits"][name]["tokens"]
        if len(tokens) != expected:
            raise ValueError(
                f"{folder / name}.npy must hold {expected} tokens, got {len(tokens)}; make or copy "
                "it again"
            )
    return Corpus(*parts, facts=facts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--documents", type=Path, default=DOCUMENTS)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--vocab-size", type=int, default=VOCABULARY)
    options = parser.parse_args(arguments)
    write_corpus(options.data, read_documents(options.documents), options.vocab_size)
    # Loaded like the tokenizer of a trained model.
    load_tokenizer(str(options.data / "tokenizer"))
    corpus = read_corpus(options.data)
    for name in SPLITS:
        counts = corpus.facts["splits"][name]
        print(
            f"{name}: {counts['documents']} documents, {counts['bytes']:,} bytes, "
            f"{counts['tokens']:,} tokens, {corpus.bytes_per_token(name):.3f} bytes per token"
        )


if __name__ == "__main__":
    main()
