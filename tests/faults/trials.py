"""The kinds of trials. Each draws from a generator, and returns a description of what it did."""

import atexit
import io
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.faults import Lost, children, expect
from tests.faults.children import End, Fault
from tests.faults.damage import damage
from tests.faults.writers import WRITERS, Writer, make_material
from tests.train.runs import start_together

# Files of which an edit by hand is no damage: they are named, and taken as they are.
EDITED = (LOG_NAME, "config.json", "generation_config.json", "tokenizer", "special_tokens")
DDP_TIMEOUT = 6
# Smaller limits would cut off what a process prints, which goes to a file as well.
SMALLEST_LIMIT = 8192


class Made(NamedTuple):
    """What a writer makes where nothing goes wrong, and what that takes."""

    folder: Path
    result: Any
    names: set[str]
    events: int
    seconds: float


@cache
def material() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_material(folder)


@cache
def made(name: str) -> Made:
    folder = material() / "made" / name.replace(" ", "-")
    folder.mkdir(parents=True)
    began = time.time()
    end = children.run(Fault(), folder, WRITERS[name].write, material(), folder)
    expect(end.status == 0, end.said)
    seconds = time.time() - began
    names = names_in(folder)
    result, _ = _attempt(lambda: WRITERS[name].read(material(), folder))
    return Made(folder, result, names, end.events, seconds)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def killed(name: str, draw: random.Random, folder: Path) -> str:
    """A writer is killed once or more, then runs to its end: as if nothing had happened."""
    faults = [_death(name, draw) for _ in range(draw.randint(1, 3))]
    for number, fault in enumerate(faults):
        end = _run(name, fault, folder)
        if end.status == 0 and number == 0:
            # It was faster than the clock.
            shutil.rmtree(folder)
            folder.mkdir()
            fault = Fault(kill_at=draw.randint(1, made(name).events))
            end = _run(name, fault, folder)
        if end.status == 0:
            break
        expect(end.status == -signal.SIGKILL, f"{fault} ended with {end.status}: {end.said}")
    _go_on(name, folder, f"killed by {faults}")
    return f"{name} killed: {faults}"


def _death(name: str, draw: random.Random) -> Fault:
    if draw.random() < 0.3:
        return Fault(kill_after=draw.uniform(0.05, made(name).seconds))
    return Fault(kill_at=draw.randint(1, made(name).events))


def _run(name: str, fault: Fault, folder: Path) -> End:
    return children.run(fault, folder, WRITERS[name].write, material(), folder)


def _go_on(name: str, folder: Path, what: str) -> None:
    """Run a writer without a fault; its result must be that of one that never had any."""
    writer = WRITERS[name]
    try:
        _attempt(lambda: writer.write(material(), folder))
        result, _ = _attempt(lambda: writer.read(material(), folder))
    except (ValueError, OSError) as error:
        raise Lost(f"{name} does not go on, {what}: {error}") from error
    expect(result == made(name).result, f"{name} has another result, {what}")
    left = names_in(folder) - made(name).names
    expect(not left, f"{name} leaves {sorted(left)}, {what}")


def full(name: str, draw: random.Random, folder: Path) -> str:
    """The disk is full from some moment on: a line that names a file; then there is room again."""
    sizes = [path.stat().st_size for path in made(name).folder.rglob("*") if path.is_file()]
    if max(sizes) > SMALLEST_LIMIT and draw.random() < 0.5:
        fault = Fault(file_size=draw.randint(SMALLEST_LIMIT, max(sizes) - 1))
    else:
        fault = Fault(full_at=draw.randint(1, made(name).events))
    end = _run(name, fault, folder)
    expect(end.status in (0, 1), f"{name} ended with {end.status} by {fault}: {end.said}")
    if end.status:
        expect("Traceback" not in end.said, f"{name} by {fault}: {end.said}")
        line = end.said.splitlines()[-1]
        named = line.startswith("frac: ") and str(folder) in line
        expect(named, f"{name} does not name the file, by {fault}: {end.said}")
        left = [x for x in names_in(folder) if x.endswith(".part") or x.startswith(".saving")]
        expect(not left, f"{name} leaves {left}, by {fault}")
    _go_on(name, folder, f"after {fault}")
    return f"{name} with a full disk: {fault}"


