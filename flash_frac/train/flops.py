"""Floating-point operations of a model and what devices can do, for the MFU.

A matrix product of (m, k) and (k, n) counts 2 m k n. A training step counts three times the forward
pass, and nothing for what gradient checkpointing computes again.
"""

from __future__ import annotations

import torch

from flash_frac.models import FracConfig

# Dense bfloat16 rates of matrix products in TFLOP/s, from the makers' data sheets.
PEAK_TFLOPS = {
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}


def forward_flops(config: FracConfig) -> int:
    """Operations of a forward pass, a token: projections, scan and head.

    The scan counts as `docs/kernels.md` has it: 2 C D and 6 M D a head, in chunks of C = 32. Of the
    attention layers of hybrid models projections and MLP are counted; scores, which depend on the
    length of documents, are not, so that an MFU is a lower bound there.
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads, modes = config.num_attention_heads, config.frac_num_modes
    assert inner is not None
    dynamics = (3 if config.frac_alpha_fixed is None else 2) * heads
    weights = inner * (2 * width + dynamics + 2 * heads * modes + width + config.frac_conv_kernel)
    scan = inner * (2 * 32 + 6 * modes)
    head, num_attention = 2 * width * config.vocab_size, len(config.attention_layers or [])
    num_frac = config.num_hidden_layers - num_attention
    return num_frac * (2 * weights + scan) + num_attention * _attention_flops(config) + head


def _attention_flops(config: FracConfig) -> int:
    """Of one attention layer: queries, output, keys and values, and three matrices of an MLP."""
    inner = config.attention_config()
    channels = 2 * inner.head_dim * (inner.num_attention_heads + (inner.num_key_value_heads or 0))
    return 2 * inner.hidden_size * (channels + 3 * inner.intermediate_size)


def training_flops(config: FracConfig) -> int:
    """Operations of forward and backward pass, a token."""
    return 3 * forward_flops(config)


def device_peak_flops(device: torch.device) -> float | None:
    """The matrix rate of a device in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)
