"""What the processes of a run do together."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

Answer = TypeVar("Answer")
_SIGNED = "flash_frac/waits_in_vain/{}"
# Ranks find out within the time by which their last steps differed.
ROLL_CALL_SECONDS = 5.0


class LostRankError(RuntimeError):
    """Other processes of the run did not answer; the message names them."""


def on_main(args: Any, find: Callable[[], Answer]) -> Answer:
    """What the first process finds, in all of them; its ValueError is raised in all as well.

    Files are read once, and no process goes another way than the others.
    """
    answer: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            answer[0] = find()
        except ValueError as error:
            answer[1] = str(error)
    found, problem = broadcast_object_list(answer)
    if problem is not None:
        raise ValueError(problem)
    return found


def context_group(size: int, args: Any) -> tuple[Any, tuple[int, int]]:
    """The group of ranks that share this one's sequences, and (rank in it, size)."""
    if size == 1:
        return None, (0, 1)
    rank, timeout = args.process_index, args.ddp_timeout_delta
    # Every process must make every group, in the same order.
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(x, x + size)), timeout=timeout) for x in starts]
    return groups[rank // size], (rank % size, size)


@contextmanager
def meeting(args: Any) -> Iterator[None]:
    """A block in which the processes of a run find each other, within ddp_timeout.

    Trainer waits half an hour on CPUs, whatever ddp_timeout says, unless they have met already.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK")
    try:
        if args.use_cpu and count > 1 and rank is not None and not dist.is_initialized():
            dist.init_process_group(args.ddp_backend or "gloo", timeout=args.ddp_timeout_delta)
        yield
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise LostRankError(
            f"rank {rank} waited in vain for all {count} processes to begin (ddp_timeout is "
            f"{args.ddp_timeout} s): {reason}. Start all of them within that time"
        ) from error


def set_timeout(timeout: timedelta) -> None:
    """How long this process waits for the others, whatever they exchange their tensors by."""
    if dist.is_initialized():
        _set_pg_timeout(timeout)


@contextmanager
def naming_lost_ranks(args: Any) -> Iterator[None]:
    """LostRankError instead of the error that a backend raises when another rank is silent."""
    try:
        yield
    except RuntimeError as error:
        # Errors of gloo have no class of their own, but begin with the file that they are from.
        if args.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        lost = _silent_ranks(args.process_index, args.world_size)
        names = ", ".join(f"rank {rank}" for rank in lost) or "none of the ranks by now"
        raise LostRankError(
            f"rank {args.process_index} waited for the others in vain (ddp_timeout is "
            f"{args.ddp_timeout} s); no answer from: {names}. Look at its machine and its last "
            "lines, end what is left of the run, and start the same command again"
        ) from error


def _silent_ranks(rank: int, count: int) -> list[int]:
    """The ranks that are not here: each one that waits in vain comes and signs its name.

    Without torchrun the first rank keeps the list: if it is silent itself, nobody can read it.
    """
    answers: queue.Queue[list[int]] = queue.Queue()

    def call() -> None:
        absent, deadline = list(range(count)), time.monotonic() + ROLL_CALL_SECONDS
        try:
            store = _get_default_store()
            store.set(_SIGNED.format(rank), "")
            while absent and time.monotonic() < deadline:
                absent = [other for other in absent if not store.check([_SIGNED.format(other)])]
                time.sleep(0.1)
        except RuntimeError:
            absent = [0]
        answers.put(absent)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answers.get(timeout=ROLL_CALL_SECONDS + 2)
    except queue.Empty:
        return [0]
