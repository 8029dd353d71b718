"""Call the command `frac` through its entry point, without a new process that imports torch."""

import io
import multiprocessing
import os
import resource
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from flash_frac.cli import main
from flash_frac.data import byte_tokenizer
from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config

# Its processes are copies of one that has all modules loaded, which takes seconds each time.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flash_frac.cli", "flash_frac.train"])


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


def start(*arguments, environment=None, file_size=resource.RLIM_INFINITY, before=None):
    """Begin `frac ARGUMENTS` on one thread; what it prints goes to the file process.output.

    No file that it writes can be larger than `file_size` bytes. The process calls `before` first.
    """
    file, output = tempfile.mkstemp()
    os.close(file)
    arguments = (list(map(str, arguments)), environment or {}, file_size, output, before)
    process = CONTEXT.Process(target=_work, args=arguments)
    process.output = Path(output)
    process.start()
    return process


def _work(arguments, environment, file_size, output, before):
    file = open(output, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    os.environ.update({name: str(value) for name, value in environment.items()})
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["frac", *arguments]
    main()


def make_checkpoint(folder, **changes):
    """A small model of bytes that never ends a text, so that there is always something to write."""
    model = FracForCausalLM(tiny_config(initializer_range=0.3, **changes))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
