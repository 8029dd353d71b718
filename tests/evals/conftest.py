import socket

import pytest
import torch

from flash_frac.data import byte_tokenizer
from tests.evals.known import tiny_frac


def _save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a small Frac model of bytes."""
    return _save(tiny_frac(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def uniform(tmp_path_factory):
    """A folder with a model to which all 259 tokens are equally likely."""
    model = tiny_frac()
    torch.nn.init.zeros_(model.lm_head.weight)
    return _save(model, tmp_path_factory.mktemp("uniform"))


@pytest.fixture
def no_network(monkeypatch):
    """Whoever looks for the network fails."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked for: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
