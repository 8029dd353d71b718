"""Train models of other families, such as transformers' Mamba2, with the same recipes.

They read rows of packed documents without boundaries, and return logits. Features that need Frac
layers are refused or left out, with a message that names them.
Letters: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
)

from flash_frac.models import FracConfig
from flash_frac.models.fields import did_you_mean

LEFT_OUT = "Not logged, because only Frac models have them: mfu, the memory law"
# Recipe fields that only Frac models support, with the values that turn them off.
_OF_FRAC = {
    "separate_documents": False,
    "stateful": False,
    "context_parallel_size": 1,
    "compile_blocks": False,
}


def config_class_of(values: Mapping[str, Any]) -> type[PreTrainedConfig]:
    """The class for a config.json's content, by its model_type; `FracConfig` if it has none."""
    kind = values.get("model_type", FracConfig.model_type)
    if kind == FracConfig.model_type:
        return FracConfig
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(
            str(kind), CONFIG_MAPPING, "it must be frac, or a model_type of transformers"
        )
        raise ValueError(f"model_type {kind!r} is not known{hint}")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model_type {kind!r} has no causal language model in transformers")
    return CONFIG_MAPPING[kind]


def make_config(
    kind: type[PreTrainedConfig], values: Mapping[str, Any], overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """A configuration from the content of a config.json, with overrides for some fields."""
    if issubclass(kind, FracConfig):
        return kind.from_dict(dict(values), **overrides)
    stated = {**values, **overrides}
    if stated.get("output_router_logits"):
        raise ValueError(
            "output_router_logits must be false: the loss of the router would not be trained"
        )
    if (switch := _causal_switch(kind)) is not None and not stated.get(switch):
        remedy = f"set {switch} to true in its config.json, or " if switch else ""
        raise ValueError(
            f"model_type {kind.model_type!r} sees the tokens that it should predict: {remedy}"
            "choose a causal family"
        )
    try:
        return kind(**{k: v for k, v in stated.items() if k != "model_type"})
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _causal_switch(kind: type[PreTrainedConfig]) -> str | None:
    """The field that makes a bidirectional family causal, "" if none does; None if it is causal.

    Such families have causal heads in transformers, which see what follows unless told otherwise.
    Encoder-decoders do not: their causal head is on the decoder.
    """
    if kind.model_type == "xlnet":
        return ""
    if kind not in MODEL_FOR_MASKED_LM_MAPPING or kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return None
    return "causal" if kind.model_type == "xlm" else "is_decoder"


def check_settings(kind: type[PreTrainedConfig], *settings: Any) -> None:
    """Raise ValueError for a data or training setting that only Frac models support."""
    for name, off in _OF_FRAC.items():
        value = next(getattr(x, name) for x in settings if hasattr(x, name))
        if kind is not FracConfig and value != off:
            raise ValueError(
                f"{name} needs a Frac model, but config_name has model_type {kind.model_type!r}: "
                f"set {name} to {str(off).lower()}"
            )


def describe_model(config: PreTrainedConfig, parameters: int) -> str:
    """A line with the size of a model, and its layers or its family."""
    if not isinstance(config, FracConfig):
        return f"{parameters:,} parameters, {config.model_type} of transformers"
    # In the order of their first appearance.
    mixers = Counter(config.mixer_types).items()
    layers = ", ".join(f"{count} {name}" for name, count in mixers)
    return f"{parameters:,} parameters, layers: {layers}"


def next_token_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, smoothing: float = 0.0
) -> Tensor:
    """Cross entropy of logits (B, T, V) and labels that are already shifted; -100 is ignored.

    The model's own loss would shift the labels again.
    """
    logits = outputs["logits"].flatten(0, 1).float()
    labels = labels.flatten().to(logits.device)
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    return total / num_items_in_batch
