"""Carried states: reading documents in segments equals reading them whole."""

import pytest
import torch

from flash_frac.ops.testing import relative_error
from flash_frac.train.stateful import CarriedStates
from tests.errors import assert_as_good
from tests.models.hybrids import KINDS, make_kind

LANES, TOKENS = 3, 48
# Where documents begin in each lane: with a segment, inside of one, one after another; or once.
STARTS = [[0, 12, 13, 30], [0], [0, 5, 24, 36, 47]]


def segment(ids, step, length):
    """The next tokens of all lanes as a row, its boundaries, and each lane's first sequence."""
    begin, bounds, first = step * length, [], []
    for lane, starts in enumerate(STARTS):
        first.append(len(bounds))
        inside = [s - begin for s in starts if begin <= s < begin + length]
        bounds += [lane * length + s for s in (0, *inside)]
    row = ids[:, begin : begin + length].reshape(1, -1)
    bounds = torch.tensor([*bounds, LANES * length], device=ids.device)
    return row, bounds, torch.tensor(first, device=ids.device)


def read_segments(model, ids, length, path=None):
    """Hidden states of all lanes, read by segments; with a path, states are saved and loaded."""
    carried, outputs = CarriedStates(model.config), []
    for step in range(TOKENS // length):
        row, bounds, first = segment(ids, step, length)
        cache = carried.cache(first, len(bounds) - 1)
        out = model.model(row, cu_seqlens=bounds, past_key_values=cache, use_cache=True)
        carried.keep(out.past_key_values, len(bounds) - 1)
        outputs.append(out.last_hidden_state.view(LANES, length, -1))
        if path is not None:
            carried.save(path)
            carried = CarriedStates(model.config)
            carried.load(path, torch.device("cpu"))
    return torch.cat(outputs, 1), carried


@pytest.fixture
def ids():
    return torch.randint(3, 61, (LANES, TOKENS), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_segments_are_documents_read_whole(kind, ids):
    model = make_kind(kind)
    if "attention" in model.config.mixer_types:
        with pytest.raises(ValueError, match=r"stateful must be false .* full attention \(layers"):
            CarriedStates(model.config)
        return
    whole = torch.empty(LANES, TOKENS, 16, dtype=torch.float64)
    for lane, starts in enumerate(STARTS):
        for begin, end in zip(starts, [*starts[1:], TOKENS], strict=True):
            out = model.model(ids[lane : lane + 1, begin:end], use_cache=False)
            whole[lane, begin:end] = out.last_hidden_state[0]
    # Segments shorter than the window of seven tokens, and longer.
    for length in (4, 12):
        got, _ = read_segments(model, ids, length)
        assert relative_error(got, whole) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"attn_implementation": "eager"}, {"sliding_window": 1}])
def test_what_is_carried_has_a_fixed_size_and_is_saved_exactly(ids, tmp_path, changes):
    model = make_kind("sliding", **changes)
    got, carried = read_segments(model, ids, 12)
    again, loaded = read_segments(model, ids, 12, tmp_path / "carried.safetensors")
    assert torch.equal(got, again)
    before = model.config.sliding_window - 1
    for windows in (carried.windows, loaded.windows):
        assert windows.real.shape == (LANES, before) and windows.seen.tolist() == [18, 48, 1]
        assert all(
            x.shape == (LANES, 2, before, 8) for pair in windows.layers.values() for x in pair
        )
        # A document of one token has no other before it.
        assert not windows.real[2, :-1].any()


def test_the_graph_ends_with_the_segment(ids):
    """What is carried is a constant, and keys of the next segment reach its own tokens only."""
    model = make_kind("sliding").train()
    _, carried = read_segments(model, ids, 12)
    tensors = [x for state in carried.states.values() for x in state]
    tensors += [x for pair in carried.windows.layers.values() for x in pair]
    assert len(tensors) == 8 and not any(x.requires_grad for x in tensors)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["sliding", "delta"])
def test_a_gpu_reads_segments_as_a_cpu_does(kind, ids):
    exact, _ = read_segments(make_kind(kind), ids, 12)
    usual, _ = read_segments(make_kind(kind, torch.float32), ids, 12)
    got, _ = read_segments(make_kind(kind, torch.float32).cuda(), ids.cuda(), 12)
    assert_as_good(got.cpu(), usual, exact)


def test_errors_name_the_remedy(ids):
    model = make_kind("sliding")
    with torch.no_grad():
        _, carried = read_segments(model, ids, 12)
    with pytest.raises(ValueError, match="carried states have 3 lanes, but this batch has 2"):
        carried.cache(torch.tensor([0, 1]), 2)
    carried.states = {}
    with pytest.raises(ValueError, match=r"3 lanes.* do not change per_device_train_batch_size"):
        carried.cache(torch.tensor([0, 1]), 2)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"must be 'sdpa' or 'eager' to carry states .* got 'flex"):
        read_segments(model, ids, 12)
