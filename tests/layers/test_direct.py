"""Tokens read without module calls: the same numbers, and only if no hook would miss them."""

import pytest
import torch

from flash_frac.layers import FracMixer, RMSNorm
from flash_frac.layers.direct import read_directly, reads_directly
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models import block as blocks
from flash_frac.models.cache import read_state
from flash_frac.ops import ControlSettings
from tests.kernels.devices import DEVICE

OPTIONS = {
    "as published": {},
    "other options": {"rw_norm": True, "bank": "per_head"},
    "other switches": {
        "use_D": False,
        "conv_bias": False,
        "gate_bias": 0.3,
        "settings": ControlSettings(normalization="sigmoid", beta="exact_zoh"),
    },
}


def make(**options):
    torch.manual_seed(0)
    options = {"num_heads": 2, "head_dim": 8, "num_modes": 4, "initializer_range": 0.3} | options
    mixer = FracMixer(12, **options, backend="triton").to(DEVICE).eval()
    if mixer.D is not None:
        torch.nn.init.normal_(mixer.D)
    norm = RMSNorm(12, backend="triton").to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    return mixer, norm


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_triton_reads_what_forward_computes(options):
    """To the last bit, from an empty state and on from there."""
    mixer, norm = make(**options)
    x = torch.randn(2, 41, 12, device=DEVICE)
    state = None
    for piece in x.split([33, 8], 1):
        assert reads_directly(mixer, piece, norm)
        mixed, after = mixer(norm(piece), state=state)
        y, new = read_directly(mixer, piece, norm, state)
        assert torch.equal(y, piece + mixed)
        assert torch.equal(new.recurrent, after.recurrent)
        assert torch.equal(new.conv, after.conv)
        state = after


@torch.no_grad()
def test_triton_does_not_go_past_those_who_watch():
    mixer, norm = make()
    x = torch.randn(1, 5, 12, device=DEVICE)
    assert reads_directly(mixer, x, norm)
    with torch.enable_grad():
        assert not reads_directly(mixer, x, norm)
    assert not reads_directly(mixer, x[:, :1], norm) and not reads_directly(mixer, x[:0], norm)
    for part in (mixer, norm, mixer.in_proj, mixer.conv1d, mixer.out_norm):
        handle = part.register_forward_hook(lambda *_: None)
        assert not reads_directly(mixer, x, norm)
        handle.remove()
    mixer.in_proj._hf_hook = object()
    assert not reads_directly(mixer, x, norm)
    del mixer.in_proj._hf_hook
    mixer.out_proj.bias = torch.nn.Parameter(torch.zeros(12))
    assert not reads_directly(mixer, x, norm)
    for changed in ({"conv_kernel": 1}, {"settings": ControlSettings(prior="exact")}):
        assert not reads_directly(make(**changed)[0], x, norm)


@torch.no_grad()
def test_triton_blocks_read_directly(monkeypatch):
    """Without padding, packing and elapsed times; the cache is written all the same."""
    config = FracConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, frac_num_modes=4
    )
    torch.manual_seed(0)
    model = FracForCausalLM(config).to(DEVICE).eval()
    read, calls = blocks.read_directly, []
    monkeypatch.setattr(blocks, "read_directly", lambda *x: calls.append(1) or read(*x))
    ids = torch.randint(3, 31, (2, 9), device=DEVICE)
    output = model(ids, use_cache=True)
    assert len(calls) == 2 and output.past_key_values.get_seq_length() == 9
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(ids, attention_mask=mask)
    assert len(calls) == 2
    monkeypatch.setattr(blocks, "reads_directly", lambda *x: False)
    general = model(ids, use_cache=True)
    assert torch.equal(general.logits, output.logits)
    for n in range(2):
        mine, theirs = (read_state(x.past_key_values, n) for x in (output, general))
        assert torch.equal(mine.recurrent, theirs.recurrent) and torch.equal(mine.conv, theirs.conv)


@torch.no_grad()
def test_triton_refuses_the_cache_of_another_batch():
    """Kernels would read beyond its memory, or the cache would take one row for all of its own."""
    config = FracConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, frac_num_modes=4
    )
    model = FracForCausalLM(config).to(DEVICE).eval()
    ids = torch.randint(3, 31, (4, 5), device=DEVICE)
    for batch, other in ((2, 1), (2, 4)):
        cache = model(ids[:batch], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=rf"state.conv must have shape \({other}, "):
            model(ids[:other], past_key_values=cache)
