"""Encode documents as token ids in batches, and select the held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from flash_frac.beginning import beginning
from flash_frac.data.tokenizer import (
    DNA_LETTERS,
    DNA_SPECIAL,
    FIRST_BYTE,
    byte_tokenizer,
    dna_tokenizer,
    tokenizer_hash,
    vocabulary_size,
)

# Longer documents are tokenised in pieces, because tokenizers need some hundred bytes per token.
PIECE_CHARACTERS = 1 << 18
# Enough to keep the tokenizer's threads busy, in bounded memory.
BATCH_CHARACTERS = 1 << 22


class Encoder:
    """Encodes documents as ids: each starts as the tokenizer starts a text, and ends with eos.

    Special tokens are never read from the text: a literal "<eos>" is encoded as its letters.
    The built-in tokenizers use a table lookup on the UTF-8 bytes, with the same result. For any
    other, a document of more than 262,144 characters is cut (after a line end if there is one);
    there, a tokenizer that looks across lines may choose other tokens.

    Example: `Encoder(byte_tokenizer()).encode(["hi"])` is one array, [107, 108].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise ValueError(
                "tokenizer has no eos token, which is needed to end each document: set "
                "tokenizer.eos_token to one of its tokens"
            )
        self.tokenizer = tokenizer
        self.eos_token_id = eos
        self.beginning = beginning(tokenizer)
        self.hash = tokenizer_hash(tokenizer)
        size = vocabulary_size(tokenizer)
        self.dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
        self._table = _tables().get(self.hash)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text without special tokens, in the smallest dtype for the vocabulary."""
        if self._table is not None:
            return [_look_up(self._table, text) for text in texts]
        ids = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return [np.asarray(row, self.dtype) for row in ids]  # pyright: ignore[reportGeneralTypeIssues]

    def encode_documents(
        self, documents: Iterable[tuple[bool, str]], *, batch_characters: int = BATCH_CHARACTERS
    ) -> Iterator[tuple[bool, np.ndarray, bool]]:
        """Encode a stream of documents in order, in bounded memory.

        Args:
            documents: pairs of a mark, which is passed through, and a text; see `mark_held_out`.
            batch_characters: how much text to collect for one call of the tokenizer.

        Returns:
            triples (mark, ids, ends): a long document yields several; the first has the special
            tokens that start a text, the last ends with eos and has `ends` True.
        """
        pieces: list[str] = []
        facts: list[tuple[bool, bool, bool]] = []
        size = 0
        for mark, text in documents:
            for number, (piece, ends) in enumerate(_cut(text)):
                pieces.append(piece)
                facts.append((mark, number == 0, ends))
                size += len(piece)
                if size >= batch_characters:
                    yield from self._flush(pieces, facts)
                    pieces, facts, size = [], [], 0
        if pieces:
            yield from self._flush(pieces, facts)

    def _flush(
        self, pieces: list[str], facts: list[tuple[bool, bool, bool]]
    ) -> Iterator[tuple[bool, np.ndarray, bool]]:
        begin, eos = (np.array(x, self.dtype) for x in (self.beginning, [self.eos_token_id]))
        for ids, (mark, begins, ends) in zip(self.encode(pieces), facts, strict=True):
            yield mark, np.concatenate([begin[: begins * len(begin)], ids, eos[: int(ends)]]), ends


def is_held_out(text: str, *, seed: int, share: float) -> bool:
    """Whether a document is held out for evaluation: hash(seed, text) / 2^64 < share.

    This depends only on the text and the seed. Adding or reordering documents does not move the
    others, and equal documents stay together.

    Example: `is_held_out("some text", seed=0, share=0.0)` is False for every text.
    """
    if share <= 0:
        return False
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def digest_of(text: str) -> bytes:
    """A 16-byte digest of a text, to find duplicates.

    Example: `digest_of("a") == digest_of("a") != digest_of("b")`
    """
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def mark_held_out(
    documents: Iterable[str], *, seed: int, share: float
) -> Iterator[tuple[bool, str]]:
    """Yield each document with whether it is held out.

    Example: `[text for held, text in mark_held_out(texts, seed=0, share=0.1) if not held]`
    """
    for text in documents:
        yield is_held_out(text, seed=seed, share=share), text


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """Pieces of a text, and whether each is the last."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        stop = start + PIECE_CHARACTERS
        line_end = text.rfind("\n", start + PIECE_CHARACTERS // 2, stop)
        space = text.rfind(" ", start + PIECE_CHARACTERS // 2, stop)
        # Many tokenizers join a space to the word after it.
        stop = line_end + 1 if line_end >= 0 else space if space >= 0 else stop
        yield text[start:stop], False
        start = stop
    yield text[start:] if start else text, True


def _look_up(table: np.ndarray, text: str) -> np.ndarray:
    ids = table[np.frombuffer(text.encode(), np.uint8)]
    # Only the DNA table skips bytes: a character of several bytes is one unknown letter.
    if table[0x80] == _SKIP and not text.isascii():
        ids = ids[ids != _SKIP]
    return ids


_SKIP = np.iinfo(np.uint16).max


@cache
def _tables() -> dict[str, np.ndarray]:
    """Lookup tables (256,) from bytes to ids, by the hash of their tokenizer."""
    dna = np.full(256, DNA_SPECIAL.index("[UNK]"), "<u2")
    for i, letter in enumerate(DNA_LETTERS):
        dna[[ord(letter), ord(letter.lower())]] = len(DNA_SPECIAL) + i
    # UTF-8 continuation bytes.
    dna[0x80:0xC0] = _SKIP
    plain = np.arange(FIRST_BYTE, FIRST_BYTE + 256).astype("<u2")
    return {tokenizer_hash(byte_tokenizer()): plain, tokenizer_hash(dna_tokenizer()): dna}
