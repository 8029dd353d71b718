"""Gradient checkpointing policies: what a layer keeps for its gradient, and what it recomputes.

    model.gradient_checkpointing_enable()                        keeps only each layer's input
    model.gradient_checkpointing_enable({"policy": "cheap"})     also keeps products and scans

With "cheap" a layer recomputes norms, convolutions, controls and gates, which are nearly half of
its activations. In a recipe the field is gradient_checkpointing_kwargs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

POLICIES = ("all", "cheap")
# Operators whose results are kept, besides products.
SCANS = frozenset({"flash_frac::scan", "flash_frac::delta"})
ATTENTIONS = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
)
PRODUCTS = frozenset({"aten::mm", "aten::addmm"})


class Recomputing:
    """Adds the choice of a policy to transformers' models."""

    config: Any

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers, but gradient_checkpointing_kwargs may have a "policy".

        Example: `model.gradient_checkpointing_enable({"policy": "cheap"})`
        """
        chosen = dict(gradient_checkpointing_kwargs or {})
        policy = policy_of(chosen)
        chosen.pop("policy", None)
        chosen.setdefault("use_reentrant", False)
        if policy == "cheap":
            if chosen["use_reentrant"]:
                raise ValueError(
                    "policy 'cheap' of gradient_checkpointing_kwargs needs use_reentrant: false"
                )
            config = self.config
            mlps = any(config.mlp_width(n) for n in range(config.num_hidden_layers))
            keep = partial(_keep, None if mlps else config.hidden_size)
            chosen["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
        super().gradient_checkpointing_enable(chosen, *args, **kwargs)  # pyright: ignore


def policy_of(gradient_checkpointing_kwargs: Mapping[str, Any]) -> str:
    """The policy, "all" by default; ValueError if it is unknown."""
    policy = gradient_checkpointing_kwargs.get("policy", "all")
    if policy not in POLICIES:
        raise ValueError(
            f"policy of gradient_checkpointing_kwargs must be one of {', '.join(POLICIES)}, "
            f"got {policy!r}"
        )
    return policy


def _keep(
    width: int | None, context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether the result of an operator is kept.

    Args:
        width: of the layer, whose last product is not kept, because no gradient needs it. None if
            an MLP follows the mixer, because it recomputes its input and result from products.
    """
    name = operator.name()
    kept = name in SCANS or name in ATTENTIONS
    if name in PRODUCTS:
        inputs, outputs = args[-1].shape
        kept = outputs != width or inputs == width
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
