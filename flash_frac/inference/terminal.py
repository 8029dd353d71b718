"""The terminal of `frac chat`: a banner, line editing, and a persistent history."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_frac.inference.conversation import Conversation, converse

_MOST_LINES = 1000


def talk(conversation: Conversation) -> None:
    """Chat on standard input; a terminal also gets a banner and line editing.

    Example: `talk(Conversation(stream, print, print, sampling=GREEDY))`
    """
    if sys.stdin is None or not sys.stdin.isatty():
        converse(conversation, lambda: read_line(""))
        return
    conversation.interactive = True
    conversation.note(banner(conversation))
    with line_editing(history_path(), conversation.note):
        converse(conversation, lambda: read_line("> "))


def banner(conversation: Conversation) -> str:
    """The first lines of a chat: the model, its size, how to leave."""
    stream, model = conversation.stream, conversation.stream.model
    # Two parts of a path say more than "final"; a hub id has two.
    name = "/".join(Path(model.name_or_path or "a model").parts[-2:])
    lines = [f"{name}: {size_of(model.num_parameters())} parameters, on {model.device}."]
    if conversation.turns is None:
        lines += ["No chat template is used: the model continues your lines as plain text."]
    if stream.num_tokens:
        lines += [f"The conversation continues after {stream.num_tokens:,} tokens."]
    return "\n".join([*lines, "/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves."])


def size_of(count: int) -> str:
    """A number in short form.

    Example:
        >>> size_of(1_385_075_808)
        '1.4B'
    """
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 10 * unit else 0}f}{letter}"
    return str(count)


def history_path() -> Path:
    """The history file, in the user's state folder (XDG)."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "flash-frac" / "chat_history"


@contextmanager
def line_editing(path: Path, note: Callable[[str], object]) -> Iterator[None]:
    """Give `input` line editing and a history file, which is saved at the end.

    Without readline (Windows), `input` has neither. If the history cannot be read or written, a
    note says so and the program continues.

    Example: `with line_editing(history_path(), print): line = input("> ")`
    """
    try:
        import readline
    except ImportError:
        yield
        return
    try:
        _recall(readline, path)
    except (OSError, UnicodeDecodeError) as error:
        note(f"(earlier lines cannot be recalled: {error})")
    try:
        yield
    finally:
        try:
            _keep(readline, path)
        except OSError as error:
            note(f"(the history was not saved: {error})")


def _recall(readline: Any, path: Path) -> None:
    readline.clear_history()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            readline.add_history(line)


def _keep(readline: Any, path: Path) -> None:
    """Save the history, readable only by the user, because chats are private."""
    count = readline.get_current_history_length()
    if not count:
        return
    first = max(1, count - _MOST_LINES + 1)
    lines = [readline.get_history_item(n) or "" for n in range(first, count + 1)]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # An existing file keeps its permissions.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file, "w", encoding="utf-8", errors="replace") as out:
        out.writelines(f"{line}\n" for line in lines)


def read_line(prompt: str) -> str:
    """Read a line of standard input; EOFError at its end, ValueError if it is not UTF-8."""
    if sys.stdin is None:
        raise EOFError
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not a text in UTF-8: {error}") from error
