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

from flash_frac.models.export import auto_map, write_code
from flash_frac.models.fields import check_names, check_types, nearest, own_fields, unknown_names
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
        hidden_act: "silu", the only one there is.
        max_position_embeddings: length seen in training; nothing in the model depends on it.
        initializer_range: standard deviation of initial weights.
        rms_norm_eps: of all norms.
        tie_word_embeddings: whether the head shares the embedding.
        fuse_linear_cross_entropy: in training with labels, compute the loss without the logits of
            all tokens in memory, and return none.
        frac_num_modes (M), frac_conv_kernel (K), frac_conv_bias: of the mixer.
        frac_dt_min, frac_dt_max, frac_alpha_min, frac_alpha_max, frac_lambda_min, frac_lambda_max,
        frac_lambda_map, frac_rho_eps: of `flash_frac.ops.ControlSettings`.
        frac_tau_min, frac_tau_max: ends of the geometric bank.
        frac_residual_read_init: p_read at the start; frac_write_scale_init: sigmoid(p_write).
        frac_dt_init: delta at the start; softplus(0) if None.
        frac_time_dilation: in training, let time pass up to so many times as fast in a sequence, by
            a factor drawn log-uniformly for each; 1 for the usual time. What a model learns on
            short sequences then holds for lags that many times as long (experiments/heavy_tail).
        frac_gate_bias_init: constant added to the gate.
        frac_chunk_size: kept for the published checkpoints; results do not depend on it.
        frac_bank: "geometric", the name of an optimised bank, or M increasing timescales.
        frac_prior: "asymptotic" or "exact", see `ControlSettings.prior`.

    The paper's ablations, each off by default:
        frac_alpha_fixed: this alpha everywhere, and no alpha projection ("alpha = 1").
        frac_read_prior, frac_write_prior: False drops the prior there ("w/o write prior").
        frac_rw_normalization: "sigmoid" or "none" instead of "softmax" ("w/o softmax R/W").
        frac_learned_timescales: free timescales, random at the start ("learned timescales").
        frac_use_D: False drops the direct term ("w/o D").
        frac_beta: "exact_zoh" for (1 - rho) / lambda instead of "one_minus_rho".
    "Pure multiscale bank" is frac_alpha_fixed=1, both priors False and frac_learned_timescales.

    Hybrid models, in which some layers are those of a transformer:
        attention_layers: numbers of the layers, from 0, that are Qwen3's attention and MLP instead
            of a Frac block; None for none.
        attention_head_dim: channels of an attention head; hidden_size / num_attention_heads if
            None. There are num_attention_heads of them.
        attention_key_value_heads: heads of keys and values; num_attention_heads if None.
        attention_intermediate_size: of the MLP; 3 hidden_size if None, as in Qwen3-0.6B and 1.7B.
        attention_rope_parameters: as `rope_parameters` of Qwen3Config; a rope_theta of 1e6 if None.
        attention_bias, attention_dropout: as in Qwen3Config.

    Example:
        >>> config = FracConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
        >>> model = FracForCausalLM(config)
        >>> hybrid = FracConfig(num_hidden_layers=12, attention_layers=[5, 11])
    """

    model_type = "frac"
    # A list, to which Trainer adds one of its own.
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

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
    frac_expand: float = 2.0
    frac_num_modes: int = 8
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
    frac_tau_min: float = 1.0
    frac_tau_max: float = 65536.0
    frac_residual_read_init: float = -2.0
    frac_write_scale_init: float = 0.25
    frac_dt_init: float | None = None
    frac_time_dilation: float = 1.0
    frac_gate_bias_init: float = 0.0
    frac_chunk_size: int = 32
    frac_bank: str | list[float] = "geometric"
    frac_prior: str = ControlSettings.prior
    frac_alpha_fixed: float | None = ControlSettings.alpha_fixed
    frac_read_prior: bool = ControlSettings.read_prior
    frac_write_prior: bool = ControlSettings.write_prior
    frac_rw_normalization: str = ControlSettings.normalization
    frac_learned_timescales: bool = False
    frac_use_D: bool = True
    frac_beta: str = ControlSettings.beta
    attention_layers: list[int] | None = None
    attention_head_dim: int | None = None
    attention_key_value_heads: int | None = None
    attention_intermediate_size: int | None = None
    attention_rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0

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
        if self.intermediate_size is None:
            self.intermediate_size = int(self.frac_expand * self.hidden_size)
        if self.frac_head_dim is None:
            self.frac_head_dim = self.intermediate_size // self.num_attention_heads
        self._check()
        if self.attention_layers is not None:
            self._check_attention()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As for every configuration; `kwargs` that are fields are checked like those of a file.

        A name in the file that looks like none of ours, or like one that is there too, is kept,
        with a warning: other tools leave their notes there. Everything that `from_pretrained` reads
        comes through here.
        """
        foreign = {name: config_dict[name] for name in unknown_names(config_dict, cls)}
        # Names of transformers' own loading are not ours to know: only a near miss is refused.
        missing = [name for name in own_fields(cls) if name not in config_dict]
        for names, fields, cutoff in (
            (foreign, missing, 0.8),
            (unknown_names(kwargs, cls), own_fields(cls), 0.9),
        ):
            for name in names:
                if name.startswith("frac_") or nearest(name, fields, cutoff):
                    check_names([name], cls)
        # Set one by one on a finished configuration, they would not be checked, and what follows
        # from them would stay as it was.
        own = {name: value for name, value in kwargs.items() if name in own_fields(cls)}
        stated = config_dict.get("intermediate_size")
        if "frac_expand" in own and "intermediate_size" not in own and stated is not None:
            raise ValueError(
                f"frac_expand has no effect where intermediate_size is stated, here {stated}: "
                "change intermediate_size instead"
            )
        rest = {name: value for name, value in kwargs.items() if name not in own}
        known = {name: value for name, value in config_dict.items() if name not in foreign}
        result = super().from_dict({**known, **own}, **rest)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in foreign.items():
            logger.warning(f"FracConfig has no field {name}; it is kept and changes nothing.")
            setattr(config, name, value)
        return result

    def _check(self) -> None:
        inner, heads, head_dim = (
            self.intermediate_size,
            self.num_attention_heads,
            self.frac_head_dim,
        )
        if head_dim is None or inner != heads * head_dim:
            raise ValueError(
                f"intermediate_size ({inner}) must be num_attention_heads ({heads}) times "
                f"frac_head_dim ({head_dim})"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {self.hidden_act!r}")
        if not 0 < self.frac_tau_min < self.frac_tau_max:
            raise ValueError(
                "frac_tau_min and frac_tau_max must satisfy 0 < frac_tau_min < frac_tau_max, "
                f"got {self.frac_tau_min} and {self.frac_tau_max}"
            )
        if not 0 < self.frac_write_scale_init < 1:
            raise ValueError(
                f"frac_write_scale_init must be in (0, 1), got {self.frac_write_scale_init}"
            )
        if self.frac_dt_init is not None and not (
            self.frac_dt_min <= self.frac_dt_init <= self.frac_dt_max
        ):
            raise ValueError(
                f"frac_dt_init must be None or in [frac_dt_min, frac_dt_max] = "
                f"[{self.frac_dt_min}, {self.frac_dt_max}], got {self.frac_dt_init}"
            )
        if not self.frac_time_dilation >= 1:
            raise ValueError(
                f"frac_time_dilation must be at least 1, got {self.frac_time_dilation}"
            )
        if self.frac_learned_timescales and self.frac_prior == "exact":
            raise ValueError(
                "frac_learned_timescales needs frac_prior='asymptotic', got frac_prior='exact'"
            )
        try:
            self.control_settings()
            resolve_bank(self.frac_bank, self.frac_num_modes, self.frac_tau_min, self.frac_tau_max)
        except ValueError as error:
            raise ValueError(f"invalid FracConfig, in a frac_* field: {error}") from error

    def control_settings(self) -> ControlSettings:
        """The ranges and switches of the controls."""
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

    def _check_attention(self) -> None:
        layers, count = self.attention_layers, self.num_hidden_layers
        assert layers is not None
        if len(set(layers)) != len(layers) or not all(0 <= n < count for n in layers):
            raise ValueError(
                "attention_layers must be a list of different whole numbers from 0 to "
                f"{count - 1}, the layers of the model, got {layers!r}"
            )
        if len(layers) == count:
            raise ValueError(
                f"attention_layers must leave a Frac layer, got all {count}; for a transformer "
                "without Frac layers, use transformers.Qwen3Config"
            )
        self.attention_layers = sorted(layers)
        heads = self.num_attention_heads
        for name in (
            "attention_head_dim",
            "attention_key_value_heads",
            "attention_intermediate_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or a positive integer, got {value!r}")
        if self.attention_head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"attention_head_dim must be given, because hidden_size ({self.hidden_size}) is no "
                f"multiple of num_attention_heads ({heads})"
            )
        if (self.attention_head_dim or self.hidden_size // heads) % 2:
            raise ValueError(
                "attention_head_dim must be even, for rotary positions, got "
                f"{self.attention_head_dim or self.hidden_size // heads}"
            )
        if heads % (self.attention_key_value_heads or heads):
            raise ValueError(
                f"attention_key_value_heads must divide num_attention_heads ({heads}), got "
                f"{self.attention_key_value_heads}"
            )

    def attention_config(self) -> Qwen3Config:
        """The configuration of the attention layers, for Hugging Face's classes."""
        heads, rope = self.num_attention_heads, self.attention_rope_parameters
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.attention_intermediate_size or 3 * self.hidden_size,
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
        )

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As for every configuration, with the file by which `trust_remote_code=True` finds us."""
        self.auto_map = auto_map()
        super().save_pretrained(save_directory)
        write_code(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: transformers would copy our source files into every checkpoint."""

    @property
    def layer_types(self) -> list[str]:
        """By Hugging Face's names; a Frac state has a fixed size, as that of linear attention."""
        attention = self.attention_layers or []
        return [
            "full_attention" if n in attention else "linear_attention"
            for n in range(self.num_hidden_layers)
        ]
