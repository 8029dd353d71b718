"""Make the texts of the long evaluations from RFCs that the models were not trained on.

    python -m experiments.evaluation.texts ALL.jsonl DATA

ALL.jsonl holds all RFCs, written by experiments/rfc/prepare.py without --sample; DATA is the
--data-dir of `frac eval`. DATA/longppl/rfc.jsonl gets whole documents of at least 64K tokens, and
DATA/niah/paragraphs.txt paragraphs of prose from other documents, for haystacks.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.rfc.prepare import sample
from flash_frac.files import write_text

# RFCs of at least 65,536 tokens that are not in the sample and share few runs of words with it.
LONG = (9000, 5707, 9244, 8743, 8995, 8994, 8829, 8152, 8299, 8795, 4171, 9182)
RUN = 16
# Haystacks: total words, paragraphs per document, and words per paragraph.
NUM_WORDS, MOST_PARAGRAPHS, LEAST_WORDS = 75_000, 12, 50
_PLAIN = re.compile(r"[A-Za-z][a-z]*[,.;:)]?$|\(?[a-z]+[,.;:)]?$")
_LEAST_PLAIN = 0.93
# Boilerplate of every RFC.
_FURNITURE = re.compile(
    "Internet-Draft|Trust|copyright|Copyright|BCP 14|Task Force|Simplified BSD|errata|Status of"
)


def read_documents(path: Path) -> dict[int, str]:
    """Texts by RFC number."""
    with path.open(encoding="utf-8") as file:
        lines = map(json.loads, file)
        return {int(line["name"].removeprefix("rfc")): line["text"] for line in lines}


def prose(text: str) -> Iterator[str]:
    """Paragraphs that consist only of sentences, each as one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if len(words) < LEAST_WORDS or not words[-1].endswith("."):
            continue
        plain = sum(bool(_PLAIN.match(word)) for word in words)
        line = " ".join(words)
        if plain >= _LEAST_PLAIN * len(words) and not _FURNITURE.search(line):
            yield line


def haystack(documents: Mapping[int, str]) -> list[str]:
    """Distinct paragraphs, newest documents first."""
    found: list[str] = []
    num_words = 0
    for number in sorted(documents, reverse=True):
        paragraphs = list(prose(documents[number]))[:MOST_PARAGRAPHS]
        found += paragraphs
        num_words += sum(len(paragraph.split()) for paragraph in paragraphs)
        if num_words > NUM_WORDS:
            break
    return list(dict.fromkeys(found))


def runs_of_words(text: str) -> set[int]:
    """Hashes of all runs of RUN words."""
    words = text.split()
    return {hash(tuple(words[i : i + RUN])) for i in range(len(words) - RUN + 1)}


def shared(texts: Mapping[int, str], others: Mapping[int, str]) -> dict[int, float]:
    """For each text, the share of its runs of words that also occur in the others."""
    runs = {number: runs_of_words(text) for number, text in texts.items()}
    wanted = set().union(*runs.values())
    there: set[int] = set()
    for text in others.values():
        there |= wanted & runs_of_words(text)
    return {number: len(own & there) / len(own) for number, own in runs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("documents", type=Path, help="all RFCs, from experiments/rfc/prepare.py")
    parser.add_argument("data", type=Path, help="output folder, for `frac eval --data-dir`")
    options = parser.parse_args(arguments)
    documents = read_documents(options.documents)
    trained = {number: documents.pop(number) for number in sample(documents)}
    if missing := [number for number in LONG if number not in documents]:
        parser.error(
            f"documents must hold all RFCs: of those to read, {missing} are not in "
            f"{options.documents}; make it without --sample"
        )
    long = {number: documents.pop(number) for number in LONG}
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in long.values())
    write_text(options.data / "longppl" / "rfc.jsonl", "".join(lines))
    paragraphs = haystack(documents)
    write_text(options.data / "niah" / "paragraphs.txt", "\n\n".join(paragraphs) + "\n")
    for number, share in shared(long, trained).items():
        print(f"rfc{number}: {100 * share:.1f}% of its runs of {RUN} words are in the sample")
    print(f"{len(long)} documents and {len(paragraphs)} paragraphs in {options.data}")


if __name__ == "__main__":
    main()
