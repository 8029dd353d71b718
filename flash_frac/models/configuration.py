"""FracConfig: the configuration of a Frac model, in the format of the published checkpoints.

Letters: E hidden_size, I intermediate_size = H D, H num_attention_heads, D head_dim, M modes.
"""

from __future__ import annotations

import os
from inspect import get_annotations
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config
from transformers.utils import logging

from flash_frac.layers.sizes import (
    FRAC_EXPAND,
    NUM_MODES,
    READ_INIT,
    TAU_MAX,
    TAU_MIN,
    WRITE_INIT,
    default_num_heads,
)
from flash_frac.manifest import MANIFEST
from flash_frac.models.export import auto_map, write_code
from flash_frac.models.fields import (
    check_names,
    check_ranges,
    check_special_tokens,
    check_types,
    nearest,
    own_fields,
    unknown_names,
)
from flash_frac.models.mixers import (
    ATTENTION,
    LAYER_TYPES,
    MLP_EXPAND,
    check_attention,
    check_delta,
    check_num_layers,
    mixer_types_of,
)
from flash_frac.ops import ControlSettings
from flash_frac.theory.banks import resolve_bank

logger = logging.get_logger(__name__)
_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "frac_num_modes",
    "frac_conv_kernel",
)


class FracConfig(PreTrainedConfig):
    """Configuration of a Frac model.

    Args:
        vocab_size, hidden_size (E), num_hidden_layers, num_attention_heads (H): sizes.
        intermediate_size: inner width I of the mixer; int(frac_expand * hidden_size) if None.
        frac_head_dim: channels D of a head; I / H if None. H D must be I.
        hidden_act: must be "silu".
        max_position_embeddings: length seen in training; nothing in the model depends on it.
        initializer_range: standard deviation of initial weights.
        rms_norm_eps: epsilon of all norms.
        tie_word_embeddings: whether the head shares the embedding.
        fuse_linear_cross_entropy: in training with labels, compute the loss without holding all
            logits in memory, and return no logits.
        frac_num_modes (M), frac_conv_kernel (K), frac_conv_bias: see `FracMixer`.
        frac_dt_min, frac_dt_max, frac_alpha_min, frac_alpha_max, frac_lambda_min, frac_lambda_max,
        frac_lambda_map, frac_rho_eps: see `flash_frac.ops.ControlSettings`.
        frac_tau_min, frac_tau_max: ends of the geometric banks.
        frac_residual_read_init: initial p_read; frac_write_scale_init: initial sigmoid(p_write).
        frac_dt_init: initial delta; softplus(0) if None.
        frac_time_dilation: in training, speed up time in each sequence by a random factor,
            log-uniform in [1, this value]; 1 turns it off. What a model learns on short sequences
            then holds for lags up to this many times as long (experiments/heavy_tail). Frac and
            delta layers fade faster by that factor; attention has no notion of time.
        frac_gate_bias_init: constant added to the gate.
        frac_chunk_size: kept for the published checkpoints; results do not depend on it.
        frac_bank: "geometric", "per_head" (`flash_frac.theory.head_banks`), the name of an
            optimised bank, or M increasing timescales.
        frac_prior: "asymptotic" or "exact", see `ControlSettings.prior`.
        frac_rw_norm: divide the logits of reads and of writes by their rms over the modes of each
            head, with a learned weight for each mode, like query and key norms of attention.

    The paper's ablations, each off by default:
        frac_alpha_fixed: use this alpha everywhere, without an alpha projection ("alpha = 1").
        frac_read_prior, frac_write_prior: False drops that prior ("w/o write prior").
        frac_rw_normalization: "sigmoid" or "none" instead of "softmax" ("w/o softmax R/W").
        frac_learned_timescales: learn timescales from random ones ("learned timescales").
        frac_use_D: False drops the direct term ("w/o D").
        frac_beta: "exact_zoh" for (1 - rho) / lambda, or "equal_variance" for sqrt(1 - rho^2),
            instead of "one_minus_rho"; see docs/maths.md.
    "Pure multiscale bank" is frac_alpha_fixed=1, both priors False and frac_learned_timescales.

    Mixed models, in which some layers have other mixers than Frac (docs/mixed.md):
        mixer_types: "frac", "delta", "attention" or "sliding_attention" for each layer, or a
            shorter pattern that repeats; all "frac" if None. Saved with one entry per layer.
        attention_layers: older name, still read: indices of attention layers, from 0; the others
            are Frac. Each attention layer has an MLP of width 3 hidden_size.
        mlp_intermediate_size: width of the SwiGLU MLP after the mixer of every block; None for no
            MLP, as published.
        attention_intermediate_size: width of that MLP in attention layers, if it differs.
        attention_head_dim: channels of an attention head; hidden_size / num_attention_heads if
            None. There are num_attention_heads of them.
        attention_key_value_heads: key and value heads; num_attention_heads if None.
        attention_positions: "rope", or "none": attention then learns order from the other layers,
            and works beyond the training length.
        attention_rope_parameters: as `rope_parameters` of Qwen3Config; a rope_theta of 1e6 if None.
        attention_temperature_length, attention_temperature_slope: full-attention queries that see
            n > n0 tokens, with n0 this length, are multiplied by 1 + slope log(n / n0), which keeps
            attention sharp; off if None. The default slope is 1 / log(n0), so the factor is
            log(n) / log(n0).
        sliding_window: tokens that sliding_attention layers see, including the query itself.
        attention_bias, attention_dropout: as in Qwen3Config.
        delta_num_heads, delta_head_dim (K), delta_expand_v, delta_conv_kernel: sizes of delta
            layers; by default num_attention_heads, 3 hidden_size / (4 heads), 2 and 4.

    Example:
        >>> config = FracConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = FracForCausalLM(config)
        >>> mixed = FracConfig(num_hidden_layers=12, mixer_types=["frac", "frac", "attention"],
        ...                    mlp_intermediate_size=2048, attention_positions="none")
    """

    model_type = "frac"
    # A list, because Trainer appends to it.
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    # Field names of older checkpoints, which __post_init__ translates.
    older_names = ("attention_layers",)

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 12
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    fuse_linear_cross_entropy: bool = False
    frac_expand: float = FRAC_EXPAND
    frac_num_modes: int = NUM_MODES
    frac_conv_kernel: int = 4
    frac_conv_bias: bool = True
    frac_head_dim: int | None = None
    frac_dt_min: float = ControlSettings.dt_min
    frac_dt_max: float = ControlSettings.dt_max
    frac_alpha_min: float = ControlSettings.alpha_min
    frac_alpha_max: float = ControlSettings.alpha_max
    frac_lambda_min: float = ControlSettings.lambda_min
    frac_lambda_max: float = ControlSettings.lambda_max
    frac_lambda_map: str = ControlSettings.lambda_map
    frac_rho_eps: float = ControlSettings.rho_eps
    frac_tau_min: float = TAU_MIN
    frac_tau_max: float = TAU_MAX
    frac_residual_read_init: float = READ_INIT
    frac_write_scale_init: float = WRITE_INIT
    frac_dt_init: float | None = None
    frac_time_dilation: float = 1.0
    frac_gate_bias_init: float = 0.0
    frac_chunk_size: int = 32
    frac_bank: str | list[float] = "geometric"
    frac_prior: str = ControlSettings.prior
    frac_rw_norm: bool = False
    frac_alpha_fixed: float | None = ControlSettings.alpha_fixed
    frac_read_prior: bool = ControlSettings.read_prior
    frac_write_prior: bool = ControlSettings.write_prior
    frac_rw_normalization: str = ControlSettings.normalization
    frac_learned_timescales: bool = False
    frac_use_D: bool = True
    frac_beta: str = ControlSettings.beta
    mixer_types: list[str] | None = None
    mlp_intermediate_size: int | None = None
    attention_head_dim: int | None = None
    attention_key_value_heads: int | None = None
    attention_intermediate_size: int | None = None
    attention_positions: str = "rope"
    attention_rope_parameters: dict[str, Any] | None = None
    attention_temperature_length: int | None = None
    attention_temperature_slope: float | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    delta_num_heads: int | None = None
    delta_head_dim: int | None = None
    delta_expand_v: float = 2.0
    delta_conv_kernel: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(kwargs, type(self))
        if (model_type := kwargs.pop("model_type", self.model_type)) != self.model_type:
            raise ValueError(
                f"model_type must be {self.model_type!r}, got {model_type!r}: this is the "
                "configuration of another model"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        check_types(vars(self), get_annotations(FracConfig, eval_str=True))
        check_ranges(vars(self))
        check_special_tokens(vars(self))
        if self.intermediate_size is None:
            self.intermediate_size = int(self.frac_expand * self.hidden_size)
        if self.frac_head_dim is None:
            self.frac_head_dim = self.intermediate_size // self.num_attention_heads
        self._check()
        self._set_mixers(kwargs.pop("attention_layers", None))
        super().__post_init__(**kwargs)

    def _set_mixers(self, attention_layers: list[int] | None) -> None:
        """Set one mixer type for each layer, and the fields that depend on them."""
        if self.mixer_types is None and attention_layers:
            width = self.attention_intermediate_size or MLP_EXPAND * self.hidden_size
            self.attention_intermediate_size = width
        self.mixer_types = mixer_types_of(
            self.mixer_types, attention_layers, self.num_hidden_layers
        )
        check_attention(self)
        if "delta" in self.mixer_types:
            check_delta(self)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As for every configuration; `kwargs` that are fields are checked like those of a file.

        An unknown name in the file is kept with a warning, because other tools store notes there,
        unless it looks like a field of ours that is missing. `from_pretrained` always calls this.
        """
        foreign = {name: config_dict[name] for name in unknown_names(config_dict, cls)}
        # transformers' loading accepts names that we cannot list, so reject only likely typos.
        missing = [name for name in own_fields(cls) if name not in config_dict]
        for names, fields, cutoff in (
            (foreign, missing, 0.8),
            (unknown_names(kwargs, cls), own_fields(cls), 0.9),
        ):
            for name in names:
                if name.startswith("frac_") or nearest(name, fields, cutoff):
                    check_names([name], cls)
        # Set one by one on a finished configuration, they would not be checked, and dependent
        # fields would not be updated.
        own = {name: value for name, value in kwargs.items() if name in own_fields(cls)}
        stated = config_dict.get("intermediate_size")
        if "frac_expand" in own and "intermediate_size" not in own and stated is not None:
            raise ValueError(
                f"frac_expand has no effect if intermediate_size is given, here {stated}: "
                "change intermediate_size instead"
            )
        if "mixer_types" not in own:
            types, count = config_dict.get("mixer_types"), config_dict.get("num_hidden_layers")
            check_num_layers(types, count, own.get("num_hidden_layers"))
        rest = {name: value for name, value in kwargs.items() if name not in own}
        known = {name: value for name, value in config_dict.items() if name not in foreign}
        stored_types = foreign.pop("layer_types", None)
        result = super().from_dict({**known, **own}, **rest)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in foreign.items():
            logger.warning(f"FracConfig has no field {name}; it is kept and has no effect.")
            setattr(config, name, value)
        if stored_types is not None and list(stored_types) != config.layer_types:
            raise ValueError(
                f"layer_types must be {config.layer_types}, which follow from mixer_types, got "
                f"{list(stored_types)}; set mixer_types instead"
            )
        return result

    def _check(self) -> None:
        inner, heads, head_dim = (
            self.intermediate_size,
            self.num_attention_heads,
            self.frac_head_dim,
        )
        if head_dim is None or inner != heads * head_dim:
            fitting = default_num_heads(self.hidden_size)
            hint = "" if (inner or 0) % fitting else f"; num_attention_heads={fitting} fits"
            raise ValueError(
                f"intermediate_size ({inner}) must be num_attention_heads ({heads}) times "
                f"frac_head_dim ({head_dim}){hint}"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {self.hidden_act!r}")
        if not 0 < self.frac_tau_min < self.frac_tau_max:
            raise ValueError(
                "frac_tau_min and frac_tau_max must satisfy 0 < frac_tau_min < frac_tau_max, "
                f"got {self.frac_tau_min} and {self.frac_tau_max}"
            )
        if self.frac_dt_init is not None and not (
            self.frac_dt_min <= self.frac_dt_init <= self.frac_dt_max
        ):
            raise ValueError(
                f"frac_dt_init must be None or in [frac_dt_min, frac_dt_max] = "
                f"[{self.frac_dt_min}, {self.frac_dt_max}], got {self.frac_dt_init}"
            )
        if self.frac_learned_timescales and self.frac_prior == "exact":
            raise ValueError(
                "frac_learned_timescales needs frac_prior='asymptotic', got frac_prior='exact'"
            )
        try:
            self.control_settings()
            ends = (self.frac_tau_min, self.frac_tau_max)
            resolve_bank(self.frac_bank, self.frac_num_modes, *ends, self.num_attention_heads)
        except ValueError as error:
            raise ValueError(f"invalid FracConfig, in a frac_* field: {error}") from error

    def control_settings(self) -> ControlSettings:
        """Ranges and switches of the controls."""
        return ControlSettings(
            dt_min=self.frac_dt_min,
            dt_max=self.frac_dt_max,
            alpha_min=self.frac_alpha_min,
            alpha_max=self.frac_alpha_max,
            alpha_fixed=self.frac_alpha_fixed,
            lambda_min=self.frac_lambda_min,
            lambda_max=self.frac_lambda_max,
            lambda_map=self.frac_lambda_map,  # pyright: ignore[reportArgumentType]
            rho_eps=self.frac_rho_eps,
            prior=self.frac_prior,  # pyright: ignore[reportArgumentType]
            read_prior=self.frac_read_prior,
            write_prior=self.frac_write_prior,
            normalization=self.frac_rw_normalization,  # pyright: ignore[reportArgumentType]
            beta=self.frac_beta,  # pyright: ignore[reportArgumentType]
        )

    def attention_config(self) -> Qwen3Config:
        """The configuration of the attention layers, for Hugging Face's classes."""
        heads, rope = self.num_attention_heads, self.attention_rope_parameters
        names = {"linear_attention": "full_attention"}
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.attention_key_value_heads or heads,
            head_dim=self.attention_head_dim or self.hidden_size // heads,
            hidden_act=self.hidden_act,
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.initializer_range,
            rms_norm_eps=self.rms_norm_eps,
            # A copy, because Qwen3Config writes its defaults into it.
            rope_parameters={"rope_type": "default", "rope_theta": 1e6} | (rope or {}),
            attention_bias=self.attention_bias,
            attention_dropout=self.attention_dropout,
            # Qwen3 has no other layer types; entries of our other layers are never used.
            layer_types=[names.get(name, name) for name in self.layer_types],
            use_sliding_window=self.sliding_window is not None,
            sliding_window=self.sliding_window,
        )

    def mlp_width(self, layer_idx: int) -> int | None:
        """The width of the MLP of a layer, or None if it has none."""
        own = self.attention_intermediate_size if layer_idx in self.attention_layers else None
        return own or self.mlp_intermediate_size

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As for every configuration, plus the file that `trust_remote_code=True` imports."""
        self.auto_map = auto_map()
        # The manifest lists the folder's previous files.
        (Path(save_directory) / MANIFEST).unlink(missing_ok=True)
        super().save_pretrained(save_directory)
        write_code(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy our source files into every checkpoint."""

    @property
    def attention_layers(self) -> list[int]:
        """Indices of attention layers, full or sliding."""
        return [n for n, name in enumerate(self.mixer_types or []) if name in ATTENTION]

    @property
    def layer_types(self) -> list[str]:
        """Hugging Face's layer types; frac and delta count as linear attention (fixed state)."""
        return [LAYER_TYPES[name] for name in self.mixer_types or []]
