"""Against maintained implementations that run on a CPU."""

import importlib.util

import pytest
import torch
import transformers
from torch.testing import assert_close

from experiments.baselines import Attention, Mamba2, make_mixer
from flash_frac.ops import delta_scan
from flash_frac.ops.delta.passes import unit_triangular_inverse

# Two float32 computations of the same thing, a few dozen roundings apart.
FLOAT32 = {"rtol": 1e-5, "atol": 2e-6}


def torch_path_of(package):
    """Skips where transformers would hand CPU tensors to the kernels of a package instead."""
    present = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(present, reason=f"{package} takes the place of torch here")


@torch_path_of("mamba_ssm")
def test_mamba2_of_transformers():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=24, n_groups=1, expand=2,
        conv_kernel=4, chunk_size=32, num_hidden_layers=1, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    ours = Mamba2(32, num_heads=4, head_dim=16, state_size=24)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 150, 32)
    assert_close(ours(x)[0], theirs(x), **FLOAT32)


def assert_equal_delta_rule(rule):
    """Our gated delta rule against a peer's, with a state at the start and at the end."""
    q, k = torch.randn(2, 2, 150, 3, 8)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    v, beta, log_decay = torch.randn(2, 150, 3, 16), torch.rand(2, 150, 3), -torch.rand(2, 150, 3)
    state = torch.randn(2, 3, 8, 16)
    expected = rule(q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True)
    actual = delta_scan(q * 8**-0.5, k, v, beta, log_decay, initial_state=state)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, **FLOAT32)


@torch_path_of("fla")
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_delta_rule_of_transformers(form):
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    assert_equal_delta_rule(getattr(peer, f"torch_{form}_gated_delta_rule"))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_delta_rule_of_fla(form):
    peer = pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)
    assert_equal_delta_rule(getattr(peer, f"naive_{form}_gated_delta_rule"))


@pytest.mark.parametrize("kind, options", [("Llama", {"bias": True}), ("Qwen3", {"qk_norm": True})])
def test_attention_of_transformers(kind, options):
    folder = kind.lower()
    peer = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        attention_bias="bias" in options, rope_theta=1e4, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = getattr(peer, f"{kind}Attention")(config, layer_idx=0).eval()
    ours = Attention(32, num_heads=4, head_dim=8, **options)
    for name, parameter in ours.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 150, 32)
    positions = getattr(peer, f"{kind}RotaryEmbedding")(config)(x, torch.arange(150)[None])
    assert_close(ours(x)[0], theirs(x, positions, None)[0], **FLOAT32)


PEERS = {
    "mamba2": ("mamba_ssm.modules.mamba2", "Mamba2", {"d_model": 16, "headdim": 2, "d_state": 32}),
    "mamba3": ("mamba_ssm.modules.mamba3", "Mamba3", {"d_model": 16, "headdim": 2, "d_state": 32}),
    "gated_deltanet": (
        "fla.layers.gated_deltanet",
        "GatedDeltaNet",
        {"hidden_size": 16, "num_heads": 16, "head_dim": 2},
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_parameters_are_the_published_ones(name):
    """Names, shapes, and at the start the same mean and spread over 64 layers."""
    module, kind, sizes = PEERS[name]
    peer = getattr(pytest.importorskip(module, exc_type=ImportError), kind)
    options = {} if name == "gated_deltanet" else {"state_size": 32}
    ours = [make_mixer(name, 16, num_heads=16, head_dim=2, **options) for _ in range(64)]
    theirs = [peer(**sizes) for _ in range(64)]
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours[0], theirs[0])]
    assert shapes[0] == shapes[1]
    for key in shapes[0]:
        a, b = (torch.stack([m.state_dict()[key] for m in ms]) for ms in (ours, theirs))
        spread = b.std().item()
        assert a.std().item() == pytest.approx(spread, rel=0.15, abs=1e-7)
        # Five standard errors of the difference of two means.
        assert (a.mean() - b.mean()).abs() <= 5 * (2 / b.numel()) ** 0.5 * spread + 1e-7


@pytest.mark.parametrize("case", ["random", "equal keys", "alternating keys"])
def test_inverse_is_that_of_linear_algebra(case):
    """Equal keys with beta 1 fill the triangle with ones, where powers of it reach 1e17."""
    if case == "random":
        below = torch.randn(3, 64, 64) / 8
    else:
        sign = 1.0 if case == "equal keys" else -1.0
        below = torch.ones(3, 64, 64) * sign ** torch.arange(64)
    exact = torch.linalg.inv(below.double().tril(-1) + torch.eye(64, dtype=torch.float64))
    error = (unit_triangular_inverse(below) - exact).abs().max()
    assert error <= 1e-6 * exact.abs().max()


def test_inverse_has_its_gradient():
    below = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit_triangular_inverse, below)
