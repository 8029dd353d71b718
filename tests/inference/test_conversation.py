"""`frac chat`: turns, templates and commands, from a pipe and at a terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from flash_frac.data import byte_tokenizer
from flash_frac.inference import FracStream
from flash_frac.inference.chat import continue_text, open_stream
from flash_frac.inference.conversation import Conversation, Template, converse
from flash_frac.inference.sampling import GREEDY
from flash_frac.inference.terminal import history_path, line_editing, size_of
from tests.commands import frac, make_checkpoint

TURNS = (
    "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>|{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = TURNS
    return tokenizer


def reader(*lines):
    given = iter(lines)

    def read():
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return read


def start(stream, **options):
    """A conversation of short answers, and what it wrote and noted."""
    said, notes = [], []
    options = {"sampling": GREEDY, "max_new_tokens": 6} | options
    return Conversation(stream, said.append, notes.append, **options), said, notes


@pytest.mark.parametrize("mixer_types", [["frac"], ["delta", "attention"]])
def test_a_turn_can_be_undone(tmp_path, mixer_types):
    stream = open_stream(make_checkpoint(tmp_path, mixer_types=mixer_types))
    conversation, said, notes = start(stream)
    converse(conversation, reader("/back", "one", "two", "/back", "two"))
    assert notes[0] == "(there is no turn to undo)" and "(one turn back)" in notes
    answers = "".join(said).removesuffix("\n").split("\n")
    assert "".join(said).count("\n") >= 3 and answers[-1] and "".join(said).endswith("\n")
    plain = FracStream(stream.model, stream.tokenizer)
    for line in ("one\n", "two\n"):
        continue_text(plain, line, lambda piece: None, sampling=GREEDY, max_new_tokens=6)
    assert plain.num_tokens == stream.num_tokens
    assert plain.logits.equal(stream.logits)


def test_an_answer_says_how_it_ended(checkpoint):
    stream = open_stream(checkpoint)
    conversation, _, notes = start(stream)
    conversation.say("one")
    assert re.fullmatch(r"\(stopped at the limit of 6 tokens; [\d,]+ tokens/s\)", notes[0])
    # Now every token ends an answer: nothing to say about it, unless someone looks on.
    stream.model.generation_config.eos_token_id = list(range(259))
    conversation.say("two")
    assert len(notes) == 1
    conversation.interactive = True
    conversation.say("three")
    assert re.fullmatch(r"\(1 token; [\d,]+ tokens/s\)", notes[1])


def test_an_interrupt_ends_the_answer_and_no_more(checkpoint):
    conversation, said, notes = start(open_stream(checkpoint), max_new_tokens=50)

    def write(piece):
        said.append(piece)
        if len(said) == 3:
            raise KeyboardInterrupt

    conversation.write = write
    converse(conversation, reader("one", "/back"))
    assert notes[0].startswith("(interrupted after ") and notes[1] == "(one turn back)"
    assert conversation.stream.num_tokens == 0


def test_an_interrupt_while_a_line_is_read(checkpoint, monkeypatch):
    """Nothing has happened, and /back undoes the turn before it."""
    conversation, _, notes = start(open_stream(checkpoint))
    conversation.say("one")
    before = conversation.stream.num_tokens
    with monkeypatch.context() as patch:
        patch.setattr(FracStream, "_read", lambda *unused: (_ for _ in ()).throw(KeyboardInterrupt))
        conversation.say("two")
    assert notes[-1] == "(interrupted before the answer; your line was not sent)"
    assert conversation.stream.num_tokens == before
    conversation.command("/back")
    assert conversation.stream.num_tokens == 0


def test_an_interrupt_at_the_prompt_says_how_to_leave(checkpoint):
    conversation, _, notes = start(open_stream(checkpoint))
    raised = iter([KeyboardInterrupt, EOFError])

    def read():
        raise next(raised)

    converse(conversation, read)
    assert notes == ["\n(Ctrl-D or /quit leaves)"]


def test_commands(checkpoint, tmp_path):
    conversation, said, notes = start(open_stream(checkpoint))
    file = tmp_path / "here.state"
    converse(conversation, reader("one", "/fork", "/fork start", f"/save {file}", "two", "two"))
    longer = conversation.stream
    for name in ("1", "start", str(file)):
        said.clear()
        conversation.command(f"/load {name}")
        assert re.search(rf"\(10 tokens from {re.escape(name)}\)", notes[-1])
        conversation.say("two")
        assert conversation.stream.num_tokens == 20 < longer.num_tokens
    # A fork may be returned to again, and its turns undone.
    conversation.command("/load 1")
    conversation.command("/back")
    assert conversation.stream.num_tokens == 0
    notes.clear()
    converse(conversation, reader("/help", "/bakc", "/save", "/load", "/load absent", "/quit", "x"))
    assert all(f"/{name}" in notes[0] for name in ("help", "quit", "save", "load", "back", "fork"))
    assert notes[1].startswith("(there is no command /bakc; /help lists them")
    assert notes[2] == "(/save failed: name a file, as in /save today.state)"
    assert notes[3] == "(/load failed: name a file, or one of 1, start)"
    assert notes[4].startswith("(/load failed: ") and "absent" in notes[4]
    assert conversation.stream.num_tokens == 0
    # A name is taken only once, by an older copy than this one.
    notes.clear()
    converse(conversation, reader("/fork start", "/load start", "/exit", "unread"))
    assert notes[0] == "(/fork failed: there is already a copy named start; choose another name)"
    assert notes[1:] == ["(10 tokens from start)"]


def test_lines_that_are_no_commands(checkpoint):
    conversation, _, _ = start(open_stream(checkpoint))
    converse(conversation, reader("", "  "))
    assert conversation.stream.num_tokens == 0
    converse(conversation, reader("//quit"))
    assert conversation.stream.num_tokens == len("/quit\n") + 6


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_turns_of_a_template_add_up_to_the_conversation(tokenizer):
    template = Template(tokenizer)
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    messages = [*asked, {"role": "user", "content": "So?"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first, later = template.turn("Hi", first=True), template.turn("So?", first=False)
    eos, answer = tokenizer.eos_token_id, ids_of(tokenizer, "Ho")
    for answered, ended in ((answer, False), ([*answer, eos], True)):
        turns = [*first, *answered, *template.closing([eos], ended=ended), *later]
        assert turns == ids_of(tokenizer, whole)


def test_a_template_that_shows_the_last_answer_otherwise(tokenizer):
    """As templates of reasoning models do; what follows the answer is the same."""
    tokenizer.chat_template = TURNS.replace(
        "{{ m.content }}", "{% if loop.last %}<think>{% endif %}{{ m.content }}"
    )
    assert tokenizer.decode(Template(tokenizer).turn("So?", first=False)).startswith("[user]")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no users') }}", r"cannot be used \(no users\); pass --no-template"),
        (
            "{% for m in messages %}{{ loop.length }}{{ m.content }}{{ loop.length }}{% endfor %}",
            "whole",
        ),
    ],
)
def test_a_template_that_cannot_be_used(tokenizer, template, problem):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"the tokenizer's chat template .*{problem}"):
        Template(tokenizer)


def test_a_conversation_in_a_template(checkpoint, tokenizer):
    stream = FracStream(open_stream(checkpoint).model, tokenizer)
    conversation, _, _ = start(stream)
    converse(conversation, reader("Hi", "So?"))
    first, closing, later = "<bos>[user]Hi<eos>|[assistant]", "<eos>|", "[user]So?<eos>|[assistant]"
    count = [len(ids_of(tokenizer, text)) for text in (first, closing, later, closing)]
    assert stream.num_tokens == sum(count) + 2 * 6
    plain, _, _ = start(FracStream(stream.model, tokenizer), template=False)
    plain.say("Hi")
    assert plain.stream.num_tokens == len("Hi\n") + 6


def test_from_a_pipe(checkpoint, tmp_path):
    """Answers alone; a state goes on from one call to the next."""
    state, options = tmp_path / "state", ["--temperature", 0, "--max-new-tokens", 6]
    whole = frac("chat", checkpoint, *options, stdin=b"one\ntwo\n")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout and ">" not in whole.stderr and "/help" not in whole.stderr
    assert whole.stderr.count("stopped at the limit of 6 tokens") == 2
    first = frac("chat", checkpoint, *options, "--save-state", state, stdin=b"one\n")
    second = frac("chat", checkpoint, *options, "--state", state, stdin=b"two\n")
    assert first.stdout + second.stdout == whole.stdout
    assert first.stderr.endswith(f"The state is in {state}.\n")
    # What --save-state writes is the stream that /load has left.
    lines = f"two\n/load {state}\n".encode()
    frac("chat", checkpoint, *options, "--save-state", tmp_path / "same", stdin=lines)
    again = frac("chat", checkpoint, *options, "--state", tmp_path / "same", stdin=b"two\n")
    assert again.stdout == second.stdout
    broken = frac("chat", checkpoint, *options, stdin=b"\xff\xfe\n")
    assert broken.returncode == 1 and "standard input is not a text in UTF-8" in broken.stderr


def take_terminal():
    """Let the terminal send SIGINT for Ctrl-C, also under a runner that ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Screen:
    """A process at a pseudo-terminal."""

    def __init__(self, command, **environment):
        self.leader, follower = pty.openpty()
        ends = {"stdin": follower, "stdout": follower, "stderr": follower}
        environment = {**os.environ, "TERM": "dumb", **environment}
        self.process = subprocess.Popen(
            command,
            **ends,
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(follower)
        self.text = ""

    def wait_for(self, pattern, since=0, seconds=60):
        """Read until a pattern is on the screen; where it ends."""
        end = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.text, since)):
            ready, _, _ = select.select([self.leader], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text!r}"
            self.text += os.read(self.leader, 65536).decode(errors="replace").replace("\r\n", "\n")
        return found.end()

    def type(self, keys):
        os.write(self.leader, keys.encode())


