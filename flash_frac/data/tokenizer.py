"""Tokenizers: two built-in ones (bytes, DNA), and any other through `AutoTokenizer`.

Once saved, the built-in ones are ordinary `tokenizers` files, so a trained model needs flash-frac
for its weights but not for its tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Bytes come after <pad>, <bos> and <eos>.
FIRST_BYTE = 3
# HyenaDNA's numbering, so that its vocabulary and ours agree.
DNA_SPECIAL = ["[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]"]
DNA_LETTERS = "ACGTN"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """UTF-8 bytes: <pad> 0, <bos> 1, <eos> 2, byte b at 3 + b; 259 ids, without a download.

    Any text survives a round trip; a literal "<eos>" in the text is five bytes, never the token.

    Example: `byte_tokenizer()("hi").input_ids == [3 + 104, 3 + 105]`
    """
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    vocabulary |= {letter: FIRST_BYTE + byte for byte, letter in enumerate(_byte_letters())}
    # Without merges, byte-pair encoding stops at the bytes.
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def dna_tokenizer() -> PreTrainedTokenizerFast:
    """DNA letters with HyenaDNA's ids: A 7, C 8, G 9, T 10, N 11; any other letter is [UNK] 6.

    Lower case is read as upper case. [SEP] 1 ends a sequence; encoding adds no special tokens.

    Example: `dna_tokenizer()("acgX").input_ids == [7, 8, 9, 6]`
    """
    names = [*DNA_SPECIAL, *DNA_LETTERS]
    vocabulary = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]", fuse_unk=False))
    core.normalizer = normalizers.Sequence(
        [normalizers.Replace(letter.lower(), letter) for letter in DNA_LETTERS]
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(DNA_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        bos_token="[BOS]",
        mask_token="[MASK]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def load_tokenizer(name: str, *, needs_eos: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer "bytes" or "dna", or a folder or hub id through `AutoTokenizer`.

    Write "./bytes" for a folder of that name. Training needs a tokenizer with an eos token, which
    ends each document.

    Example: `load_tokenizer("bytes").eos_token_id == 2`
    """
    if name == "bytes":
        return byte_tokenizer()
    if name == "dna":
        return dna_tokenizer()
    # Imported here because it imports the models.
    from flash_frac.models.loading import find_checkpoint, reason_of

    try:
        found = find_checkpoint(name, argument="tokenizer", needs_config=False)
        tokenizer = AutoTokenizer.from_pretrained(found.name, **found.options)
    # Each kind of tokenizer file fails with its own exception, but the remedy is the same.
    except Exception as error:
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: expected 'bytes', 'dna', a folder with "
            "tokenizer.json, or a reachable hub id (a private one needs a login). "
            f"The error was: {reason_of(error)}"
        ) from error
    if needs_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no eos token, which is needed to end each document: set one "
            "(tokenizer.eos_token = ...), save it with save_pretrained and name that folder"
        )
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id plus one: the smallest vocab_size of a model (ids may have gaps).

    Example: `vocabulary_size(byte_tokenizer()) == 259`
    """
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer does not fit a model of `vocab_size` tokens.

    Example: `check_vocabulary(byte_tokenizer(), 264)`
    """
    needed = vocabulary_size(tokenizer)
    if needed > vocab_size:
        raise ValueError(
            f"the tokenizer has {needed} tokens, but the model's vocab_size is {vocab_size}: "
            f"set vocab_size to {needed} or more, or choose a smaller tokenizer"
        )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that determines the ids of a text, wherever the tokenizer comes from.

    Special tokens added before or after a text do not count.

    Example: `tokenizer_hash(byte_tokenizer()) != tokenizer_hash(dna_tokenizer())`
    """
    digest = hashlib.sha256(str(tokenizer.eos_token_id).encode())
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Truncation and padding are leftovers of the last call.
        content |= {"truncation": None, "padding": None, "post_processor": None}
        digest.update(json.dumps(content, sort_keys=True).encode())
        return digest.hexdigest()
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    facts = [type(tokenizer).__name__, tokenizer.get_vocab(), added]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    # Merges and sentencepiece models are only in files, which not every tokenizer has.
    with tempfile.TemporaryDirectory() as folder, suppress(NotImplementedError):
        for name in sorted(tokenizer.save_vocabulary(folder)):
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _byte_letters() -> list[str]:
    """The printable character that represents each byte in a byte-level vocabulary.

    Printable bytes represent themselves; the others get code points from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: 256 + i for i, byte in enumerate(hidden)}
    return [chr(stand_in.get(byte, byte)) for byte in range(256)]
