"""Models in graphs, on a CPU with the tape of tests/inference, and the bytes of their states."""

import sys

import pytest
import torch

from flash_frac.bench import parts, peers
from flash_frac.bench.models import PARTS, measure_models, with_modes
from flash_frac.bench.parts import CPU_SIZES
from flash_frac.bench.recording import (
    is_recorded,
    read,
    record_decoding,
    record_prefill,
    rewind,
    state_bytes,
    tensors_of,
)
from flash_frac.bench.subjects import Subject, build, our_subject
from flash_frac.inference import graphs
from flash_frac.models import FracConfig
from tests.inference.tape import Tape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs would be a GPU's")
CONFIG = FracConfig(
    vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, frac_num_modes=4
)
MAKERS = {"qwen3": peers.qwen3, "transformers_mamba2": peers.transformers_mamba2}


@pytest.fixture
def taped(monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "Graph", Tape)


def peer_subject(name):
    torch.manual_seed(0)
    peer = MAKERS[name](CONFIG)
    cache = peer.make_cache and (lambda size: peer.make_cache(peer.config, size))
    model = build(peer.config, torch.float32, "cpu")
    return Subject(peer.name, model, peer.note, peer.shape, None, peer.prefill_options, cache)


@pytest.mark.parametrize("name", MAKERS)
def test_recorded_decoding_gives_the_tokens_of_generate(taped, name):
    """Whatever a replay left in the cache, the next begins where the prompt ended."""
    subject = peer_subject(name)
    ids = subject.tokens(2, 9)
    expected = subject.model.generate(ids, max_new_tokens=6)[:, 9:]
    decode = record_decoding(subject.model, ids, 5, subject.make_cache)
    first, second = decode(), decode()
    assert first.shape == (2, 5)
    if subject.make_cache is not None:
        # The others go on from where they were, which takes as long.
        assert torch.equal(first, expected[:, 1:]) and torch.equal(second, first)


@pytest.mark.parametrize("name", [*MAKERS, "ours"])
def test_recorded_prefill_is_the_eager_one(taped, name):
    subject = our_subject(build(CONFIG, torch.float32, "cpu"), None)
    if name != "ours":
        subject = peer_subject(name)
    ids = subject.tokens(1, 24)
    prefill = record_prefill(subject.model, ids, subject.prefill_options)
    with torch.no_grad():
        expected = subject.model.base_model(input_ids=ids)[0][:, -1]
    for _ in range(2):
        torch.testing.assert_close(prefill(), expected)


def test_rows_of_graphs_stand_beside_eager_rows(taped, monkeypatch):
    """A peer that runs has both modes in prefill and decoding, and the bytes of its state."""
    for name in ("fla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    subject = peer_subject("qwen3")
    failures = []
    rows = parts.prefill_rows(subject, CPU_SIZES, failures)
    rows += parts.decode_rows(subject, CPU_SIZES, failures)
    assert not failures
    for passed, sizes in (("prefill", 2), ("decode", 2)):
        modes = [row["mode"] for row in rows if row["pass"] == passed]
        assert modes == ["eager", "graph"] * sizes
    # Keys and values of one layer, two heads of 16 channels, float32.
    assert {row["T"]: row["state_bytes"] for row in rows} == {16: 16 * 256, 32: 32 * 256}
    labels = {row["implementation"].partition(" (")[2] for row in rows if row["mode"] == "graph"}
    assert labels == {"sdpa, graph)"}


def test_of_ours_the_generator_is_the_graph(taped):
    model = build(CONFIG, torch.float32, "cpu")
    assert is_recorded(model)
    failures = []
    rows = parts.decode_rows(our_subject(model, None), CPU_SIZES, failures)
    modes = {row["implementation"].partition(" (")[2]: row["mode"] for row in rows}
    assert modes == {"Generator)": "graph", "generate)": "graph", "transformers' loop)": "eager"}
    # Of a layer: 4 heads of 4 modes and 16 channels, and the window of the convolution.
    assert not failures and len({row["state_bytes"] for row in rows}) == 1
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not is_recorded(model)


def test_our_longest_prompts_are_recorded_as_those_of_peers(taped, monkeypatch):
    monkeypatch.setattr(parts, "LONGEST_RECORDED", 20)
    subject = our_subject(build(CONFIG, torch.float32, "cpu"), None)
    rows = parts.prefill_rows(subject, CPU_SIZES, [])
    found = [(row["T"], row["implementation"].partition(" (")[2], row["mode"]) for row in rows]
    assert found == [
        (16, "eager)", "eager"),
        (16, "Generator)", "graph"),
        (32, "eager)", "eager"),
        (32, "Generator)", "eager"),
        (32, "graph)", "graph"),
    ]


def test_a_static_cache_is_set_back():
    subject = peer_subject("qwen3")
    assert subject.make_cache is not None
    cache = subject.make_cache(12)
    with torch.no_grad():
        read(subject.model, subject.tokens(1, 9), cache)
    rewind(cache, 4)
    assert int(cache.get_seq_length()) == 4


def test_bytes_of_a_state():
    x = torch.zeros(3, 5, dtype=torch.bfloat16)

    class Layer:
        def __init__(self):
            self.state = {"recurrent": x, "conv": (x, torch.zeros(7)), "none": None}
            self.owner = self

    assert state_bytes([Layer(), x]) == 30 + 28
    assert sorted(y.numel() for y in tensors_of(Layer())) == [7, 15]


def test_another_number_of_modes():
    assert with_modes(CONFIG, 8).frac_num_modes == 8
    assert with_modes(CONFIG, 8).hidden_size == CONFIG.hidden_size
    sizes = {"parts": ["prefill"], "peers": [], "failures": []}
    rows = [x for y in measure_models(CONFIG, sizes=CPU_SIZES, modes=[8], **sizes) for x in y]
    assert {(row["implementation"][:14], row["M"]) for row in rows} == {
        ("flash_frac 66.", 4),
        ("flash_frac M 8", 8),
    }


def test_growth(monkeypatch, capsys):
    """Prompts longer than a piece; what is printed is made of the rows."""
    monkeypatch.setattr("flash_frac.inference.generator.PIECE", 24)
    subject = our_subject(build(CONFIG, torch.float32, "cpu"), None)
    rows = PARTS["growth"](subject, CPU_SIZES, [])
    assert [(row["pass"], row["T"]) for row in rows] == [("growth", 16), ("growth", 64)]
    change = abs(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"] - 1)
    assert f"from 16 to 64 tokens: linear within {change:.1%}" in capsys.readouterr().out
    assert not PARTS["growth"](peer_subject("qwen3"), CPU_SIZES, [])
