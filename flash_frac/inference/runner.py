"""What the engine has on the device: staging rows in which prompts are read, and slots.

Nothing here waits for the device but `Runner.collect`. On a GPU it reads tokens one step late,
while the device computes the next ones; what a sequence computes beyond its end is dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_frac.inference.graphs import Recorder
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.scheduling import Job, Piece, next_piece, rounded_length, rounded_rows
from flash_frac.inference.slots import LONGEST_RECORDED, Sent, Slots, floats, pinned, upload
from flash_frac.inference.state import empty_cache
from flash_frac.models import FracForCausalLM

# Prompts that are read side by side at most.
STAGING_ROWS = 8
# Graphs that are kept: those of steps, and those of pieces of many shapes.
MOST_GRAPHS = 128
# Columns of keys that the shortest pieces look at; longer ones at 2, 4, 8, ... times as many.
LEAST_ROOM = 1024

Top = tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """A token that a job has got: -1 if its logits were no numbers."""

    job: Job
    token: int
    logprob: float
    top: Top


class _Launched(NamedTuple):
    """Tokens that the device was asked for.

    Attributes:
        jobs: by row; None where nobody waits for a token.
        chosen: (2, rows), what `Slots.choose` returned, on its way to the host.
        asking: jobs that asked for the most likely tokens.
        top: (2, asking, most), what `Slots.most_likely` returned for them, on its way.
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
        max_length: tokens of a sequence at most; None if no layer sees all tokens.
        late: read tokens one step late.
        prefixes: states of prompts that were read before, bound to the model, or None.
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
        # One column more: a sequence of one new token is computed two steps beyond its end.
        self._room = None if max_length is None else max_length + 1
        size = self._room or 0
        self._slots = Slots(model, example, num_slots, size)
        self._staging = Slots(model, example, min(STAGING_ROWS, num_slots), size)
        self._recorder = Recorder(model, most_graphs=MOST_GRAPHS)
        self._recorder.bind(self._slots, self._staging)
        self._piece, self._late, self._prefixes = piece, late, prefixes
        # The jobs by row: of staging rows those in use, of slots all.
        self.reading: list[Job] = []
        self.rows: list[Job | None] = [None] * num_slots
        self.num_running = self.num_read = self.num_steps = 0
        self._new: list[_Launched] = []
        self._due: list[_Launched] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._slots.nbytes + self._staging.nbytes

    @property
    def jobs(self) -> list[Job]:
        """Those that are read or have a slot."""
        return [*self.reading, *(job for job in self.rows if job is not None)]

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute or to collect."""
        return bool(self.reading or self.num_running or self._due)

    @property
    def has_room(self) -> bool:
        """Whether the next piece can take one more prompt, for which there will be a slot."""
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
        return next_piece(self.reading, self._piece, self._room, rounds=self._records)

    def look(self) -> None:
        """Look whether the model has changed since it was recorded."""
        self._recorder.look()

    def warm_up(self) -> None:
        """Record steps of all numbers of rows, and pieces of all shapes; nothing may be running."""
        assert not self.has_work
        self.look()
        if not self._records:
            return
        # Each is run as written, recorded and replayed, on rows that nobody uses.
        for num in sorted({self._fewest_rows(n) for n in range(1, len(self.rows) + 1)}):
            for _ in range(3):
                self._run(num)
        for num, length in itertools.product((1, 2, 4, 8), range(1, self._piece + 1)):
            short = num <= self._staging.num_rows and length <= self._piece // num
            if short and _is_recorded(length, self._piece) and length < (self._room or math.inf):
                ids = torch.zeros(num, length, dtype=torch.long)
                padded = torch.arange(length).ne(0).repeat(num, 1)
                whole = [torch.ones_like(padded)] if num * length == self._piece else []
                for mask in 3 * [padded, *whole]:
                    self._staging.cache.lengths.zero_()
                    self._run_piece(ids, mask, [0] * num)

    def begin(self, job: Job) -> None:
        """Give a job a staging row, with the state of the longest known beginning of its prompt."""
        job.row = len(self.reading)
        self.reading.append(job)
        # All of it: what another sequence left behind may be no numbers.
        self._staging.cache.clear_row(job.row)
        if self._prefixes is None:
            return
        if (found := self._prefixes.longest(job.prompt)) is not None:
            found.restore(self._staging.cache, job.row)
            job.num_read = found.num_tokens
            if not job.num_unread:
                assert found.logits is not None
                self._staging.logits[job.row] = found.logits
        boundaries = job.request.boundaries
        job.cut_at(self._prefixes.wanted(job.prompt, job.num_read, boundaries))

    def leave(self, job: Job, *, keep: bool = False, clear: bool = False) -> None:
        """Take a job away.

        Args:
            keep: keep its state among the prefix states.
            clear: leave zeros behind, because there may be something that is no number.
        """
        if job in self.reading:
            self.reading.remove(job)
            self._close_gaps()
            return
        if keep:
            self._keep(job, self._slots)
        self.rows[job.row] = None
        self.num_running -= 1
        self._slots.used[job.row] = False
        if clear:
            self._slots.cache.clear_row(job.row)

    def launch(self) -> None:
        """Read one piece of prompts, and let each sequence in a slot have its next token."""
        # The logits after their prompts were kept.
        self._join([job for job in self.reading if not job.num_unread])
        if piece := self._next_piece():
            self._read(piece)
            self._join([job for job in piece.jobs if not job.num_unread])
        if self.num_running:
            self._advance()

    def collect(self) -> list[Token]:
        """Tokens that are there, or should be: waits for them."""
        if self._late and self._new:
            ready, self._due, self._new = self._due, self._new, []
        else:
            ready, self._due, self._new = self._due + self._new, [], []
        return [token for launched in ready for token in launched.tokens()]

    def _read(self, piece: Piece) -> None:
        """Read the next tokens of prompts, side by side and behind padding."""
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
        """Read ids (B, T), without those that mask (B, T) leaves out, after `counts` tokens.

        A mask costs time, and another graph costs more when it is recorded. So graphs without a
        mask are those of the largest pieces, which all long prompts are cut into.
        """
        num, length = ids.shape
        device, is_whole = self._staging.device, bool(mask.all())
        if not self._records or not _is_recorded(length, self._piece):
            # A mask stays on the host, where one can look at it without a wait.
            masks = [] if is_whole else [pinned(mask, device)]
            self._staging.read(None, counts, upload(ids, device), *masks)
            return
        inputs = [ids] if is_whole and num * length == self._piece else [ids, mask]
        needed, room = max(counts) + length, LEAST_ROOM
        while room < min(needed, self._room or 0):
            room *= 2
        kind = ("piece", num, length, len(inputs), room)
        function = partial(self._staging.read, room, counts)
        self._recorder.run(kind, function, [upload(x, device) for x in inputs])

    def _keep(self, job: Job, slots: Slots) -> None:
        """Keep the state of a job among the prefix states."""
        tokens = job.read()
        # A job of one new token has read one more that is not known yet.
        if self._prefixes is None or len(tokens) < job.num_read:
            return
        slots.cache.counts[job.row] = job.num_read
        logits = slots.logits[job.row] if job.num_read == len(job.prompt) else None
        self._prefixes.put(tokens, slots.cache, job.row, logits=logits)

    def _join(self, jobs: Sequence[Job]) -> None:
        """Choose the first tokens of jobs whose prompts were read, and give them slots."""
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
        """Let the jobs that are read have the first staging rows, in order."""
        for row, job in enumerate(self.reading):
            if job.row != row:
                # All columns: what is left of another sequence may be no numbers.
                self._staging.copy_row(row, self._staging, job.row)
                job.row = row

    def _advance(self) -> None:
        """One step of all slots in use."""
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
        """The smallest power of two, or all, that is not less."""
        return min(1 << (num - 1).bit_length(), len(self.rows))

    def _move_down(self, num: int) -> None:
        """Let all running jobs have one of the first rows."""
        for row in range(num, len(self.rows)):
            job = self.rows[row]
            if job is not None:
                target = self.rows.index(None)
                self._slots.copy_row(target, self._slots, row, job.num_read)
                self._slots.used[target], self._slots.used[row] = True, False
                self.rows[target], self.rows[row], job.row = job, None, target

    def _note(self, slots: Slots, jobs: Sequence[Job | None], chosen: Tensor) -> None:
        """Send chosen tokens to the host, and the most likely ones to those that asked."""
        asking = [row for row, job in enumerate(jobs) if job is not None and job.request.logprobs]
        top, askers = None, [jobs[row] for row in asking]
        if asking:
            most = max(job.request.logprobs or 0 for job in askers if job is not None)
            top = Sent(slots.most_likely(asking, most))
        self._new.append(_Launched(jobs, Sent(chosen), askers, top))  # pyright: ignore[reportArgumentType]


def _is_recorded(length: int, most: int) -> bool:
    """Whether pieces of this length are recorded: they come up often, and are not too long."""
    return length <= LONGEST_RECORDED and length == min(rounded_length(length), most)
