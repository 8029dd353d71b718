"""FSDP2 with the precision of an unsharded run.

accelerate would cast all parameters to the compute dtype, including norms and those that carry
time, reduce gradients in it, and skip autocast. Here parameters are gathered and gradients reduced
in float32, and autocast casts the inputs of products, as on one GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy


def plugin_settings(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Trainer's settings for accelerate's FSDP plugin (None without FSDP), with our precision."""
    if settings is None:
        return None
    return {**settings, "mixed_precision_policy": MixedPrecisionPolicy()}


def shard_on_cpus(accelerator: Any, settings: dict[str, Any]) -> bool:
    """Enable FSDP on CPUs, where accelerate silently ignores it; return whether it was needed."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    plugin = FullyShardedDataParallelPlugin(**settings)
    if state.mixed_precision != "no":
        # As accelerate does on GPUs; it sets a policy only if there is none.
        plugin.set_mixed_precision(state.mixed_precision)
    state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    # Every new AcceleratorState copies its type from this one.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return True


def autocast(accelerator: Any) -> AbstractContextManager[Any]:
    """Autocast for a sharded model; accelerate wraps the forward pass of others with it."""
    sharded = accelerator.distributed_type == DistributedType.FSDP
    return accelerator.autocast() if sharded else nullcontext()
