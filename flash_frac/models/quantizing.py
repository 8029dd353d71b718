"""8-bit weights for inference with torchao: they halve the bytes that decoding reads per token.

Linear layers are quantised row by row, except the head, which most models share with their
embeddings. Convolutions, norms and the parameters that carry time are not quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flash_frac.extras import require
from flash_frac.layers.plain import FP8_CAPABILITY, parts_of

# torchao's names for 8-bit weights that are multiplied in the dtype of the model.
CONFIGS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}


def quantization_config(kind: str) -> Any:
    """transformers' `TorchAoConfig` for `from_pretrained`.

    Args:
        kind: "int8", or "fp8" on GPUs that support it.

    Example: `from_pretrained("my-frac", quantization_config=quantization_config("int8"))`
    """
    if kind not in CONFIGS:
        raise ValueError(f"quantize must be {' or '.join(CONFIGS)}, got {kind!r}")
    torchao = require("torchao.quantization", "quant", f"quantize {kind}")
    if kind == "fp8" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < FP8_CAPABILITY:
            raise ValueError(
                "quantize fp8 needs a GPU of compute capability {}.{} or more, got {}.{}; use "
                "int8".format(*FP8_CAPABILITY, *capability)
            )
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(torchao, CONFIGS[kind])())


def is_quantized(model: nn.Module) -> bool:
    """Whether some parameter consists of several tensors, such as values and scales."""
    return any(len(parts_of(parameter)) > 1 for parameter in model.parameters())
