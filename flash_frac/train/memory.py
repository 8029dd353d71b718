"""GPU memory in training, at each moment of a step that can be the peak.

    loss        the forward pass is done, and the loss holds a chunk of logits
    backward    the backward pass starts: nearly all activations, and one layer's working memory
    gradients   the backward pass ends: all gradients, and the activations of the first layer
    optimizer   the weights are updated
    evaluation  logits of held-out text, without gradients
For models of other families only the optimizer's moment is known, and activations are not.
Letters: E width, V vocabulary, N tokens of a batch on one GPU, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from flash_frac.models import FracConfig
from flash_frac.ops.loss.api import CHUNK_TOKENS
from flash_frac.train.activations import Batch, Layer, Precision, layer_memory

GIB = 2**30
# In display order.
KINDS = (
    "weights", "gradients", "optimizer", "bfloat16 weights", "activations", "states", "loss",
    "working memory",
)  # fmt: skip
# Blocks of a sharded model that are unsharded at a time: the current and the next one, their
# all-gather buffers, and the gradients in flight.
_WHOLE_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a run that determine its memory.

    Attributes:
        config: a FracConfig, or that of another family.
        gpus: number of GPUs; context: how many of them share each sequence.
        batch, eval_batch: sequences per GPU at a time; eval_batch is None without evaluation.
        accumulation: gradient accumulation steps; length: tokens per sequence.
        half: whether products run in 16 bits, by autocast.
        sharded: whether FSDP2 shards weights, gradients and optimizer; whole: whether it keeps
            weights unsharded after use.
        recompute: whether gradient checkpointing is on; policy: its policy, see models/recomputing.
        compile: what torch.compile compiles: "no", "blocks" or "model". It changes no number here.
        moments: numbers that the optimizer stores per weight; temporary: extra ones in its step.
        separate, stateful: as in `DataArguments`.
    """

    config: Any
    gpus: int
    batch: int
    accumulation: int
    length: int
    half: bool
    sharded: bool
    recompute: bool
    policy: str = "all"
    compile: str = "no"
    whole: bool = False
    context: int = 1
    moments: float = 2
    temporary: float = 0
    eval_batch: int | None = None
    separate: bool = False
    stateful: bool = False

    @property
    def is_frac(self) -> bool:
        """Whether activations and speed can be planned."""
        return isinstance(self.config, FracConfig)

    @property
    def recomputed(self) -> str:
        """The policy of gradient checkpointing, or "no" without it."""
        return self.policy if self.recompute else "no"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU."""
        return self.batch * self.length // self.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all GPUs."""
        return self.tokens * self.gpus * self.accumulation

    @cached_property
    def precision(self) -> Precision:
        # The same whether FSDP2 shards the model or not (`flash_frac.train.sharding`).
        return Precision(compute=2 if self.half else 4, residual=4, casts=self.half)


@dataclass(frozen=True)
class Counts:
    """Number of parameters: of the model, of each layer, and of the largest matrix in a layer."""

    total: int
    layers: tuple[int, ...]
    largest: int


def count_parameters(config: PreTrainedConfig) -> Counts:
    """Count the parameters of a causal language model without allocating them."""
    text = config.to_json_string(use_diff=False)
    if text not in _COUNTED:
        _COUNTED[text] = _count(config)
    return _COUNTED[text]


# Configurations cannot be hashed, and one plan counts the same one many times.
_COUNTED: dict[str, Counts] = {}


def _count(config: PreTrainedConfig) -> Counts:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # Families name their list of layers differently.
    layers = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    blocks = [[p.numel() for p in block.parameters()] for block in layers]
    largest = max(size for sizes in blocks for size in sizes)
    return Counts(model.num_parameters(), tuple(map(sum, blocks)), largest)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by kind, at each moment, without the CUDA context."""

    moments: Mapping[str, Mapping[str, float]]

    @property
    def moment(self) -> str:
        """The name of the moment with the highest memory use."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def kinds(self) -> Mapping[str, float]:
        """Bytes by kind at the peak."""
        return self.moments[self.moment]

    @property
    def peak(self) -> float:
        """Peak bytes: the `torch.cuda.max_memory_allocated` of a run."""
        return sum(self.kinds.values())


def memory_of(setup: Setup) -> Memory:
    """The memory of one GPU in training.

    Example: `memory_of(setup).peak / GIB`
    """
    counts = count_parameters(setup.config)
    if not setup.is_frac:
        return _Counter(setup, counts, []).known()
    batch = Batch(
        tokens=setup.tokens, length=setup.length, ranks=setup.context, separate=setup.separate
    )
    layers = [
        layer_memory(setup.config, n, setup.precision, batch) for n in range(len(counts.layers))
    ]
    return _Counter(setup, counts, layers).memory()


