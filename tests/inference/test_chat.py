"""`frac generate` and `frac chat`: their text, states in files, and behaviour on interrupt."""

import os
import signal
import subprocess
import sys

import pytest

from flash_frac.inference import FracStream
from flash_frac.inference.chat import continue_text, open_stream, saving
from flash_frac.inference.conversation import Conversation, converse
from flash_frac.inference.sampling import GREEDY
from tests.commands import frac, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_state_goes_from_one_call_to_the_next(checkpoint, tmp_path):
    """Two calls with a state between them write what one call writes."""
    options = ["--temperature", 0, "--max-new-tokens"]
    whole = frac("generate", checkpoint, "--prompt", "To be", *options, 12)
    assert whole.returncode == 0, whole.stderr
    state = tmp_path / "state"
    first = frac("generate", checkpoint, "--prompt", "To be", *options, 5, "--save-state", state)
    second = frac("generate", checkpoint, "--state", state, *options, 7)
    assert first.stdout.rstrip("\n") + second.stdout == whole.stdout
    # The folder of a state is made.
    deep = tmp_path / "new" / "folder" / "state"
    frac("generate", checkpoint, "--prompt", "To be", *options, 5, "--save-state", deep)
    assert frac("generate", checkpoint, "--state", deep, *options, 7).stdout == second.stdout
    nothing = frac("generate", checkpoint)
    assert nothing.returncode == 1 and "give --prompt, --state or both" in nothing.stderr


def test_piped_text_is_continued(checkpoint, tmp_path):
    """As a prompt is, without its last line break; a prompt that is given has the last word."""
    options = ["--temperature", 0, "--max-new-tokens", 5]
    whole = frac("generate", checkpoint, "--prompt", "To\nbe", *options)
    piped = frac("generate", checkpoint, *options, stdin=b"To\nbe\n")
    assert piped.stdout == whole.stdout and whole.stdout.startswith("To\nbe")
    both = frac("generate", checkpoint, "--prompt", "To\nbe", *options, stdin=b"unread")
    assert both.stdout == whole.stdout


def test_errors_do_not_run_into_the_text(checkpoint):
    for option in (("--max-new-tokens", 0), ("--temperature", -1), ("--seed", -1)):
        done = frac("generate", checkpoint, "--prompt", "hi", *option)
        assert done.returncode != 0 and done.stdout == "", option
    written = []
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        continue_text(
            open_stream(checkpoint),
            "hi",
            written.append,
            sampling=GREEDY,
            max_new_tokens=0,
            echo=True,
        )
    assert written == []


def test_an_interrupt_keeps_what_was_written(checkpoint):
    stream = open_stream(checkpoint)
    written = []

    def write(piece):
        written.append(piece)
        if len(written) == 4:
            raise KeyboardInterrupt

    options = {"sampling": GREEDY, "max_new_tokens": 20}
    assert continue_text(stream, "To be", write, **options).end == "interrupt"
    rest, left = [], len("To be") + 20 - stream.num_tokens
    assert 0 < left < 20
    answer = continue_text(stream, "", rest.append, sampling=GREEDY, max_new_tokens=left)
    assert (answer.end, answer.num_tokens) == ("length", left) and answer.tokens_per_second > 0
    whole = []
    continue_text(open_stream(checkpoint), "To be", whole.append, **options)
    assert "".join(written + rest) == "".join(whole)


def start_endless(checkpoint, state):
    command = [sys.executable, "-m", "flash_frac.cli", "generate", checkpoint, "--prompt", "To be"]
    options = ["--temperature", "0", "--max-new-tokens", "1000000", "--save-state", state]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*command, *options], **piped, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def greedy(stream, count):
    return "".join(stream.generate(max_new_tokens=count, temperature=0))


@pytest.mark.slow
def test_sigterm_and_a_closed_pipe_save_the_state(checkpoint, tmp_path):
    """As Ctrl-C does: what follows is what would have followed."""
    names = ("terminated", "closed")
    processes = {name: start_endless(checkpoint, tmp_path / name) for name in names}
    for process in processes.values():
        assert process.stdout.read(12).startswith(b"To be")
    processes["terminated"].send_signal(signal.SIGTERM)
    processes["closed"].stdout.close()
    codes = {name: process.wait(60) for name, process in processes.items()}
    assert codes == {"terminated": 128 + signal.SIGTERM, "closed": 1}
    for name, process in processes.items():
        said = process.stderr.read().decode()
        assert f"The state is in {tmp_path / name}." in said and "Traceback" not in said
        stream = open_stream(checkpoint, tmp_path / name)
        num_new = stream.num_tokens - len("To be")
        fresh = open_stream(checkpoint).feed("To be")
        assert num_new > 0 and greedy(fresh, num_new) is not None
        assert greedy(stream, 20) == greedy(fresh, 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_conversation_that_is_ended_from_outside_is_saved(checkpoint, tmp_path, number):
    stream, said = open_stream(checkpoint), []
    # A runner that ignores the signal, as nohup does, passes that on to its tests.
    inherited = signal.signal(number, signal.SIG_DFL)

    def read():
        os.kill(os.getpid(), number)
        pytest.fail("the conversation went on after the signal")

    def save(path):
        # A second signal does not keep the state from being written.
        os.kill(os.getpid(), number)
        FracStream.save(stream.feed("x"), path)

    stream.save = save
    try:
        with pytest.raises(SystemExit) as ended, saving(stream, tmp_path / "state", said.append):
            converse(Conversation(stream, print, print, sampling=GREEDY, max_new_tokens=6), read)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
    assert ended.value.code == 128 + number
    assert open_stream(checkpoint, tmp_path / "state").num_tokens == 1
    assert said == [f"The state is in {tmp_path / 'state'}."]


def test_a_checkpoint_that_is_none(tmp_path):
    done = frac("generate", tmp_path, "--prompt", "x")
    assert done.returncode == 1 and f"checkpoint {tmp_path} cannot be loaded" in done.stderr


def test_options_of_sampling(checkpoint):
    """Both commands have them, and their errors are sentences."""
    for command in (["generate", checkpoint, "--prompt", "x"], ["chat", checkpoint]):
        for name in ("temperature", "top-k", "top-p", "min-p", "repetition-penalty"):
            done = frac(*command, f"--{name}", -1)
            assert done.returncode == 1
            assert done.stderr.startswith(f"frac: {name.replace('-', '_')} must be")
