"""The command `frac`, as it is typed."""

import subprocess
import sys

import pytest

from flash_frac.data import byte_tokenizer
from flash_frac.inference import FracStream
from flash_frac.inference.chat import continue_text, converse, open_stream
from flash_frac.inference.sampling import GREEDY
from flash_frac.models import FracConfig, FracForCausalLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    config = FracConfig(
        vocab_size=259,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        frac_num_modes=4,
        initializer_range=0.3,
    )
    model = FracForCausalLM(config)
    # No end of text, so that there is always something to write.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def frac(*arguments, **options):
    command = [sys.executable, "-m", "flash_frac.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_help_and_errors():
    assert "train" in frac("--help").stdout
    done = frac("train", "absent.yaml")
    assert done.returncode == 1 and done.stderr.startswith("frac: there is no recipe absent.yaml")
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['accelerate'] = None; sys.argv = ['frac', 'train', 'x.yaml']\n"
        "from flash_frac.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "frac train needs accelerate: pip install 'flash-frac[train]'" in done.stderr


def test_a_state_goes_from_one_call_to_the_next(checkpoint, tmp_path):
    """Two calls with a state between them write what one call writes."""
    options = ["--temperature", 0, "--max-new-tokens"]
    whole = frac("generate", checkpoint, "--prompt", "To be", *options, 12)
    assert whole.returncode == 0, whole.stderr
    state = tmp_path / "state"
    first = frac("generate", checkpoint, "--prompt", "To be", *options, 5, "--save-state", state)
    second = frac("generate", checkpoint, "--state", state, *options, 7)
    assert first.stdout.rstrip("\n") + second.stdout == whole.stdout
    nothing = frac("generate", checkpoint)
    assert nothing.returncode == 1 and "give --prompt, --state or both" in nothing.stderr


def test_an_interrupt_keeps_what_was_written(checkpoint):
    stream = open_stream(checkpoint)
    written = []

    def write(piece):
        written.append(piece)
        if len(written) == 4:
            raise KeyboardInterrupt

    options = {"sampling": GREEDY, "max_new_tokens": 20}
    assert not continue_text(stream, "To be", write, **options)
    rest, left = [], len("To be") + 20 - stream.num_tokens
    assert 0 < left < 20
    assert continue_text(stream, "", rest.append, sampling=GREEDY, max_new_tokens=left)
    whole = []
    assert continue_text(open_stream(checkpoint), "To be", whole.append, **options)
    assert "".join(written + rest) == "".join(whole)


def test_a_conversation_can_be_undone(checkpoint):
    stream = open_stream(checkpoint)
    said = []
    lines = iter(["/back", "one", "two", "/back", "two"])

    def read():
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    converse(stream, read, said.append, sampling=GREEDY, max_new_tokens=6)
    assert said[0] == "(there is no turn to undo)\n"
    back = said.index("(one turn back)\n")
    turns = "".join(said[1:back]).split("\n(")[0]
    assert turns.endswith("".join(said[back + 1 :]))
    plain = FracStream(stream.model, stream.tokenizer)
    for line in ("one\n", "two\n"):
        continue_text(plain, line, lambda piece: None, sampling=GREEDY, max_new_tokens=6)
    assert plain.num_tokens == stream.num_tokens


def test_bench(checkpoint, tmp_path):
    out = tmp_path / "rows.json"
    options = ("--parts", "prefill", "--peers", "none", "--lengths", "16,32", "--out", out)
    done = frac("bench", checkpoint, *options, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| *FRAC, paper* | 16,213 |" in done.stdout and "prefill@32" in done.stdout
    assert out.exists()


def test_doctor():
    done = frac("doctor", "--quick", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkpoint_that_is_none(tmp_path):
    done = frac("generate", tmp_path, "--prompt", "x")
    assert done.returncode == 1 and f"checkpoint {tmp_path} cannot be loaded" in done.stderr


def test_inspect(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("memory fades as a power law " * 20)
    out = tmp_path / "out"
    done = frac("inspect", checkpoint, "--text", tmp_path / "text.txt", "--out", out)
    assert done.returncode == 0, done.stderr
    assert (out / "index.html").exists() and (out / "report.json").exists()