@dataclass(frozen=True)
class _Counter:
    setup: Setup
    counts: Counts
    layers: list[Layer]

    def memory(self) -> Memory:
        base = self._base()
        moments = {
            "loss": base | self._loss(),
            "backward": base | self._backward(),
            "gradients": base | self._gradients(),
            "optimizer": base | self._optimizer(),
        }
        if self.setup.eval_batch is not None:
            moments["evaluation"] = base | self._evaluation()
        return Memory(moments)

    def known(self) -> Memory:
        """What a model of any family needs, without activations, loss and working memory."""
        return Memory({"optimizer": self._base() | self._optimizer()})

    @property
    def _share(self) -> float:
        return 1 / self.setup.gpus if self.setup.sharded else 1

    def _base(self) -> dict[str, float]:
        """Memory in use during the whole step: weights and optimizer state."""
        setup, total = self.setup, self.counts.total
        weights = 4 * total * self._share
        if setup.sharded:
            blocks = sum(self.counts.layers) if setup.whole else 0
            blocks = max(blocks, _WHOLE_BLOCKS * max(self.counts.layers))
            # Parameters outside the layers stay unsharded throughout the step.
            weights += 4 * (blocks + total - sum(self.counts.layers))
        return {"weights": weights, "optimizer": 4 * setup.moments * total * self._share}

    def _held(self) -> float:
        """Gradients held when a backward pass starts."""
        setup, total = self.setup, self.counts.total
        # DDP communicates gradients through buckets of its own.
        buckets = 4 * total if setup.gpus > 1 and not setup.sharded else 0
        if setup.accumulation == 1:
            return buckets
        # FSDP2, too, keeps them unsharded until the last micro-batch of a step.
        return buckets + 4 * total

    def _all_gradients(self) -> float:
        whole = self.setup.gpus > 1 and not self.setup.sharded
        gradients = 4 * self.counts.total * self._share * (2 if whole else 1)
        return max(gradients, self._held())

    @cached_property
    def _kept(self) -> dict[str, float]:
        """Memory that layers and head save for their backward pass."""
        setup = self.setup
        if setup.recompute:
            kept = sum(layer.kept_with(setup.policy) for layer in self.layers)
            cheap = setup.policy == "cheap"
            states = sum(layer.states for layer in self.layers) if cheap else 0
        else:
            kept = sum(layer.bytes_per_token for layer in self.layers)
            states = sum(layer.states for layer in self.layers)
        return {"activations": kept * setup.tokens, "states": states + self._carried()}

    def _carried(self) -> float:
        """States of stateful training: those before the batch, and those after it."""
        setup, config = self.setup, self.setup.config
        if not setup.stateful:
            return 0
        frac = 4 * (config.intermediate_size or 0) * config.frac_num_modes
        keys = config.delta_head_dim or 0
        delta = 4 * (config.delta_num_heads or 0) * keys**2 * config.delta_expand_v
        types = config.mixer_types or []
        return 2 * setup.batch * (types.count("frac") * frac + types.count("delta") * delta)

    def _copies(self, layers: list[Layer], *, recomputed: bool) -> float:
        """Copies of weights for products; a recomputed layer keeps only those of autocast."""
        size, casts = self.setup.precision.compute, self.setup.precision.casts
        cast = sum(layer.cast for layer in layers) if casts else 0
        return size * (cast + (0 if recomputed else sum(layer.joined for layer in layers)))

    @property
    def _head(self) -> float:
        """Number of weights of the head."""
        return self.setup.config.vocab_size * self.setup.config.hidden_size

    def _loss(self) -> dict[str, float]:
        setup, precision = self.setup, self.setup.precision
        tokens, width, vocabulary = setup.tokens, setup.config.hidden_size, setup.config.vocab_size
        # The input of the last norm, and its result.
        own = tokens * width * (precision.residual + precision.compute)
        if setup.config.fuse_linear_cross_entropy:
            # Gradients of input and weight, the last chunk's share of the latter, and its logits.
            own += tokens * width * precision.compute + 8 * self._head
            own += precision.compute * min(tokens, CHUNK_TOKENS) * vocabulary
            own += precision.compute * self._head if setup.half else 0
        else:
            # Logits in the head's dtype and in float32, and the log-probabilities.
            own += tokens * vocabulary * (8 + (precision.compute if setup.half else 0))
        return {
            **self._kept,
            "gradients": self._held(),
            "bfloat16 weights": self._copies(self.layers, recomputed=setup.recompute),
            "loss": own,
        }

    def _at_work(self, layer: Layer) -> dict[str, float]:
        """Working memory of one layer's backward pass, including what it recomputes."""
        setup, size = self.setup, self.setup.precision.compute
        # The gradient of a matrix, in the dtype of the products and in that of the weight.
        working = layer.working * setup.tokens + (4 + size) * self.counts.largest
        again = layer.bytes_per_token - layer.kept_with(setup.policy) if setup.recompute else 0
        return {"working memory": working + again * setup.tokens}

    def _backward(self) -> dict[str, float]:
        setup, last = self.setup, self.layers[-1]
        copied = [last] if setup.recompute else self.layers
        head = 4 * self._head
        if not setup.config.fuse_linear_cross_entropy:
            head += setup.tokens * setup.config.vocab_size * 4
        return {
            **self._kept,
            **self._at_work(last),
            "gradients": self._held() + (0 if setup.sharded else head),
            "bfloat16 weights": self._copies(copied, recomputed=False),
        }

    def _gradients(self) -> dict[str, float]:
        first, tokens = self.layers[0], self.setup.tokens
        # With tied weights, the embedding's gradient is added to the head's.
        work = self._at_work(first)["working memory"] + 4 * self._head
        return {
            "gradients": self._all_gradients(),
            "bfloat16 weights": self._copies([first], recomputed=False),
            "activations": (0 if self.setup.recompute else first.bytes_per_token) * tokens,
            "states": first.states + self._carried(),
            "working memory": work,
        }

    def _optimizer(self) -> dict[str, float]:
        temporary = 4 * self.setup.temporary * self.counts.total * self._share
        return {"gradients": self._all_gradients(), "working memory": temporary}

    def _evaluation(self) -> dict[str, float]:
        setup, size = self.setup, self.setup.precision.compute
        tokens = (setup.eval_batch or 0) * setup.length // setup.context
        # Logits in the head's dtype and in float32, and the log-probabilities.
        logits = tokens * setup.config.vocab_size * (8 + (size if setup.half else 0))
        work = max((layer.bytes_per_token for layer in self.layers), default=0) * tokens
        copies = self._copies(self.layers, recomputed=True)
        return {"bfloat16 weights": copies, "loss": logits, "working memory": work}
