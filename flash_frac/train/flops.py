"""FLOPs of a model, as counted for its MFU.

A matrix product of (m, k) and (k, n) counts 2 m k n. A training step counts three forward passes;
recomputation by gradient checkpointing does not count.
"""

from __future__ import annotations

from flash_frac.models import FracConfig

# Tokens per chunk of the scan's kernels (docs/kernels.md) and of the delta rule.
SCAN_CHUNK, DELTA_CHUNK = 32, 64


def forward_flops(
    config: FracConfig, context: float = 0, sliding_context: float | None = None
) -> int:
    """FLOPs per token of a forward pass: mixers, MLPs and head.

    Args:
        context: mean number of tokens that a token attends to, itself included: half the length of
            a document. It scales the cost of attention scores; 0 leaves them out.
        sliding_context: the same for sliding layers; by default the smaller of context and the
            window, which is above the true mean.
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
    """FLOPs per token of forward and backward pass; arguments as in `forward_flops`."""
    return 3 * forward_flops(config, context, sliding_context)


def _frac(config: FracConfig, context: float) -> float:
    """Projections, convolution and scan; the scan costs 2 C D + 6 M D per head, in chunks of C."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, modes = config.num_attention_heads, config.frac_num_modes
    assert inner is not None
    dynamics = (3 if config.frac_alpha_fixed is None else 2) * heads
    weights = inner * (2 * width + dynamics + 2 * heads * modes + width + config.frac_conv_kernel)
    return 2 * weights + inner * (2 * SCAN_CHUNK + 6 * modes)


def _delta(config: FracConfig, context: float) -> float:
    """Projections, convolutions and the delta rule in chunks of C.

    Per token and head: 6 C K for k k^T, q k^T and the solved keys; 4 C D for the solved and the
    weighted values; 6 K D for three products with the state.
    """
    heads, keys = config.delta_num_heads or 0, config.delta_head_dim or 0
    values = round(config.delta_expand_v * keys)
    projections = config.hidden_size * (2 * keys + 3 * values + 2)
    convolutions = config.delta_conv_kernel * (2 * keys + values)
    rule = DELTA_CHUNK * (6 * keys + 4 * values) + 6 * keys * values
    return heads * (2 * (projections + convolutions) + rule)


def _attention(config: FracConfig, context: float) -> float:
    """Projections of queries, keys, values and output, and products with all keys and values."""
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
