"""Attention layers against explicit sums, long rows with sliding windows, and Qwen3's weights."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.attention import _band, attend_in_blocks
from tests.errors import assert_as_good
from tests.models.conftest import make_model
from tests.models.hybrids import close

exact = torch.testing.assert_close


def written_out(attention, x, *, rotary=None, window=math.inf, length=None, slope=None):
    """Softmax attention of one row x (T, E), token by token."""
    config, rows = attention.config, []
    heads, channels = config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads

    def norm(y, weight):
        return y * (y.square().mean() + config.rms_norm_eps).rsqrt() * weight

    def turn(y, t):
        if rotary is None:
            return y
        angle = t * rotary
        a, b = y.chunk(2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    def part(name, h, t):
        weight = getattr(attention, f"{name}_proj").weight[channels * h : channels * (h + 1)]
        y = weight @ x[t]
        return y if name == "v" else turn(norm(y, getattr(attention, f"{name}_norm").weight), t)

    for t in range(len(x)):
        parts = []
        for h in range(heads):
            q, seen = part("q", h, t), [s for s in range(t + 1) if t - s < window]
            if length is not None and t + 1 > length:
                q = q * (1 + slope * math.log((t + 1) / length))
            keys, values = (torch.stack([part(n, h // group, s) for s in seen]) for n in "kv")
            weights = (keys @ q / math.sqrt(channels)).softmax(0)
            parts.append(weights @ values)
        rows.append(attention.o_proj.weight @ torch.cat(parts))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"attention_positions": "none"}, {}),
        (
            {"attention_positions": "none", "attention_temperature_length": 5},
            {"length": 5, "slope": 1 / math.log(5)},
        ),
        (
            {"attention_temperature_length": 4, "attention_temperature_slope": 0.3},
            {"length": 4, "slope": 0.3},
        ),
        ({"mixer_types": ["sliding_attention"], "sliding_window": 4}, {"window": 4}),
        (
            {
                "mixer_types": ["sliding_attention", "attention"],
                "sliding_window": 3,
                "attention_positions": "none",
                # Of full attention only: a window of fixed size needs none.
                "attention_temperature_length": 2,
                "num_hidden_layers": 2,
            },
            {"window": 3},
        ),
    ],
    ids=["no positions", "temperature", "slope", "sliding", "sliding without positions"],
)
def test_attention_is_the_written_out_sum(fields, expected):
    """With padding inside too, where n counts real tokens."""
    base = {"num_hidden_layers": 1, "mixer_types": ["attention"], "attention_key_value_heads": 1}
    model = make_model(**{**base, **fields}).model
    ids = torch.randint(3, 61, (1, 13), generator=torch.Generator().manual_seed(0))
    block, found = model.layers[0], []
    block.self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    mask = torch.ones(1, 15, dtype=torch.long)
    mask[0, 0] = mask[0, 6] = 0
    padded = torch.zeros(1, 15, dtype=torch.long)
    padded[mask == 1] = ids[0]
    model(ids)
    model(padded, attention_mask=mask)
    rotary = None if model.rotary_emb is None else model.rotary_emb.inv_freq.double()
    x = block.input_layernorm(model.embed_tokens(ids))[0]
    y = written_out(block.self_attn, x, rotary=rotary, **expected)
    # Hugging Face rounds the angles of rotary positions to float32.
    compare = exact if rotary is None else close
    compare(found[0][0], y)
    compare(found[1][0, mask[0] == 1], y)


@pytest.mark.parametrize(
    ("num_tokens", "before", "window"), [(40, 0, 7), (42, 6, 7), (30, 9, 7), (9, 3, 4), (5, 0, 1)]
)
def test_blocks_are_a_mask(num_tokens, before, window):
    """Outputs and gradients, with tokens before the first query and heads that share keys."""
    generator = torch.Generator().manual_seed(1)

    def draw(heads, time):
        x = torch.randn(2, heads, time, 5, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    def attend(q, k, v, mask):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2), None

    inputs = draw(4, num_tokens), *(draw(2, before + num_tokens) for _ in "kv")
    results = []
    for y in (
        attend_in_blocks(attend, *inputs, window),
        attend(*inputs, _band(num_tokens, before + num_tokens, window, inputs[0].device))[0],
    ):
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), inputs)])
    for blocks, masked in zip(*results, strict=True):
        exact(blocks, masked)


class LargestTensor(TorchDispatchMode):
    """The most elements that an operation wrote."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel())
        return out


def test_memory_of_sliding_layers_is_linear():
    model = make_model(torch.float32, mixer_types=["sliding_attention"], sliding_window=8).model
    sizes = []
    for num_tokens in (400, 800):
        with LargestTensor() as seen:
            model(torch.full((1, num_tokens), 5)).last_hidden_state.sum().backward()
        sizes.append(seen.size)
    assert sizes[1] < 2.1 * sizes[0]


def qwen3(**changes):
    """A small Qwen3 with weights that matter, and the fields of a Frac model of its shape."""
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        intermediate_size=24,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **changes,
    )
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_key_value_heads": config.num_key_value_heads,
        "attention_head_dim": config.head_dim,
        "mlp_intermediate_size": config.intermediate_size,
        "attention_rope_parameters": config.rope_parameters,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    return model, fields


SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@torch.no_grad()
@pytest.mark.parametrize("sliding", [False, True])
def test_all_attention_is_qwen3(ids, sliding):
    """Its weights load under their names, and give its logits and its tokens."""
    options = {"use_sliding_window": True, "sliding_window": 6, "layer_types": SLIDING}
    theirs, fields = qwen3(**(options if sliding else {}))
    names = {"full_attention": "attention", "sliding_attention": "sliding_attention"}
    mixers = [names[name] for name in SLIDING] if sliding else ["attention"]
    ours = FracForCausalLM(
        FracConfig(mixer_types=mixers, sliding_window=6 if sliding else None, **fields)
    ).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    wide = copy.deepcopy(theirs).double()(ids).logits
    assert_as_good(ours(ids).logits, theirs(ids).logits, wide)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
