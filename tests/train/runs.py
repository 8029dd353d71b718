"""Runs in processes of their own, and what they left in their folders."""

import multiprocessing
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from flash_frac.train.monitor import LOG_NAME, read_lines

# Its processes are copies of one that has all modules loaded, which takes seconds each time.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flash_frac.cli", "flash_frac.train"])


def start(*arguments, environment=None, file_size=resource.RLIM_INFINITY, before=None):
    """Begin `frac train ARGUMENTS` on one thread; what it prints goes to the file process.output.

    No file that it writes can be larger than `file_size` bytes. The process calls `before` first.
    """
    file, output = tempfile.mkstemp()
    os.close(file)
    arguments = (list(map(str, arguments)), environment or {}, file_size, output, before)
    process = CONTEXT.Process(target=_train, args=arguments)
    process.output = Path(output)
    process.start()
    return process


def start_together(count, *arguments, before=None):
    """Begin `frac train` in several processes, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in range(count))
    return [start(*arguments, environment={**world, **rank}, before=before) for rank in ranks]


def finish(process, timeout=300):
    """Wait for the end of a process, which must be a good one."""
    process.join(timeout)
    text, status = process.output.read_text(), process.exitcode
    process.kill()
    assert status == 0, text


def _train(arguments, environment, file_size, output, before):
    file = open(output, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    os.environ.update({name: str(value) for name, value in environment.items()})
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["frac", "train", *arguments]
    from flash_frac.cli import main

    main()


def losses(folder):
    return [
        (line["step"], line["loss"]) for line in read_lines(folder / LOG_NAME) if "loss" in line
    ]


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
