"""A conversation with a model: turns in the tokenizer's chat template, and commands such as /back.

The state holds the whole conversation. A turn costs only its own tokens, however long the past.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_frac.inference.chat import Answer, continue_text
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.stream import FracStream
from flash_frac.inference.text import end_ids

HELP = """\
/help        show this list
/back        undo the last turn, your line and the answer
/fork NAME   keep a copy of this moment in memory (without a name: 1, 2, ...)
/save FILE   write the conversation to a file
/load NAME   return to a copy made by /fork or a file written by /save
/quit        leave, as /exit and Ctrl-D do

Ctrl-C stops an answer. Start a line with // to send a text that starts with /. Empty lines are
skipped."""

# Placeholder for the answer when probing a template; no template contains this text itself.
_ANSWER = "[[the answer]]"


class Template:
    """A tokenizer's chat template, cut into the turns of a conversation.

    Each turn depends only on its own line, so a saved or forked state needs no history.

    Example: `stream.feed(Template(tokenizer).turn("Hello", first=True))`
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        asked = {"role": "user", "content": "?"}
        self._before = [asked, {"role": "assistant", "content": _ANSWER}]
        self._closing = self._render(self._before, begin_answer=False).rpartition(_ANSWER)[2]
        self.turn("?", first=False)

    def turn(self, line: str, *, first: bool) -> list[int]:
        """Tokens of a user's line and of the start of the answer."""
        message = {"role": "user", "content": line}
        if first:
            return self._ids(self._render([message], begin_answer=True))
        text = self._render([*self._before, message], begin_answer=True)
        text = text.partition(_ANSWER)[2]
        if not text.startswith(self._closing):
            raise ValueError(
                "the tokenizer's chat template needs the whole conversation at every turn; pass "
                "--no-template to send plain lines"
            )
        return self._ids(text.removeprefix(self._closing))

    def closing(self, ends: list[int], *, ended: bool) -> list[int]:
        """Tokens that close an answer; if the model ended it, the first one is already there."""
        ids = self._ids(self._closing)
        return ids[1:] if ended and ids[:1] and ids[0] in ends else ids

    def _render(self, messages: list[dict[str, str]], *, begin_answer: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=begin_answer
            )
        # Jinja's errors, and whatever a template raises.
        except Exception as error:
            raise ValueError(
                f"the tokenizer's chat template cannot be used ({error}); pass --no-template to "
                "send plain lines"
            ) from error

    def _ids(self, text: str) -> list[int]:
        # A stream adds no start token to ids; the template writes its own.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass
class Conversation:
    """A chat with a model: turns and commands on a stream.

    Args:
        stream: of one sequence, with a tokenizer; `/load` replaces it.
        sampling, max_new_tokens: settings for answers.
        write: receives the pieces of answers.
        note: receives remarks, one line each.
        template: use the tokenizer's chat template, if it has one; otherwise each line is sent as
            it is, with a line break.

    Attributes:
        interactive: also note the speed of answers that the model ended.

    Example: `Conversation(stream, print, print, sampling=GREEDY).say("Hello")`
    """

    stream: FracStream
    write: Callable[[str], object]
    note: Callable[[str], object]
    sampling: SamplingSettings = field(kw_only=True)
    max_new_tokens: int | None = field(default=None, kw_only=True)
    template: bool = field(default=True, kw_only=True)
    interactive: bool = field(default=False, init=False)
    forks: dict[str, FracStream] = field(default_factory=dict, init=False)
    turns: Template | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.template and getattr(self.stream.tokenizer, "chat_template", None):
            self.turns = Template(self.stream.tokenizer)

    def say(self, line: str) -> None:
        """Send a line and write the answer as it comes; an interrupt ends the answer."""
        mark = self.stream.mark()
        try:
            self._feed(line)
        except BaseException as error:
            # The model read nothing, so /back has no turn to undo.
            self.stream.release(mark)
            if not isinstance(error, KeyboardInterrupt):
                raise
            self.note("(interrupted before the answer; your line was not sent)")
            return
        answer = continue_text(
            self.stream,
            "",
            self.write,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
        )
        if self.turns is not None:
            ends = end_ids(True, self.stream.model, self.stream.tokenizer)
            self.stream.feed(self.turns.closing(ends, ended=answer.end == "stop"))
        self.write("\n")
        if self.interactive or answer.end != "stop":
            self.note(self._remark(answer))

    def _feed(self, line: str) -> None:
        if self.turns is None:
            self.stream.feed(line + "\n")
        else:
            self.stream.feed(self.turns.turn(line, first=self.stream.num_tokens == 0))

    def _remark(self, answer: Answer) -> str:
        count = "1 token" if answer.num_tokens == 1 else f"{answer.num_tokens} tokens"
        how = {
            "stop": count,
            "length": f"stopped at the limit of {count}",
            "interrupt": f"interrupted after {count}",
        }
        return f"({how[answer.end]}; {answer.tokens_per_second:,.0f} tokens/s)"

    def command(self, line: str) -> bool:
        """Run a command such as "/back"; return whether the conversation continues."""
        name, _, argument = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        commands = {
            "/help": lambda _: self.note(HELP),
            "/back": self._back,
            "/fork": self._fork,
            "/save": self._save,
            "/load": self._load,
        }
        if name not in commands:
            self.note(f"(there is no command {name}; /help lists them, // sends a line with /)")
            return True
        try:
            commands[name](argument.strip())
        except (ValueError, OSError) as error:
            self.note(f"({name} failed: {error})")
        return True

    def _back(self, argument: str) -> None:
        try:
            self.stream.rollback()
        except ValueError:
            self.note("(there is no turn to undo)")
            return
        self.stream.release()
        self.note("(one turn back)")

    def _fork(self, name: str) -> None:
        if not name:
            name = next(str(n) for n in range(1, len(self.forks) + 2) if str(n) not in self.forks)
        if name in self.forks:
            raise ValueError(f"there is already a copy named {name}; choose another name")
        self.forks[name] = self.stream.fork()
        self.note(f"(kept as {name}; /load {name} returns here)")

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("name a file, as in /save today.state")
        path = Path(name).expanduser()
        self.save(path)
        self.note(f"(saved in {path})")

    def _load(self, name: str) -> None:
        if not name:
            kept = ", ".join(self.forks)
            raise ValueError(f"name a file{f', or one of {kept}' if kept else ''}")
        if name in self.forks:
            self.stream = self.forks[name].fork()
        else:
            path, now = Path(name).expanduser(), self.stream
            self.stream = FracStream.load(path, now.model, now.tokenizer)
        self.note(f"({self.stream.num_tokens:,} tokens from {name})")

    def save(self, path: Path) -> None:
        """Write the current state to a file."""
        self.stream.save(path)


def converse(conversation: Conversation, read: Callable[[], str]) -> None:
    """Answer the lines that `read` returns, until /quit or the end of input (Ctrl-D).

    Example: `converse(Conversation(stream, print, print, sampling=GREEDY), input)`
    """
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            conversation.note("\n(Ctrl-D or /quit leaves)")
            continue
        if line.startswith("/") and not line.startswith("//"):
            if not conversation.command(line):
                return
        elif line.strip():
            conversation.say(line.removeprefix("/"))
