"""Contracts of every mixer with a state: splits, causality, padding, packing, gradients."""

import pytest
import torch

from flash_frac.layers import FracMixer
from tests.backends import DEVICE, backends_here, dtype_of, repeat
from tests.layers import test_delta, test_mixer

E = 12
MAKERS = {"frac": test_mixer.make_mixer, "delta": test_delta.make_mixer}


@pytest.fixture(params=backends_here())
def backend(request):
    return request.param


@pytest.fixture(params=MAKERS)
def mixer(request, backend):
    """Every mixer on every backend of the table, in the widest dtype that it takes."""
    return MAKERS[request.param](dtype_of(backend), backend=backend).to(DEVICE)


def normal(mixer, *shape):
    return torch.randn(*shape, dtype=torch.float64).to(next(mixer.children()).weight)


@pytest.mark.parametrize("cuts", [repeat([20]), [1, 2, 3, 4, 39], repeat([0, 17])], ids=str)
def test_any_split_is_the_whole(mixer, cuts):
    """Single tokens, which are steps, among the pieces."""
    x = normal(mixer, 2, 40, E)
    whole, final = mixer(x)
    state, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        y, state = mixer(x[:, start:end], state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state.recurrent, final.recurrent)
    torch.testing.assert_close(state.conv, final.conv)


def test_causality(mixer):
    x, changed = (normal(mixer, 2, 40, E) for _ in range(2))
    changed[:, :33] = x[:, :33]
    y, y_changed = mixer(x)[0], mixer(changed)[0]
    assert torch.equal(y[:, :33], y_changed[:, :33]) and not torch.equal(y, y_changed)


def test_padding_is_an_identity_step(mixer):
    """Wherever it lies: real tokens and the state after them are those of the row without it."""
    x, mask = normal(mixer, 4, 24, E), torch.ones(4, 24, dtype=torch.long, device=DEVICE)
    mask[0, :9], mask[1, 13:], mask[2, 5:8], mask[2, 20] = 0, 0, 0, 0
    mask[3, ::2] = 0
    start = mixer(normal(mixer, 4, 6, E))[1]
    y, state = mixer(x, state=start, attention_mask=mask)
    for row in range(4):
        real = mask[row] == 1
        alone, alone_state = mixer(x[row : row + 1, real], state=start.select([row]))
        torch.testing.assert_close(y[row, real], alone[0])
        torch.testing.assert_close(state.recurrent[row], alone_state.recurrent[0])
        torch.testing.assert_close(state.conv[row], alone_state.conv[0])
    # One padded token at a time, as in decoding with rows that have ended.
    _, same = mixer(x[:, :1], state=state, attention_mask=torch.zeros_like(mask[:, :1]))
    assert torch.equal(same.recurrent, state.recurrent) and torch.equal(same.conv, state.conv)


def test_packed_is_separate(mixer):
    x, ends = normal(mixer, 1, 30, E), torch.tensor([0, 7, 7, 8, 30], device=DEVICE)
    start = mixer(normal(mixer, 4, 5, E))[1]
    y, state = mixer(x, state=start, cu_seqlens=ends)
    for n in range(4):
        part = x[:, ends[n] : ends[n + 1]]
        alone, alone_state = mixer(part, state=start.select([n]))
        torch.testing.assert_close(y[:, ends[n] : ends[n + 1]], alone)
        torch.testing.assert_close(state.recurrent[n], alone_state.recurrent[0])
        torch.testing.assert_close(state.conv[n], alone_state.conv[0])


def test_gradients_flow_through_both_states(mixer):
    x = normal(mixer, 1, 12, E)
    whole = torch.autograd.grad(mixer(x)[0][:, 6:].sum(), list(mixer.parameters()))
    _, state = mixer(x[:, :6])
    parts = torch.autograd.grad(mixer(x[:, 6:], state=state)[0].sum(), list(mixer.parameters()))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)
    y, _ = mixer(x[:, 6:], state=state.detach())
    names = [name for name, _ in mixer.named_parameters()]
    name = "in_proj.weight" if isinstance(mixer, FracMixer) else "v_proj.weight"
    cut = torch.autograd.grad(y.sum(), mixer.get_parameter(name))[0]
    assert not torch.allclose(cut, parts[names.index(name)])
