"""What a text begins with, in training, evaluation, generation and serving alike.

The rule: the tokens that the tokenizer of a checkpoint itself puts before a text, a bos token or
nothing. A recipe may change it (`add_bos_token`), and the tokenizer that is saved has the change.
"""

from __future__ import annotations

from typing import Any


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text: as a rule [bos], or none.

    Example: `beginning(AutoTokenizer.from_pretrained("quickstart/final")) == []`
    """
    whole, text = _ids(tokenizer), _ids(tokenizer, add_special_tokens=False)
    if not text:
        return [token for token in whole if token == tokenizer.bos_token_id][:1]
    starts = (n for n in range(len(whole)) if whole[n : n + len(text)] == text)
    return whole[: next(starts, 0)]


def _ids(tokenizer: Any, **options: bool) -> list[int]:
    """The ids of any text that the tokenizer can read."""
    try:
        return list(tokenizer("a", **options)["input_ids"])
    # By a vocabulary of other things than letters; tokenizers have no narrower error.
    except Exception:
        return list(tokenizer("", **options)["input_ids"])


def set_beginning(tokenizer: Any, add_bos_token: bool | None) -> None:
    """Let a tokenizer put its bos token before a text, or nothing; None leaves it as it is.

    Example: `set_beginning(tokenizer, True)`
    """
    if add_bos_token is None:
        return
    if add_bos_token and tokenizer.bos_token_id is None:
        raise ValueError(
            "add_bos_token is true, but the tokenizer has no bos token: set it to false, or give "
            "the tokenizer one (tokenizer.bos_token = ...), save it and name its folder"
        )
    wanted = [tokenizer.bos_token_id] if add_bos_token else []
    if beginning(tokenizer) == wanted:
        return
    tokenizer.add_bos_token = add_bos_token
    if beginning(tokenizer) != wanted:
        raise ValueError(
            f"add_bos_token is {str(add_bos_token).lower()}, but {type(tokenizer).__name__} begins "
            f"texts with {beginning(tokenizer)} all the same: leave add_bos_token out, or use a "
            "tokenizer with a tokenizer.json"
        )
