"""The tokens at the start of a text, the same in training, evaluation, generation and serving.

A text starts with whatever the checkpoint's tokenizer adds: a bos token or nothing. A recipe can
change that (`add_bos_token`), and the saved tokenizer keeps the change.
"""

from __future__ import annotations

from typing import Any


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer adds before a text: usually [bos] or none.

    Example: `beginning(AutoTokenizer.from_pretrained("quickstart/final")) == []`
    """
    whole, text = _ids(tokenizer), _ids(tokenizer, add_special_tokens=False)
    if not text:
        return [token for token in whole if token == tokenizer.bos_token_id][:1]
    starts = (n for n in range(len(whole)) if whole[n : n + len(text)] == text)
    return whole[: next(starts, 0)]


def _ids(tokenizer: Any, **options: bool) -> list[int]:
    """The ids of a text that the tokenizer can encode."""
    try:
        return list(tokenizer("a", **options)["input_ids"])
    # Some vocabularies have no letters, and tokenizers raise no narrower error.
    except Exception:
        return list(tokenizer("", **options)["input_ids"])


def set_beginning(tokenizer: Any, add_bos_token: bool | None) -> None:
    """Make a tokenizer start texts with its bos token, or without; None leaves it unchanged.

    Example: `set_beginning(tokenizer, True)`
    """
    if add_bos_token is None:
        return
    if add_bos_token and tokenizer.bos_token_id is None:
        raise ValueError(
            "add_bos_token is true, but the tokenizer has no bos token: set it to false, or add "
            "one to the tokenizer (tokenizer.bos_token = ...), save it and name its folder"
        )
    wanted = [tokenizer.bos_token_id] if add_bos_token else []
    if beginning(tokenizer) == wanted:
        return
    tokenizer.add_bos_token = add_bos_token
    if beginning(tokenizer) != wanted:
        raise ValueError(
            f"add_bos_token is {str(add_bos_token).lower()}, but {type(tokenizer).__name__} still "
            f"starts texts with {beginning(tokenizer)}: leave add_bos_token out, or use a "
            "tokenizer with a tokenizer.json"
        )
