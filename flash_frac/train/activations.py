"""Training memory of one layer: what the forward pass saves and what the backward pass adds.

Counted tensor by tensor, as autograd saves them with the Triton kernels on a GPU. The tests compare
every sum with the tensors that autograd actually saves. Sizes are in bytes, most of them per token.
Letters: E width, H heads, D head channels, I = H D, M modes, BM their block, K key channels, C
tokens per chunk, T tokens per sequence, W window, S segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from flash_frac.models import FracConfig
from flash_frac.models.mixers import ATTENTION
from flash_frac.ops.scan.tuning import HOPPER, Tuning
from flash_frac.train.flops import DELTA_CHUNK, SCAN_CHUNK

# The output width of a delta layer's fused projection is a multiple of this.
_ALIGNED = 8


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per number in training.

    Attributes:
        compute: bytes per number in the inputs and outputs of matrix products.
        residual: bytes per number in the residual stream.
        casts: whether weights are cast for products, as autocast does with float32 weights.
    """

    compute: int
    residual: int
    casts: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The micro-batch of one GPU.

    Attributes:
        tokens: tokens on this GPU.
        length: tokens per sequence, T.
        ranks: GPUs that share each sequence.
        separate: whether documents packed in one row are kept separate.
    """

    tokens: int
    length: int
    ranks: int = 1
    separate: bool = False


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The memory of a layer, or of its mixer alone.

    Attributes:
        kept: bytes per token saved for the backward pass, by tensor name.
        working: peak bytes per token of the backward pass, besides `kept`.
        states: bytes saved that do not scale with the tokens: states before segments, and masks.
        cast: number of weights that are copied into the dtype of the products; autocast holds the
            copies until the forward pass ends, and the backward pass needs them again.
        joined: number of weights concatenated for one product, which copies them in any dtype.
        expensive: names in `kept` that the "cheap" policy of gradient checkpointing saves: results
            of products and scans.
        mixed: bytes per token of the outputs of mixer and MLP, where that policy saves them.
    """

    kept: Mapping[str, float]
    working: float
    states: int = 0
    cast: int
    joined: int = 0
    expensive: frozenset[str] = frozenset()
    mixed: float = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token that the forward pass saves."""
        return sum(self.kept.values())

    def kept_with(self, policy: str) -> float:
        """Bytes per token that gradient checkpointing saves: the input, and more with "cheap"."""
        if policy != "cheap":
            return self.kept["x"]
        return self.kept["x"] + sum(self.kept[name] for name in self.expensive) + self.mixed


def layer_memory(
    config: FracConfig,
    number: int,
    precision: Precision,
    batch: Batch,
    *,
    tuning: Tuning = HOPPER,
) -> Layer:
    """The memory of layer `number`.

    Args:
        tuning: launch parameters of the scan's kernels, which determine the number of segments.

    Example: `layer_memory(config, 0, precision, Batch(tokens=32768, length=4096)).bytes_per_token`
    """
    name = (config.mixer_types or [])[number]
    narrow, wide = precision.compute * config.hidden_size, precision.residual * config.hidden_size
    if name == "frac":
        mixer = _frac(config, precision.compute, batch, tuning)
    elif name == "delta":
        mixer = _delta(config, precision.compute)
    else:
        mixer = _attention(config, name, precision.compute, batch)
    kept = {"x": wide, "norm(x)": narrow, **mixer.kept}
    # The gradient of the residual stream, and its copy in the dtype of the products.
    working = mixer.working + wide + narrow
    cast, mlp = mixer.cast, config.mlp_width(number)
    if mlp is not None:
        own = {
            "x after the mixer": wide,
            "mlp_norm(x)": narrow,
            "gate, up": 2 * precision.compute * mlp,
        }
        # silu(gate) up, its gradient, and those of gate and up. All are freed before the mixer's
        # backward pass.
        first = 4 * precision.compute * mlp + wide + narrow
        working = max(first, working - sum(own.values()))
        kept |= own
        # down_proj is not counted: it saves its weight, not a copy.
        cast += 2 * mlp * config.hidden_size
    return Layer(
        kept=kept,
        working=working,
        states=mixer.states,
        cast=cast,
        joined=mixer.joined,
        expensive=mixer.expensive | ({"gate, up"} if mlp is not None else set()),
        mixed=mixer.mixed if mlp is None else 2 * narrow,
    )


def _frac(config: FracConfig, size: int, batch: Batch, tuning: Tuning) -> Layer:
    """Memory of a FracMixer; `size` is the bytes per number in its products."""
    width, inner = config.hidden_size, config.intermediate_size or 0
    heads, modes, channels = config.num_attention_heads, config.frac_num_modes, config.frac_head_dim
    assert channels is not None
    block = max(16, 1 << (modes - 1).bit_length())
    dynamics = (3 if config.frac_alpha_fixed is None else 2) * heads
    kept = {
        "in_proj: x, gate": 2 * size * inner,
        "u": size * inner,
        "dyn": size * dynamics,
        "rw": 2 * size * heads * modes,
        "read, write, log_decay": 12 * heads * modes,
        "gamma": size * heads * SCAN_CHUNK,
        "read_in, write_out": 2 * size * heads * block,
        "total": 4 * heads * block / SCAN_CHUNK,
        "y": size * inner,
        "out_norm(y)": size * inner,
        **_control_options(config),
    }
    # The peak is in the scan: gradients of y, u, x and gate, states before chunks, partial sums
    # over channels, and gradients of the weights; the norm of y is freed by then.
    parts = ceil(channels / tuning.gradient.channels)
    sums = parts * heads * (size * SCAN_CHUNK + 8 * block + 4 * block / SCAN_CHUNK)
    states = size * inner * block / SCAN_CHUNK
    working = 4 * size * inner + states + sums + 12 * heads * modes - size * inner
    chunks = ceil(batch.tokens / SCAN_CHUNK)
    walks = chunks * heads * ceil(channels / tuning.output.channels)
    segments = ceil(chunks / ceil(walks / tuning.programs))
    return Layer(
        kept=kept,
        working=working,
        states=4 * segments * heads * block * channels,
        cast=inner * (2 * width + dynamics + 2 * heads * modes + width),
        expensive=frozenset(
            {"in_proj: x, gate", "dyn", "rw", "gamma", "read_in, write_out", "total", "y"}
        ),
    )


def _control_options(config: FracConfig) -> dict[str, float]:
    """Bytes per token of the options of the controls that plain torch computes, in float32."""
    heads, pairs = config.num_attention_heads, config.num_attention_heads * config.frac_num_modes
    kept: dict[str, float] = {}
    if config.frac_rw_norm:
        # Both kinds of logits before and after their division, and what divides them.
        kept["rw_norm"] = 16 * pairs + 8 * heads
    if config.frac_prior == "exact" and (config.frac_read_prior or config.frac_write_prior):
        # 14 tensors (H, M) and a mask, most of them for the gradient of alpha; else the prior.
        free = config.frac_alpha_fixed is None
        kept["exact prior"] = 57 * pairs + 44 * heads if free else 4 * pairs + 12 * heads
    if config.frac_time_dilation > 1:
        kept["dilation"] = (36 if config.frac_beta == "equal_variance" else 20) * pairs
    return kept


def _delta(config: FracConfig, size: int) -> Layer:
    """Memory of a DeltaMixer, which saves the inputs of its scan and none of its intermediates."""
    heads, keys = config.delta_num_heads or 0, config.delta_head_dim or 0
    width, values = config.hidden_size, round(config.delta_expand_v * keys)
    joined = ceil(heads * (2 * keys + values + 2) / _ALIGNED) * _ALIGNED
    kept = {
        "q, k, v, a, b": size * joined,
        "a + dt_bias, softplus": 8 * heads,
        "beta, log_decay": 8 * heads,
        "q, k before their norms": 2 * size * heads * keys,
        "q, k": 2 * size * heads * keys,
        "v": size * heads * values,
        "y": size * heads * values,
        "o_norm(y)": size * heads * values,
        "g": size * heads * values,
        "gated y": size * heads * values,
    }
    # The peak is in the scan: gradients of y, g and its inputs; w, u, T and scratch; U and S and
    # their gradients. g, y and what follows them are freed by then.
    per_key, per_value = size * heads * keys, size * heads * values
    states = 2 * size * heads * keys * values / DELTA_CHUNK
    chunk = 2 * size * heads * DELTA_CHUNK
    working = 2 * per_key + 3 * per_value + 8 * heads
    working += per_key + per_value + chunk + 2 * per_value + states - 4 * per_value
    return Layer(
        kept=kept,
        working=working,
        cast=2 * width * heads * values,
        joined=joined * width,
        expensive=frozenset({"q, k, v, a, b", "y", "g"}),
    )


def _attention(config: FracConfig, name: str, size: int, batch: Batch) -> Layer:
    """Memory of torch's fused attention, which saves queries, keys, values and the result."""
    assert name in ATTENTION
    inner = config.attention_config()
    heads, key_heads = inner.num_attention_heads, inner.num_key_value_heads or 0
    query, key = size * heads * inner.head_dim, size * key_heads * inner.head_dim
    kept: dict[str, float] = {
        "q, k before their norms": query + key,
        "q": query,
        # Each rank holds the keys and values of all ranks that share the sequence.
        "k": key * batch.ranks,
        "v": key * batch.ranks,
        "y": query,
        "logsumexp": 4 * heads,
    }
    window, states = config.sliding_window, 0
    if name == "attention" or window is None:
        # A mask over all pairs of tokens in the row, in the dtype of the products.
        states = size * batch.tokens**2 * batch.ranks if batch.separate else 0
    elif batch.separate or batch.length <= 2 * window:
        states = size * (batch.tokens if batch.separate else batch.length) ** 2
    else:
        # Blocks of W queries and 2 W keys; the outputs are concatenated.
        share = 1 - window / batch.length
        kept["blocks"] = share * (2 * query + 4 * key) + (1 - share) * query
        states = 3 * size * window**2
    # Gradients of the result, queries, keys and values, and a float32 one of the queries.
    working = 2 * query + 2 * key * batch.ranks + 4 * query / size
    matrices = 2 * config.hidden_size * inner.head_dim * (heads + key_heads)
    expensive = frozenset({"q, k before their norms", "v", "y", "logsumexp"})
    mixed = query if heads * inner.head_dim == config.hidden_size else 0
    return Layer(
        kept=kept,
        working=working,
        states=states,
        cast=matrices,
        expensive=expensive,
        mixed=mixed,
    )
