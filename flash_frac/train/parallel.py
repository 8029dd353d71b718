"""Coordination between the processes of a run."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

Answer = TypeVar("Answer")
# The host name of every rank; empty until `know_hosts` has run.
_hosts: list[str] = []
_SIGNED = "flash_frac/waits_in_vain/{}"
_MEETING = "flash_frac/meeting"
# How long to wait for the other ranks to time out too; their last steps may differ by this much.
ROLL_CALL_SECONDS = 5.0


class LostRankError(RuntimeError):
    """Other processes of the run did not answer; the message names them."""


def on_main(args: Any, find: Callable[[], Answer]) -> Answer:
    """Run `find` in the first process; return its result, or raise its ValueError, in all of them.

    Files are read once, and all processes act on the same answer.
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


def gather_numbers(numbers: Sequence[float], args: Any) -> list[list[float]]:
    """All-gather the numbers of every rank."""
    if args.world_size == 1:
        return [list(map(float, numbers))]
    own = torch.tensor(numbers, dtype=torch.float64, device=args.device)
    all_ranks = [torch.empty_like(own) for _ in range(args.world_size)]
    dist.all_gather(all_ranks, own)
    return torch.stack(all_ranks).tolist()


def know_hosts(args: Any) -> list[str]:
    """The host name of every rank, to locate a rank that is lost later."""
    if args.world_size > 1 and not _hosts:
        found: list[Any] = [None] * args.world_size
        dist.all_gather_object(found, socket.gethostname())
        _hosts.extend(found)
    return _hosts


def context_group(size: int, args: Any) -> tuple[Any, tuple[int, int]]:
    """The group of ranks that share this one's sequences, and (rank in it, size)."""
    if size == 1:
        return None, (0, 1)
    rank, timeout = args.process_index, args.ddp_timeout_delta
    # Every process must create every group, in the same order.
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(x, x + size)), timeout=timeout) for x in starts]
    return groups[rank // size], (rank % size, size)


@contextmanager
def meeting(args: Any) -> Iterator[None]:
    """A block in which the processes of a run rendezvous, within ddp_timeout.

    On CPUs, Trainer would wait half an hour, whatever ddp_timeout says.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK")
    try:
        if count > 1 and rank is not None and not dist.is_initialized():
            _begin(args)
        yield
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise LostRankError(
            f"rank {rank} timed out waiting for all {count} processes to start (ddp_timeout is "
            f"{args.ddp_timeout} s): {reason}. Start all of them within that time"
        ) from error


def _begin(args: Any) -> None:
    """Create the default process group where Trainer would do so wrongly."""
    timeout = args.ddp_timeout_delta
    backend = args.ddp_backend or ("gloo" if args.use_cpu else "nccl")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        store, rank, count = _fresh_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    elif args.use_cpu:
        dist.init_process_group(backend, timeout=timeout)


def _fresh_store(timeout: timedelta) -> tuple[PrefixStore, int, int]:
    """A key-value store without leftovers of dead ranks, this rank, and the number of ranks.

    torchrun keeps one store for all its attempts (torch 2.13), so ranks of a second attempt would
    find the addresses of the first. The first rank therefore picks a fresh prefix for this attempt
    and hands it to the ranks that ask for it. TORCHELASTIC_RESTART_COUNT cannot be the prefix:
    after a fault, only the node that failed increments it.
    """
    store, rank, count = next(iter(rendezvous("env://", timeout=timeout)))
    own, asking, answer = uuid4().hex, f"{_MEETING}/asking/{{}}", f"{_MEETING}/answer/{{}}"
    if rank != 0:
        store.set(asking.format(rank), own)
        store.wait([answer.format(own)], timeout)
        name = store.get(answer.format(own)).decode()
        store.set(f"{_MEETING}/{name}/{rank}", "")
        return PrefixStore(name, store), rank, count
    absent, deadline = set(range(1, count)), time.monotonic() + timeout.total_seconds()
    while absent:
        for other in [x for x in absent if store.check([asking.format(x)])]:
            # The question may be left from an earlier attempt, so wait for the rank to confirm.
            store.set(answer.format(store.get(asking.format(other)).decode()), own)
            if store.check([f"{_MEETING}/{own}/{other}"]):
                absent.discard(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"no answer from {', '.join(f'rank {x}' for x in absent)}")
        time.sleep(0.02)
    return PrefixStore(own, store), rank, count


def set_timeout(timeout: timedelta) -> None:
    """Set how long this process waits for the others, for every communication backend."""
    if dist.is_initialized():
        _set_pg_timeout(timeout)


@contextmanager
def naming_lost_ranks(args: Any) -> Iterator[None]:
    """Turn a backend's error about an unresponsive rank into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own, but start with the path of a gloo source file.
        if args.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        lost = _silent_ranks(args.process_index, args.world_size)
        waited = (
            f"rank {args.process_index} timed out waiting for the other ranks (ddp_timeout is "
            f"{args.ddp_timeout} s)"
        )
        if not lost:
            raise LostRankError(
                f"{waited}, but all of them are alive: one of them took longer than that for its "
                "part of a step. Raise ddp_timeout, and run the same command again"
            ) from error
        names = ", ".join(f"rank {rank}" for rank in lost)
        hosts = sorted({_hosts[rank] for rank in lost if _hosts})
        machine = f"its machine ({', '.join(hosts)})" if hosts else "its machine"
        raise LostRankError(
            f"{waited}; no answer from: {names}. Check {machine} and its last lines of output, "
            "stop the remaining processes, and run the same command again"
        ) from error


def _silent_ranks(rank: int, count: int) -> list[int]:
    """The ranks that do not answer: every rank that times out signs a shared list.

    Without torchrun the first rank holds the list, so nobody can read it if that rank is lost.
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
