"""The operations of a model, which its MFU counts.

A matrix product of (m, k) and (k, n) counts 2 m k n. A training step counts three times the forward
pass, and nothing for what gradient checkpointing computes again.
"""

from __future__ import annotations

from flash_frac.models import FracConfig

# Tokens of a chunk: of the scan's kernels (docs/kernels.md), and of the delta rule.
_SCAN_CHUNK, _DELTA_CHUNK = 32, 64


def forward_flops(
    config: FracConfig, context: float = 0, sliding_context: float | None = None
) -> int:
    """Operations of a forward pass, a token: mixers, MLPs and head.

    Args:
        context: how many tokens a token sees in its document, itself included, in the mean; half
            the length of one. Attention's scores cost as many products; with 0 they are left out.
        sliding_context: the same in sliding layers; by default context, or the window if that is
            shorter, which is more than the mean.
    """
    if sliding_context is None:
        sliding_context = min(context, config.sliding_window or context)
    contexts = {"sliding_attention": sliding_context}
    types = config.mixer_types or ()
    mixers = sum(_MIXERS[name](config, contexts.get(name, context)) for name in types)
    widths = (config.mlp_width(n) or 0 for n in range(config.num_hidden_layers))
    mlps = 6 * config.hidden_size * sum(widths)
    return round(mixers + mlps + 2 * config.hidden_size * config.vocab_size)


def training_flops(
    config: FracConfig, context: float = 0, sliding_context: float | None = None
) -> int:
    """Operations of forward and backward pass, a token; arguments as in `forward_flops`."""
    return 3 * forward_flops(config, context, sliding_context)


def _frac(config: FracConfig, context: float) -> float:
    """Projections, convolution and scan: 2 C D and 6 M D a head, in chunks of C."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, modes = config.num_attention_heads, config.frac_num_modes
    assert inner is not None
    dynamics = (3 if config.frac_alpha_fixed is None else 2) * heads
    weights = inner * (2 * width + dynamics + 2 * heads * modes + width + config.frac_conv_kernel)
    return 2 * weights + inner * (2 * _SCAN_CHUNK + 6 * modes)


def _delta(config: FracConfig, context: float) -> float:
    """Projections, convolutions and the delta rule in chunks of C.

    A token and head: k k^T, q k^T and the solved keys 6 C K, values solved and weighed 4 C D, and
    three products with the state 6 K D.
    """
    heads, keys = config.delta_num_heads or 0, config.delta_head_dim or 0
    values = round(config.delta_expand_v * keys)
    projections = config.hidden_size * (2 * keys + 3 * values + 2)
    convolutions = config.delta_conv_kernel * (2 * keys + values)
    rule = _DELTA_CHUNK * (6 * keys + 4 * values) + 6 * keys * values
    return heads * (2 * (projections + convolutions) + rule)


def _attention(config: FracConfig, context: float) -> float:
    """Queries, output, keys and values, and products with the keys and values of the context."""
    inner = config.attention_config()
    heads, head_dim = inner.num_attention_heads, inner.head_dim
    channels = 2 * head_dim * (heads + (inner.num_key_value_heads or 0))
    return 2 * config.hidden_size * channels + 4 * heads * head_dim * context


_MIXERS = {
    "frac": _frac,
    "delta": _delta,
    "attention": _attention,
    "sliding_attention": _attention,
}
