"""FracLayer and DeltaLayer: mixers that map a tensor to a tensor; default sizes of both."""

import pytest
import torch
from torch import nn

import flash_frac
from flash_frac.layers import DeltaLayer, DeltaMixer, FracLayer, FracMixer
from flash_frac.layers.sizes import default_num_heads

LAYERS = [FracLayer, DeltaLayer]
each_layer = pytest.mark.parametrize("layer_class", LAYERS)


@each_layer
def test_drop_in(layer_class):
    """In nn.Sequential, in a residual stream, and with a gradient for every parameter."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.LayerNorm(64), layer_class(64), nn.SiLU(), layer_class(d_model=64))
    x = torch.randn(2, 20, 64)
    y = x + net(x)
    assert isinstance(y, torch.Tensor) and y.shape == x.shape
    y.square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@each_layer
def test_the_mixer_has_the_state(layer_class):
    torch.manual_seed(1)
    layer = layer_class(hidden_size=64).double()
    x = torch.randn(2, 20, 64).double()
    first, state = layer.mixer(x[:, :7])
    rest, _ = layer.mixer(x[:, 7:], state=state)
    torch.testing.assert_close(torch.cat([first, rest], 1), layer(x))


@each_layer
def test_arguments_reach_the_mixer(layer_class):
    torch.manual_seed(1)
    layer = layer_class(64, num_heads=2, head_dim=8, conv_kernel=3).double()
    assert (layer.mixer.num_heads, layer.mixer.head_dim, layer.mixer.conv_kernel) == (2, 8, 3)
    x = torch.randn(1, 20, 64).double()
    packed = layer(x, cu_seqlens=torch.tensor([0, 8, 20]))
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :8]), layer(x[:, 8:])], 1))
    mask = torch.ones(1, 20)
    mask[:, :8] = 0
    torch.testing.assert_close(layer(x, attention_mask=mask)[:, 8:], layer(x[:, 8:]))
    slow = layer(x, elapsed=torch.full((1, 20), 3.0))
    assert not torch.allclose(slow, layer(x))


def test_time_keeps_its_precision():
    layer = FracLayer(64).to(torch.bfloat16)
    assert layer.mixer.base_log_tau.dtype == torch.float32
    assert layer(torch.randn(1, 5, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_names_at_the_top():
    assert flash_frac.FracLayer is FracLayer and flash_frac.DeltaLayer is DeltaLayer


@pytest.mark.parametrize(
    ("width", "heads", "channels", "keys"),
    [
        *((256, 4, 128, 48), (768, 12, 128, 48), (1024, 16, 128, 48), (2048, 16, 256, 96)),
        *((64, 1, 128, 48), (20, 1, 40, 15), (200, 2, 200, 75), (4096, 32, 256, 96)),
    ],
)
def test_default_sizes(width, heads, channels, keys):
    """Those of the paper's model at 2048, of FracConfig's defaults at 768."""
    with torch.device("meta"):
        frac, delta = FracMixer(width), DeltaMixer(width)
    assert (frac.num_heads, frac.head_dim, frac.num_modes) == (heads, channels, 16)
    assert (delta.num_heads, delta.head_dim, delta.value_dim) == (heads, keys, 2 * keys)


def test_every_width_has_heads():
    assert all(width % default_num_heads(width) == 0 for width in range(1, 3000))


def test_one_size_follows_from_the_other():
    assert FracMixer(60, num_heads=3).head_dim == 40
    assert FracMixer(60, head_dim=20).num_heads == 6
    assert DeltaMixer(60, num_heads=3).head_dim == 15


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: FracMixer(64, num_heads=3), "head_dim must be given, because .* 128 .*heads .3"),
        (lambda: FracMixer(64, head_dim=3), "num_heads must be given, because .* 128 .*dim .3"),
        (lambda: DeltaMixer(66), "head_dim must be given, because the default of 49.5 channels"),
        (lambda: FracMixer(0), "hidden_size must be at least 1, got 0"),
        (lambda: FracMixer(64, num_heads=0), "num_heads must be at least 1, got 0"),
        (lambda: DeltaMixer(64, conv_kernel=0), "conv_kernel must be at least 1, got 0"),
        (lambda: FracLayer("256"), "hidden_size must be an integer, got '256'"),
        (lambda: DeltaMixer(256.0), "hidden_size must be an integer, got 256.0"),
        (lambda: FracMixer(64, num_heads="2"), "num_heads must be an integer, got '2'"),
    ],
)
def test_sizes_that_do_not_fit(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: FracLayer(), "FracLayer needs one width: FracLayer.256., d_model or hidden"),
        (lambda: DeltaLayer(64, hidden_size=64), "DeltaLayer needs one width"),
        (lambda: FracLayer(64, d_state=16), "FracLayer has no argument d_state; use num_modes"),
        (lambda: DeltaLayer(64, d_conv=4), "DeltaLayer has no argument d_conv; use conv_kernel"),
        (lambda: DeltaLayer(64, d_state=4), r"no argument d_state; see help\(DeltaLayer\)"),
        (lambda: FracLayer(256, d_model=256), "^FracLayer needs one width: .*; got 2"),
    ],
)
def test_arguments_of_other_libraries(make, problem):
    with pytest.raises(TypeError, match=problem):
        make()


@pytest.mark.parametrize("mixer_class", [FracMixer, DeltaMixer])
def test_a_state_of_another_kind(mixer_class):
    mixer, x = mixer_class(64), torch.zeros(1, 2, 64)
    state = mixer.empty_state(1)
    for wrong, kind in ((state.recurrent, "Tensor"), (tuple(state), "tuple"), ([state], "list")):
        with pytest.raises(ValueError, match=f"state must be the MixerState .* got {kind}"):
            mixer(x, state=wrong)
