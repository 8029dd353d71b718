"""One token of convolution, controls and scan, against the torch forms in float64."""

import pytest
import torch
import torch.nn.functional as F

from flash_frac.ops import ControlSettings, causal_conv, frac_scan, frac_step
from flash_frac.ops.control.triton import kernel_settings
from flash_frac.ops.decode.triton import (
    control_step_op,
    conv_step_op,
    fused_control_step,
    fused_conv_step,
)
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES
from tests.kernels.test_control_kernel import SWITCHES, random_inputs, torch_form

KERNEL_SWITCHES = [name for name, settings in SWITCHES.items() if settings.prior == "asymptotic"]
GPU = DEVICE != "cpu"
# Errors of the controls are shared by all channels of a head: enough heads for luck to even out.
BATCH, HEADS = (64, 16) if GPU else (8, 5)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def guarded(x, margin=64):
    """A copy of x between two margins of NaN, and the whole."""
    whole = x.new_full((x.numel() + 2 * margin,), torch.nan)
    inside = whole[margin:-margin].view(x.shape)
    return inside.copy_(x), whole


def assert_guarded(x, whole):
    """Nothing but x was written to."""
    assert x.isfinite().all() and whole.isnan().sum() == whole.numel() - x.numel()


def token(
    settings, *, modes=8, channels=17, dtype=torch.float32, batch=BATCH, heads=HEADS, own_tau=False
):
    """u, what `controls_from_logits` takes of one token, and the state."""
    sizes = {"batch": batch, "time": 1, "heads": heads, "modes": modes, "own_tau": own_tau}
    inputs = [x.detach() for x in random_inputs(settings, **sizes, dtype=dtype)]
    dyn, rw = (x[:, 0] for x in inputs[:2])
    u = normal(batch, heads, channels, dtype=dtype)
    return u, dyn, rw, *inputs[2:], normal(batch, heads, modes, channels)


def torch_step(inputs, settings, mask=None):
    """y and the new state."""
    u, dyn, rw, *shared, state = inputs
    logits = (dyn[:, None], rw[:, None], *shared)
    found = torch_form(logits, settings, None if mask is None else mask[:, None])
    return frac_step(u, *(x[:, 0] for x in found), state, backend="torch")


def check_step(inputs, settings, mask=None):
    exact = torch_step([x.double() for x in inputs], settings, mask)
    usual = torch_step(inputs, settings, mask)
    state, whole = guarded(inputs[-1])
    y = fused_control_step(*inputs[:-1], state, settings=settings, mask=mask)
    assert_as_good(y, usual.y, exact.y, "y")
    assert_as_good(state, usual.state, exact.state, "state")
    assert y.is_contiguous()
    assert_guarded(state, whole)
    return y, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_SWITCHES)
def test_every_switch(name, dtype):
    check_step(token(SWITCHES[name], dtype=dtype), SWITCHES[name])


def test_heads_with_timescales_of_their_own():
    check_step(token(ControlSettings(), own_tau=True), ControlSettings())


@pytest.mark.parametrize("channels", [16, 17, 100, 256])
@pytest.mark.parametrize("modes", [4, 8, 16, 32])
def test_sizes(modes, channels):
    batch, heads = (BATCH, HEADS) if GPU else (5, 3)
    inputs = token(ControlSettings(), modes=modes, channels=channels, batch=batch, heads=heads)
    check_step(inputs, ControlSettings())


