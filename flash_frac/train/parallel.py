"""What the processes of a run do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list

Answer = TypeVar("Answer")


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


def context_group(size: int, rank: int) -> tuple[Any, tuple[int, int]]:
    """The group of ranks that share this one's sequences, and (rank in it, size)."""
    if size == 1:
        return None, (0, 1)
    # Every process must make every group, in the same order.
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    return groups[rank // size], (rank % size, size)
