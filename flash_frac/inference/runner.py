"""The device side of the engine: staging rows, in which prompts are read, and slots.

Only `Runner.collect` waits for the device. On a GPU it copies tokens one step late, while the
device computes the next ones; tokens computed beyond a sequence's end are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from flash_frac.inference import graphs
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.scheduling import Job, Piece, next_piece, rounded_length, rounded_rows
from flash_frac.inference.slots import (
    EVERYTHING,
    LONGEST_RECORDED,
    Sent,
    Slots,
    floats,
    pinned,
    upload,
)
from flash_frac.inference.state import empty_cache
from flash_frac.models import FracForCausalLM

logger = logging.get_logger(__name__)

# Maximum number of prompts in one piece.
STAGING_ROWS = 8
# KV columns that the first pieces of prompts attend to; later ones attend to 4, 16, ... times as
# many.
LEAST_ROOM = 1024

Top = tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """A job's next token; -1 if its logits were not finite."""

    job: Job
    token: int
    logprob: float
    top: Top


class _Launched(NamedTuple):
    """Tokens that the device is computing.

    Attributes:
        jobs: by row; None for rows whose token nobody needs.
        chosen: (2, rows), from `Slots.choose`, on its way to the host.
        asking: jobs that asked for the most likely tokens.
        top: (2, asking, most), from `Slots.most_likely`, on its way to the host.
    """

    jobs: Sequence[Job | None]
    chosen: Sent
    asking: Sequence[Job]
    top: Sent | None

    def tokens(self) -> list[Token]:
        chosen = self.chosen.get()
        tokens, logprobs = chosen[0].tolist(), floats(chosen[1])
        tops: dict[Job, Top] = {}
        if self.top is not None:
            top = self.top.get()
            for job, ids, values in zip(self.asking, top[0].tolist(), floats(top[1]), strict=True):
                pairs = zip(ids, values, strict=True)
                tops[job] = tuple(pairs)[: job.request.logprobs]
        return [
            Token(job, token, logprob, tops.get(job, ()) if tops else ())
            for job, token, logprob in zip(self.jobs, tokens, logprobs, strict=True)
            if job is not None
        ]


