"""Branches of a recording: their dependencies, and unchanged results."""

from contextlib import contextmanager

import pytest
import torch

from flash_frac.layers import branches
from flash_frac.layers.branches import in_branches


class Stream:
    """A stream that writes down what happens on it, and what it waits for."""

    device = "cuda:0"

    def __init__(self, name, tape):
        self.name, self.tape = name, tape

    def wait_stream(self, other):
        self.tape.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def tape(monkeypatch):
    """What happens while streams of this kind record."""
    tape = []
    streams = [Stream("main", tape)]

    @contextmanager
    def stream(chosen):
        streams.append(chosen)
        yield
        streams.pop()

    def side(device, number):
        return Stream(f"side {number}", tape)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(branches, "_stream", side)
    return tape


def test_each_function_is_a_branch_of_a_recording(tape):
    def run(name):
        tape.append(f"{name} on {torch.cuda.current_stream().name}")
        return name

    with torch.no_grad():
        assert in_branches(lambda: run("a"), lambda: run("b"), lambda: run("c")) == ["a", "b", "c"]
    assert tape == [
        "side 1 waits for main",
        "side 2 waits for main",
        "a on main",
        "b on side 1",
        "c on side 2",
        "main waits for side 1",
        "main waits for side 2",
    ]


def test_gradients_stay_on_one_stream(tape):
    """The backward pass of a recorded training step is then on one stream, too."""
    assert in_branches(lambda: 1, lambda: 2) == [1, 2]
    assert tape == []


def test_without_a_recording_there_are_no_streams():
    with torch.no_grad():
        assert in_branches(lambda: 1, lambda: 2) == [1, 2]


@pytest.mark.gpu
def test_a_replay_gives_the_same():
    """Long branches that read one tensor, and memory that is given back and taken again."""
    x = torch.randn(512, 512, device="cuda") / 512**0.5

    def step(y):
        a, b, c = in_branches(lambda: y @ x, lambda: torch.sin(y).cos(), lambda: y * 2)
        return (a + b - c) / 3

    def steps():
        y = x
        for _ in range(8):
            y = step(y)
        return y

    with torch.no_grad():
        expected, graph = steps(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = steps()
        for _ in range(20):
            y.zero_()
            graph.replay()
            assert torch.equal(y, expected)