@pytest.mark.parametrize("modes", [1, 5, 31])
@pytest.mark.parametrize("normalization", ["softmax", "sigmoid", "none"])
def test_modes_that_fill_no_block(modes, normalization):
    settings = ControlSettings(normalization=normalization)
    check_step(token(settings, modes=modes, channels=3), settings)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_is_an_identity_step(dtype):
    settings = ControlSettings()
    inputs = token(settings)
    mask = torch.arange(BATCH, device=DEVICE) % 3 != 0
    _, state = check_step(inputs, settings, mask.to(dtype))
    assert torch.equal(state[~mask], inputs[-1][~mask])
    assert not (state[mask] == inputs[-1][mask]).flatten(1).all(1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_skip", [False, True])
def test_gate(with_skip, dtype):
    settings = ControlSettings()
    inputs = token(settings, channels=20, dtype=dtype)
    gate = normal(BATCH, 2 * HEADS * 20, dtype=dtype).chunk(2, -1)[1]
    skip = normal(HEADS, 20) if with_skip else None

    def gated(inputs, gate, skip):
        u, y = inputs[0], torch_step(inputs, settings).y
        y = y if skip is None else y + skip * u
        return (y * F.silu(gate + 0.5).view(u.shape)).to(u.dtype)

    usual = gated(inputs, gate, skip)
    wide = [x.double() for x in inputs]
    exact = gated(wide, gate.double(), None if skip is None else skip.double())
    got = fused_control_step(*inputs, settings=settings, gate=gate, gate_bias=0.5, skip=skip)
    assert_as_good(got, usual, exact, "z")


def test_many_tokens_are_a_scan():
    settings, length = ControlSettings(), 6
    tokens = [token(settings, batch=3, heads=3) for _ in range(length)]
    shared, initial = tokens[0][3:-1], tokens[0][-1]
    u, dyn, rw = (torch.stack([t[i] for t in tokens], 1) for i in range(3))
    results = []
    for dtype in (torch.float32, torch.float64):
        found = torch_form([x.to(dtype) for x in (dyn, rw, *shared)], settings)
        start = initial.to(dtype)
        results.append(frac_scan(u.to(dtype), *found, initial_state=start, backend="recurrent"))
    state = initial.clone()
    steps = [fused_control_step(*t[:3], *shared, state, settings=settings) for t in tokens]
    assert_as_good(torch.stack(steps, 1), results[0].y, results[1].y, "y")
    assert_as_good(state, results[0].state, results[1].state, "state")


def conv_inputs(channels, taps, *, batch=3, dtype=torch.float32, bias=True, wide_window=False):
    """x is half of a projection; the parameters are float32, as under autocast."""
    x = normal(batch, 2 * channels, dtype=dtype).chunk(2, -1)[0]
    window = normal(batch, channels, taps - 1, dtype=dtype)
    window = window.float() if wide_window else window
    return x, normal(channels, 1, taps), normal(channels) if bias else None, window


def torch_conv(x, weight, bias, window):
    u, window = causal_conv(x[:, None], weight, bias, window=window, backend="torch")
    return u[:, 0], window


def check_conv(inputs, mask=None):
    exact = torch_conv(*widen(inputs))
    usual, shifted = torch_conv(*inputs)
    window, whole = guarded(inputs[-1])
    u = fused_conv_step(*inputs[:-1], window, mask=mask)
    assert_as_good(u, usual, exact[0], "u")
    assert u.is_contiguous()
    kept = (
        inputs[-1] if mask is None else torch.where(mask[:, None, None] != 0, shifted, inputs[-1])
    )
    assert torch.equal(window, shifted.to(window.dtype) if mask is None else kept)
    assert_guarded(window, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("channels", [33, 200])
def test_conv(channels, taps, dtype):
    check_conv(conv_inputs(channels, taps, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv_without_bias_and_with_a_window_of_its_own_dtype(dtype):
    check_conv(conv_inputs(300, 4, dtype=dtype, bias=False, wide_window=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_keeps_the_window(dtype):
    check_conv(conv_inputs(40, 4, batch=4), torch.tensor([1, 0, 0, 1]).to(DEVICE, dtype))


def test_many_tokens_are_a_convolution():
    x, weight, bias, window = conv_inputs(20, 4)
    x = normal(3, 7, 20)
    whole, last = causal_conv(x, weight, bias, window=window, backend="torch")
    exact = causal_conv(*(t.double() for t in (x, weight, bias)), window=window.double()).u
    steps = torch.stack([fused_conv_step(x[:, t], weight, bias, window) for t in range(7)], 1)
    assert_as_good(steps, whole, exact, "u")
    assert torch.equal(window, last)


@pytest.mark.parametrize("masked", [False, True])
def test_operators_are_registered_well(masked):
    settings = ControlSettings()
    mask = torch.tensor([1, 0, 1], device=DEVICE) if masked else None
    conv = conv_inputs(5, 3, bias=not masked)
    torch.library.opcheck(conv_step_op.registered, (*conv, mask))
    inputs = token(settings, batch=3, heads=2, modes=3, channels=5)
    gate = (normal(3, 20)[:, :10], 0.5, normal(2, 5)) if masked else (None, 0.0, None)
    norm = (None, None, False)
    arguments = (*inputs, mask, *gate, *norm, *kernel_settings(settings))
    torch.library.opcheck(control_step_op.registered, arguments)


def test_compiles_in_one_graph():
    """The states that the caller holds are updated by the compiled code too."""
    settings = ControlSettings()
    x, weight, bias, window = conv_inputs(10, 4)
    _, *rest, state = token(settings, batch=3, heads=2, modes=3, channels=5)

    def decode(x, window, state):
        u = fused_conv_step(x, weight, bias, window).unflatten(-1, (2, 5))
        return fused_control_step(u, *rest, state, settings=settings)

    states = [(window.clone(), state.clone()) for _ in range(2)]
    addresses = [t.data_ptr() for t in states[1]]
    expected = decode(x, *states[0])
    got = torch.compile(decode, fullgraph=True, backend="aot_eager")(x, *states[1])
    torch.testing.assert_close((got, *states[1]), (expected, *states[0]))
    assert [t.data_ptr() for t in states[1]] == addresses


@pytest.mark.skipif(not GPU, reason="needs CUDA graphs")
def test_replays_in_a_graph():
    settings = ControlSettings()
    x, weight, bias, window = conv_inputs(32, 4)
    _, *rest, state = token(settings, batch=3, heads=2, modes=8, channels=16)

    def decode(window, state):
        u = fused_conv_step(x, weight, bias, window).unflatten(-1, (2, 16))
        return fused_control_step(u, *rest, state, settings=settings)

    states = [(window.clone(), state.clone()) for _ in range(2)]
    for _ in range(3):
        expected = decode(*states[0])
    decode(*states[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(*states[1])
    for _ in range(2):
        graph.replay()
    assert torch.equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_errors():
    settings = ControlSettings()
    conv, inputs = conv_inputs(6, 4), token(settings, batch=2, heads=2, modes=4, channels=6)
    with pytest.raises(ValueError, match="fused_control_step needs the asymptotic prior"):
        fused_control_step(*inputs, settings=ControlSettings(prior="exact"))
    with pytest.raises(ValueError, match=r"fused_conv_step has no gradient.*torch\.no_grad"):
        fused_conv_step(conv[0], conv[1].requires_grad_(), *conv[2:])
    with pytest.raises(ValueError, match=r"fused_control_step has no gradient.*torch\.no_grad"):
        fused_control_step(*inputs[:3], inputs[3].requires_grad_(), *inputs[4:], settings=settings)
    with torch.no_grad():
        fused_conv_step(*conv)
        fused_control_step(*inputs, settings=settings)
        with pytest.raises(ValueError, match=r"window must have shape \(3, 6, 3\)"):
            fused_conv_step(*conv[:3], conv[3][:2])
        with pytest.raises(ValueError, match=r"state must have shape .* and be contiguous"):
            state = inputs[-1].transpose(2, 3).contiguous().transpose(2, 3)
            fused_control_step(*inputs[:-1], state, settings=settings)
        with pytest.raises(ValueError, match=r"rw_logits must have shape \(2, 16\)"):
            fused_control_step(*inputs[:2], inputs[1], *inputs[3:], settings=settings)
        with pytest.raises(ValueError, match="cannot run here"):
            fused_conv_step(*(t.double() for t in conv))


@pytest.mark.parametrize("how", ["transposed", "half of a projection"])
def test_strided_u_is_refused(how):
    settings = ControlSettings()
    u, *rest = token(settings, batch=2, heads=2, modes=4, channels=6)
    u = normal(2, 6, 2).transpose(1, 2) if how == "transposed" else normal(2, 4, 6)[:, :2]
    with pytest.raises(ValueError, match=r"u must have shape \(2, 2, 6\) and be contiguous"):
        fused_control_step(u, *rest, settings=settings)