class Runner:
    """Reads prompts and decodes, for jobs that come and go.

    Args:
        max_length: maximum tokens of a sequence; None without full-attention layers.
        late: copy tokens to the host one step late.
        prefixes: prefix cache, bound to the model, or None.
        The rest as in `Engine`.
    """

    def __init__(
        self,
        model: FracForCausalLM,
        *,
        num_slots: int,
        max_length: int | None,
        piece: int,
        late: bool,
        prefixes: PrefixStates | None,
    ) -> None:
        example = empty_cache(model, 1)
        # One more column: a sequence of one new token is computed two steps beyond its end.
        size = 0 if max_length is None else max_length + 1
        self._slots = Slots(model, example, num_slots, size)
        self._staging = Slots(model, example, min(STAGING_ROWS, num_slots), size)
        self._piece, self._late, self._prefixes = piece, late, prefixes
        self._max_length, self._rooms = max_length, _rooms(max_length)
        # Jobs by row: for staging, only the rows in use; for slots, all rows.
        self.reading: list[Job] = []
        self.rows: list[Job | None] = [None] * num_slots
        self.num_running = self.num_read = self.num_steps = 0
        self._versions: list[int] = []
        self._new: list[_Launched] = []
        self._due: list[_Launched] = []
        num_graphs = len(self._step_sizes()) + len(list(self._piece_shapes()))
        self._recorder = graphs.Recorder(model, most_graphs=num_graphs)
        self._recorder.bind(self._slots, self._staging)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._slots.nbytes + self._staging.nbytes

    @property
    def jobs(self) -> list[Job]:
        """Jobs whose prompt is being read or that have a slot."""
        return [*self.reading, *(job for job in self.rows if job is not None)]

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute or to collect."""
        return bool(self.reading or self.num_running or self._due)

    @property
    def has_room(self) -> bool:
        """Whether the next piece can hold another prompt, and a slot will be free for it."""
        num = len(self.reading)
        if num == self._staging.num_rows or self.num_running + num == len(self.rows):
            return False
        piece = self._next_piece()
        if piece is None:
            return True
        rows = rounded_rows(num) if self._records else num
        return len(piece.jobs) == rows and (num + 1) * piece.length <= self._piece

    @property
    def _records(self) -> bool:
        """Whether the model is recorded, so that pieces should have few shapes."""
        return self._recorder.bindings is not None

    def _next_piece(self) -> Piece | None:
        return next_piece(self.reading, self._piece, self._max_length, rounds=self._records)

    def look(self) -> None:
        """Check whether the model has changed; warn if it cannot be recorded.

        Jobs that are running have been paused, and their states may be of several weights.
        """
        for job in self.jobs:
            job.keeps = False
        self._recorder.look()
        self._follow_weights()
        if self._slots.device.type in graphs.DEVICES and self._recorder.obstacle is not None:
            logger.warning_once(
                "the engine decodes without CUDA graphs, which is much slower, because the model "
                f"cannot be recorded: {self._recorder.obstacle}"
            )

    def _follow_weights(self) -> None:
        """Drop cached prefixes if weights were changed in place, which torch counts."""
        model = self._recorder.model
        weights = itertools.chain(model.parameters(), model.buffers())
        versions = [x._version for x in weights if not x.is_inference()]
        if self._prefixes is not None and versions != self._versions:
            self._prefixes.bind(model, renew=True)
        self._versions = versions

    def warm_up(self) -> None:
        """Record all graphs that serving needs; nothing may be running."""
        assert not self.has_work
        self.look()
        if not self._records:
            return
        # Each is run eagerly, recorded and replayed, on unused rows.
        for num in self._step_sizes():
            for _ in range(3):
                self._run(num)
        for num, length, padded, room in self._piece_shapes():
            ids = torch.zeros(num, length, dtype=torch.long)
            mask = torch.arange(length).ne(0).repeat(num, 1) if padded else None
            for _ in range(3):
                self._staging.cache.lengths.zero_()
                self._run_recorded(ids, mask, [0] * num, room)

    def _step_sizes(self) -> list[int]:
        """Numbers of rows of decode steps."""
        return sorted({self._fewest_rows(n) for n in range(1, len(self.rows) + 1)})

    def _piece_shapes(self) -> Iterator[tuple[int, int, bool, int]]:
        """Rows, length, whether there is a mask, and KV columns of all pieces that have graphs."""
        for num, length in itertools.product((1, 2, 4, 8), range(1, LONGEST_RECORDED + 1)):
            fits = num <= self._staging.num_rows and num * length <= self._piece
            if fits and _is_recorded(length, self._piece):
                masks = (True, False) if num * length == self._piece else (True,)
                rooms = [room for room in self._rooms if length <= room]
                yield from ((num, length, mask, room) for room in rooms for mask in masks)

    def begin(self, job: Job) -> None:
        """Give a job a staging row, with the state of the longest cached prefix of its prompt."""
        job.row = len(self.reading)
        self.reading.append(job)
        # Clear the whole row: an earlier sequence may have left NaN.
        self._staging.cache.clear_row(job.row)
        if self._prefixes is None:
            return
        if (found := self._prefixes.longest(job.prompt)) is not None:
            found.restore(self._staging.cache, job.row)
            job.num_read = job.num_cached = found.num_tokens
            if not job.num_unread:
                assert found.logits is not None
                self._staging.logits[job.row] = found.logits
        boundaries = job.request.boundaries
        job.cut_at(self._prefixes.wanted(job.prompt, job.num_read, boundaries))

    def leave(self, job: Job, *, keep: bool = False) -> None:
        """Remove a job.

        Args:
            keep: add its state to the prefix cache.
        """
        if job in self.reading:
            self.reading.remove(job)
            self._close_gaps()
            return
        if keep:
            self._keep(job, self._slots)
        self.num_running -= 1
        self._free(job.row, job.num_read)

    def launch(self) -> None:
        """Read one piece of prompts, and decode one token for each slot in use."""
        # The prefix cache holds the logits after their prompts.
        self._join([job for job in self.reading if not job.num_unread])
        if piece := self._next_piece():
            self._read(piece)
            self._join([job for job in piece.jobs if not job.num_unread])
        if self.num_running:
            self._advance()

    def collect(self) -> list[Token]:
        """Wait for the tokens that are due, and return them."""
        if self._late and self._new:
            ready, self._due, self._new = self._due, self._new, []
        else:
            ready, self._due, self._new = self._due + self._new, [], []
        return [token for launched in ready for token in launched.tokens()]

    def _read(self, piece: Piece) -> None:
        """Read the next tokens of prompts as one left-padded batch."""
        ids = torch.zeros(len(piece.jobs), piece.length, dtype=torch.long)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, (job, num) in enumerate(zip(piece.jobs, piece.counts, strict=True)):
            begin, left = job.num_read, piece.length - num
            ids[row, left:] = torch.from_numpy(job.prompt[begin : begin + num])
            mask[row, left:] = True
        self._run_piece(ids, mask, [job.num_read for job in piece.jobs])
        for job, num in zip(piece.jobs, piece.counts, strict=True):
            job.num_read += num
            self.num_read += num
            if job.num_read == job.cuts[-1]:
                job.cuts.pop()
                self._keep(job, self._staging)

    def _run_piece(self, ids: Tensor, mask: Tensor, counts: Sequence[int]) -> None:
        """Read ids (B, T), except where mask (B, T) is False, after `counts` tokens.

        A mask costs time, but recording another graph costs more. So only the largest pieces, into
        which all long prompts are cut, have graphs without a mask.
        """
        num, length = ids.shape
        device, is_whole = self._staging.device, bool(mask.all())
        if not self._records or not _is_recorded(length, self._piece):
            # The mask stays on the host, where checking it needs no synchronisation.
            masks = [] if is_whole else [pinned(mask, device)]
            self._staging.read(None, counts, upload(ids, device), *masks)
            return
        room = next(room for room in self._rooms if max(counts) + length <= room)
        without = is_whole and num * length == self._piece
        self._run_recorded(ids, None if without else mask, counts, room)

    def _run_recorded(
        self, ids: Tensor, mask: Tensor | None, counts: Sequence[int], room: int
    ) -> None:
        """Read ids with a graph; tokens attend to `room` columns."""
        inputs = [upload(x, self._staging.device) for x in (ids, mask) if x is not None]
        function = partial(self._staging.read, room, counts)
        self._recorder.run(("piece", *ids.shape, mask is not None, room), function, inputs)

    def _keep(self, job: Job, slots: Slots) -> None:
        """Add the state of a job to the prefix cache."""
        tokens = job.read()
        # A job of one new token has read one more, which the host does not know yet.
        if self._prefixes is None or not job.keeps or len(tokens) < job.num_read:
            return
        slots.cache.counts[job.row] = job.num_read
        logits = slots.logits[job.row] if job.num_read == len(job.prompt) else None
        self._prefixes.put(tokens, slots.cache, job.row, logits=logits)

    def _join(self, jobs: Sequence[Job]) -> None:
        """Choose the first tokens of jobs whose prompts are read, and give them slots."""
        if not jobs:
            return
        for job in jobs:
            request = job.request
            self._staging.set_row(job.row, request.sampling, job.seed, job.prompt)
        num = max(job.row for job in jobs) + 1
        joining = {job.row: job for job in jobs}
        chosen = self._staging.choose(num)
        self._note(self._staging, [joining.get(row) for row in range(num)], chosen)
        for job in jobs:
            row = self.rows.index(None)
            self._slots.copy_row(row, self._staging, job.row, job.num_read)
            self._slots.used[row] = True
            self.rows[row], job.row = job, row
            self.num_running += 1
        self.reading = [job for job in self.reading if job not in jobs]
        self._close_gaps()

    def _close_gaps(self) -> None:
        """Move the jobs that are being read to the first staging rows, in order."""
        for row, job in enumerate(self.reading):
            if job.row != row:
                # Copy all columns: an earlier sequence may have left NaN.
                self._staging.copy_row(row, self._staging, job.row)
                job.row = row

    def _advance(self) -> None:
        """Run one decode step of all slots in use."""
        num = self._fewest_rows(self.num_running)
        if any(self.rows[num:]):
            self._move_down(num)
        jobs = self.rows[:num]
        self._note(self._slots, jobs, self._run(num))
        self.num_steps += 1
        for job in jobs:
            if job is not None:
                job.num_read += 1

    def _run(self, num: int) -> Tensor:
        chosen = self._recorder.run(("step", num), partial(self._slots.advance, num))
        assert chosen is not None
        return chosen

    def _fewest_rows(self, num: int) -> int:
        """The smallest power of two that is at least `num`, or the number of slots."""
        return min(1 << (num - 1).bit_length(), len(self.rows))

    def _move_down(self, num: int) -> None:
        """Move all running jobs to the first `num` rows."""
        for row in range(num, len(self.rows)):
            job = self.rows[row]
            if job is not None:
                target = self.rows.index(None)
                self._slots.copy_row(target, self._slots, row, job.num_read)
                self._slots.used[target] = True
                self.rows[target], job.row = job, target
                self._free(row, job.num_read)

    def _free(self, row: int, num_tokens: int) -> None:
        """Give a slot back."""
        self.rows[row] = None
        self._slots.used[row] = False
        # A token that nobody waited for may have left NaN in keys and values, and the next sequence
        # overwrites only as many columns as it has tokens.
        self._slots.cache.clear_row(row, num_tokens)

    def _note(self, slots: Slots, jobs: Sequence[Job | None], chosen: Tensor) -> None:
        """Send the chosen tokens to the host, and the most likely ones for jobs that asked."""
        asking = [row for row, job in enumerate(jobs) if job is not None and job.request.logprobs]
        top, askers = None, [jobs[row] for row in asking]
        if asking:
            most = max(job.request.logprobs or 0 for job in askers if job is not None)
            top = Sent(slots.most_likely(asking, most))
        self._new.append(_Launched(jobs, Sent(chosen), askers, top))  # pyright: ignore[reportArgumentType]


def _rooms(max_length: int | None) -> list[int]:
    """Numbers of KV columns for which pieces have graphs; few, because every shape needs each."""
    if max_length is None:
        return [EVERYTHING]
    found = itertools.accumulate(itertools.repeat(4), int.__mul__, initial=LEAST_ROOM)
    return [*itertools.takewhile(lambda room: 2 * room <= max_length, found), max_length]


def _is_recorded(length: int, most: int) -> bool:
    """Whether pieces of this length are recorded: frequent ones that are not too long."""
    return length <= LONGEST_RECORDED and length == min(rounded_length(length), most)