def damaged(name: str, draw: random.Random, folder: Path) -> str:
    """A file is damaged: it is named, or does not matter."""
    writer = WRITERS[name]
    shutil.copytree(made(name).folder, folder, dirs_exist_ok=True)
    if writer.begun is not None:
        writer.begun(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    file = draw.choice(sorted(files))
    what = damage(draw, file, writer.ways)
    try:
        result, said = _attempt(lambda: _use(writer, folder))
    except (ValueError, OSError) as error:
        message = str(error)
        expect("\n" not in message, f"more than a line on {what}: {message}")
        expect(_names(message, file), f"an error does not name {what}: {message}")
        return f"{what}, refused"
    if result == made(name).result:
        return f"{what}, exact"
    told = file.name.startswith(EDITED) and _names(said, file)
    expect(told, f"another result without a word: {what}; it said: {said}")
    return f"{what}, told"


def _use(writer: Writer, folder: Path) -> Any:
    if writer.begun is not None:
        writer.write(material(), folder)
    return writer.read(material(), folder)


def _names(message: str, file: Path) -> bool:
    return str(file) in message or (str(file.parent) in message and file.name in message)


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, and what it prints and logs."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("flash_frac")
    logger.addHandler(handler)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            return call(), said.getvalue()
    finally:
        logger.removeHandler(handler)


def together(name: str, draw: random.Random, folder: Path) -> str:
    """Several at once in one folder: one result, and whoever has to leave is told why."""
    count, writer = draw.randint(2, 3), WRITERS[name]
    processes = []
    for _ in range(count):
        processes.append(children.start(Fault(), folder, writer.write, material(), folder))
        time.sleep(draw.uniform(0, made(name).seconds / 2))
    pids = [process.pid for process in processes]
    ends = [children.end_of(process) for process in processes]
    expect(any(end.status == 0 for end in ends), [end.said for end in ends])
    for end, pid in zip(ends, pids, strict=True):
        if end.status == 0:
            continue
        expect(end.status == 1 and "Traceback" not in end.said, f"{end.status}: {end.said}")
        line = end.said.splitlines()[-1]
        expect(line.startswith("frac: ") and str(folder) in line, end.said)
        if "training" in name:
            others = [f"in use by process {x} on" for x in pids if x != pid]
            expect(any(x in line for x in others), f"the holder is not named: {line}")
    _go_on(name, folder, f"with {count} at once")
    return f"{name}, {count} at once"


def lost_rank(how: signal.Signals, draw: random.Random, folder: Path) -> str:
    """A rank freezes or dies: the other names it in time."""
    recipe, lost, step = material() / "plain" / "recipe.yaml", draw.randrange(2), draw.randint(1, 9)
    long = ("--max_steps", 10_000, "--save_steps", 10_000, "--eval_strategy", "no")
    processes: list[Any] = start_together(
        2, recipe, "--output_dir", folder, "--ddp_timeout", DDP_TIMEOUT, *long
    )
    try:
        deadline = time.time() + children.PATIENCE
        while len(read_lines(folder / LOG_NAME)) < step:
            expect(time.time() < deadline, [p.output.read_text() for p in processes])
            time.sleep(0.02)
        os.kill(processes[lost].pid, how)
        began = time.time()
        other = processes[1 - lost]
        other.join(DDP_TIMEOUT + 30)
        said = other.output.read_text()
        expect(other.exitcode == 1, f"{how.name}: exit {other.exitcode}, {said}")
        expect(f"no answer from: rank {lost}." in said, said)
        expect("Traceback" not in said, said)
        return f"rank {lost}: {how.name}, named after {time.time() - began:.1f} s"
    finally:
        for process in processes:
            process.kill()
            process.join()


class Kind(NamedTuple):
    """A kind of trial: a function of (draw, folder), how many there are, and how many in CI."""

    trial: Any
    count: int
    quick: int


KILLED = {
    **{"training": (24, 1), "stateful training": (14, 0), "training for the best model": (14, 0)},
    **{"training on a stream": (10, 0), "token cache": (12, 2), "stream state": (12, 2)},
    **{"prefix states": (8, 1), "evaluation": (8, 0), "table of an experiment": (8, 2)},
    **{"rows of a benchmark": (8, 2), "exported model": (6, 1), "inspection": (3, 0)},
}
FULL = {
    **{"training": (14, 1), "stateful training": (6, 0), "training for the best model": (6, 0)},
    **{"training on a stream": (6, 0), "token cache": (10, 2), "stream state": (8, 1)},
    **{"prefix states": (8, 1), "evaluation": (8, 1), "table of an experiment": (6, 1)},
    **{"rows of a benchmark": (6, 1), "exported model": (6, 1), "inspection": (3, 0)},
}
DAMAGED = {
    **{"training": (30, 4), "stateful training": (20, 0), "training for the best model": (20, 0)},
    **{"training on a stream": (15, 0), "token cache": (40, 10), "stream state": (40, 10)},
    **{"prefix states": (30, 4), "evaluation": (30, 2), "table of an experiment": (30, 10)},
    **{"rows of a benchmark": (30, 10), "exported model": (40, 8)},
}
TOGETHER = {
    **{"training": (6, 1), "token cache": (5, 1), "stream state": (5, 1)},
    **{"evaluation": (4, 0), "exported model": (4, 1)},
}
LOST_RANKS = {"frozen": signal.SIGSTOP, "killed": signal.SIGKILL}

KINDS = {
    **{f"killed: {x}": Kind(partial(killed, x), *n) for x, n in KILLED.items()},
    **{f"full disk: {x}": Kind(partial(full, x), *n) for x, n in FULL.items()},
    **{f"damaged file: {x}": Kind(partial(damaged, x), *n) for x, n in DAMAGED.items()},
    **{f"several writers: {x}": Kind(partial(together, x), *n) for x, n in TOGETHER.items()},
    # tests/train/test_lost_ranks.py has them in CI.
    **{f"lost rank: {x}": Kind(partial(lost_rank, how), 3, 0) for x, how in LOST_RANKS.items()},
}


def work_in(folder: str) -> None:
    """Make all temporary files there, which a process of a pool would leave behind."""
    tempfile.tempdir = folder


def run_trial(kind: str, seed: int, number: int) -> str:
    """One trial in a folder of its own; its draws depend on these three alone."""
    # As in the processes that are started: more threads would add up numbers in another order.
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        return KINDS[kind].trial(random.Random(f"{seed} {kind} {number}"), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
