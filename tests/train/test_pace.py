"""A slow rank is named, with its machine; the others are not."""

import os
import socket
import time

import pytest
import torch
from torch import nn

from flash_frac.data import PackedDataset
from flash_frac.models.block import FracBlock
from flash_frac.train.monitor import LOG_NAME, read_lines
from flash_frac.train.pace import Pace, compare, describe_slow, slow_ranks
from tests.train.runs import finish, start_together

SECONDS = 0.05


def test_what_is_counted():
    layer = nn.Identity()
    pace = Pace([layer], torch.device("cpu"))

    def batches():
        for _ in range(4):
            time.sleep(0.01)
            yield torch.zeros(1)

    source = batches()
    for _ in range(2):
        timed = pace.timed(source)
        for batch in (next(timed), next(timed)):
            layer(batch)
    layer.eval()(torch.zeros(1))
    waited, computed = pace.take()
    # Two batches in each of two steps.
    assert 0.02 <= waited < 0.04 and 0 < computed < 0.01
    assert pace.take() == (0.0, 0.0)


def test_the_slow_rank_is_described():
    seconds = [(0.0, 1.0), (0.0, 1.2), (0.1, 1.3), (0.0, 1.0)]
    assert compare(seconds) == {
        "rank_seconds/median": 1.0,
        "rank_seconds/slowest": pytest.approx(1.4),
        "rank_seconds/slowest_rank": 2,
    }
    assert slow_ranks(seconds) == {2} and slow_ranks([(0.0, 1.0), (0.0, 1.2)]) == set()
    line = describe_slow(2, seconds, ["a", "a", "b", "b"])
    assert line.startswith("rank 2 on b is slow: 1400.0 ms per step of its own, 100.0 ms of it")


def wait_in_layers():
    if os.environ["RANK"] == "1":
        forward = FracBlock.forward
        FracBlock.forward = lambda *args, **kwargs: [
            time.sleep(SECONDS),
            forward(*args, **kwargs),
        ][1]


def wait_for_data():
    if os.environ["RANK"] == "1":
        read = PackedDataset.__getitem__
        PackedDataset.__getitem__ = lambda *args: [time.sleep(SECONDS), read(*args)][1]


@pytest.mark.parametrize(
    ("slowly", "arguments"),
    [(wait_in_layers, ["--fsdp", "true", "--gradient_checkpointing"]), (wait_for_data, [])],
    ids=["layers", "data"],
)
def test_a_slow_rank_is_named(write_recipe, tmp_path, slowly, arguments):
    path = write_recipe(eval_strategy="no", save_strategy="no", max_steps=6, logging_steps=2)
    processes = start_together(2, path, *arguments, before=slowly)
    for process in processes:
        finish(process)
    said = processes[0].output.read_text()
    assert said.count(f"rank 1 on {socket.gethostname()} is slow") == 2, said  # of three logs
    assert "rank 0 on" not in said and "is slow" not in processes[1].output.read_text()
    logs = [line for line in read_lines(tmp_path / "run" / LOG_NAME) if "loss" in line]
    for line in logs:
        assert line["rank_seconds/slowest_rank"] == 1
        # Two layers, or two sequences.
        assert line["rank_seconds/slowest"] > 2 * SECONDS
        assert line["rank_seconds/slowest"] > line["rank_seconds/median"] + SECONDS
