"""Call the command `frac` through its entry point, without a new process that imports torch."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from flash_frac.cli import main
from flash_frac.data import byte_tokenizer
from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config


class Done(NamedTuple):
    """What a command left, by the names that `subprocess.run` gives it."""

    returncode: int
    stdout: str
    stderr: str


def frac(*arguments, stdin=b""):
    out, err = io.StringIO(), io.StringIO()
    typed = mock.patch.object(sys, "argv", ["frac", *map(str, arguments)])
    piped = mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with typed, piped, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    # A text as the code of an exit is printed by Python, and counts as 1.
    message = code if isinstance(code, str) else ""
    return Done(1 if message else code, out.getvalue(), err.getvalue() + message)


def make_checkpoint(folder, **changes):
    """A small model of bytes that never ends a text, so that there is always something to write."""
    model = FracForCausalLM(tiny_config(initializer_range=0.3, **changes))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
