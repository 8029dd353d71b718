"""Signs of life of all ranks, in the store where they met, whatever the communication backend.

A thread of each rank counts up a number in the store. Each rank watches the next one, and the one
after that if the next is silent, so the work does not grow with the number of ranks. Nobody ends a
run for it, except while ranks wait for each other's tokens, where no backend has a timeout.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from transformers.utils import logging

from flash_frac.train.parallel import LostRankError

Result = TypeVar("Result")
logger = logging.get_logger(__name__)
# A rank is silent after this many seconds; in this time it counts six times.
SILENCE_SECONDS = 60.0
_BEATS, _HOST, _DONE = "beats/{}", "host/{}", "done/{}"
# Makes the count of a rank that has left negative.
_GONE = -(1 << 40)
# A process may train several times.
_numbers = itertools.count()


@contextmanager
def beating(args: Any) -> Iterator[Heartbeat | None]:
    """A block in which this rank gives signs of life and watches another; None with one rank."""
    if args.world_size == 1:
        yield None
        return
    store: Any = PrefixStore(f"flash_frac/train_{next(_numbers)}", _get_default_store())
    heart = Heartbeat(store, args)
    ended = threading.Event()
    # A waiting client blocks its connection, so the thread has its own.
    beats = threading.Thread(target=heart.run, args=(store.clone(), ended), daemon=True)
    beats.start()
    try:
        yield heart
    finally:
        ended.set()
        # Not longer, because the store may be lost.
        beats.join(2)


class Heartbeat:
    """This rank's view of the others.

    Args:
        store: a store of torch.distributed that all ranks share.
        args: the training arguments.
    """

    def __init__(self, store: Any, args: Any) -> None:
        self.store, self.args = store, args
        self.silence = min(SILENCE_SECONDS, args.ddp_timeout)
        self._named: set[int] = set()
        # By rank, its count and when it last changed.
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = time.monotonic()
        store.set(_HOST.format(args.process_index), socket.gethostname())

    def run(self, store: Any, ended: threading.Event) -> None:
        """Count and watch until the event; the store may be lost before."""
        own = _BEATS.format(self.args.process_index)
        with suppress(RuntimeError):
            while not ended.wait(self.silence / 6):
                store.add(own, 1)
                self.look(store)
            store.add(own, _GONE)

    def look(self, store: Any) -> None:
        """Log the ranks after this one that are silent, each once."""
        now, count = time.monotonic(), self.args.world_size
        if now - self._looked > self.silence / 2:
            # This rank was frozen itself, and perhaps all of them.
            self._seen.clear()
        self._looked = now
        for step in range(1, count):
            rank = (self.args.process_index + step) % count
            beats = store.add(_BEATS.format(rank), 0)
            before, since = self._seen.get(rank, (None, now))
            if beats != before:
                self._seen[rank] = beats, now
            if beats >= 0 and (beats != before or now - since < self.silence):
                return
            if beats >= 0 and rank not in self._named:
                self._named.add(rank)
                logger.warning(f"{self._where(rank)} has been silent for {now - since:.0f} s")

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work that the first rank does first, then the first of each node, then the others.

        A wait ends when the rank that is waited for dies, or is silent for ddp_timeout: the work
        itself may take longer. All ranks return together.
        """
        rank, node = self.args.process_index, self.args.local_process_index
        before = (0 if node == 0 else rank - node) if rank else None
        if before is not None:
            self._await(before, before)
        try:
            result = work()
        finally:
            self.store.set(_DONE.format(rank), "")
        if rank == 0:
            for other in range(1, self.args.world_size):
                self._await(other, other)
            self.store.set(_DONE.format("all"), "")
        else:
            self._await("all", 0)
        return result

    def _await(self, what: int | str, rank: int) -> None:
        """Wait for the work of a rank, or for what it says about the work of all."""
        before, since, pause = None, time.monotonic(), 0.02
        while True:
            beats = self.store.add(_BEATS.format(rank), 0)
            if self.store.check([_DONE.format(what)]):
                return
            now = time.monotonic()
            if beats != before:
                before, since = beats, now
            if beats < 0 or now - since > self.args.ddp_timeout:
                state = f"been silent for {now - since:.0f} s" if beats >= 0 else "ended"
                raise LostRankError(
                    f"{self._where(rank)} has {state} while other ranks waited for it to tokenise: "
                    "see its last lines of output, stop the remaining processes, and run the same "
                    "command again"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _where(self, rank: int) -> str:
        key = _HOST.format(rank)
        host = self.store.get(key).decode() if self.store.check([key]) else "an unknown machine"
        return f"rank {rank} on {host}"