@pytest.mark.slow
def test_at_a_terminal(checkpoint, tmp_path):
    """Banner, an endless answer that Ctrl-C stops, history by the arrow key, Ctrl-D."""
    command = [sys.executable, "-m", "flash_frac.cli", "chat", str(checkpoint)]
    # Greedy, because a drawn token may be the tokenizer's end token.
    endless = ["--temperature", "0", "--max-new-tokens", "1000000"]
    screen = Screen([*command, *endless], XDG_STATE_HOME=str(tmp_path))
    name = re.escape(f"{checkpoint.parent.name}/{checkpoint.name}: ")
    at = screen.wait_for(
        name + r"[\d.]+K parameters, on cpu\.\n(.*\n)*/help lists .*Ctrl-D leaves\.\n> "
    )
    screen.type("one\n")
    at = screen.wait_for(r"(?s)one\n.{20}", at)
    screen.type("\x03")
    at = screen.wait_for(r"\(interrupted after \d+ tokens; [\d,]+ tokens/s\)\n> ", at)
    screen.type("/back\n")
    at = screen.wait_for(r"\(one turn back\)\n> ", at)
    screen.type("\x04")
    assert screen.process.wait(60) == 0
    history = tmp_path / "flash-frac" / "chat_history"
    assert history.read_text() == "one\n/back\n"
    assert history.stat().st_mode & 0o777 == 0o600
    again = Screen(command, XDG_STATE_HOME=str(tmp_path), TERM="xterm")
    at = again.wait_for("> ")
    # Up twice is the line before the last; the line is edited before it is sent.
    again.type("\x1b[A\x1b[A\x15/quit\n")
    again.wait_for("one", at)
    assert again.process.wait(60) == 0
    assert history.read_text() == "one\n/back\n/quit\n"


def test_history_without_readline_or_rights(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "flash-frac").write_text("a file where the folder should be")
    import readline

    with line_editing(history_path(), notes.append):
        readline.add_history("a line")
    assert len(notes) == 1 and notes[0].startswith("(the history was not saved: ")
    monkeypatch.setitem(sys.modules, "readline", None)
    with line_editing(history_path(), notes.append):
        pass
    assert len(notes) == 1


def test_sizes_are_short():
    assert [size_of(n) for n in (12, 2_500, 46_261_280, 1_385_075_808)] == [
        *("12", "2.5K", "46M", "1.4B")
    ]
