"""A block with a fixed-size state: a frac or delta mixer, and an optional MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from flash_frac.layers import DeltaMixer, FracMixer, GatedMLP, RMSNorm, add_mlp
from flash_frac.layers.direct import read_directly, reads_directly
from flash_frac.models.cache import read_state, write_state
from flash_frac.models.configuration import FracConfig

# Mixers with a fixed-size state, for `_init_weights` and context groups.
STATE_MIXERS = (FracMixer, DeltaMixer)


def mixer_from_config(config: FracConfig, mixer_type: str = "frac") -> FracMixer | DeltaMixer:
    """Build the "frac" or "delta" mixer of a configuration."""
    if mixer_type == "delta":
        return DeltaMixer(
            config.hidden_size,
            num_heads=config.delta_num_heads,  # pyright: ignore[reportArgumentType]
            head_dim=config.delta_head_dim,  # pyright: ignore[reportArgumentType]
            expand_v=config.delta_expand_v,
            conv_kernel=config.delta_conv_kernel,
            norm_eps=config.rms_norm_eps,
            initializer_range=config.initializer_range,
        )
    return FracMixer(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.frac_head_dim,  # pyright: ignore[reportArgumentType]
        num_modes=config.frac_num_modes,
        bank=config.frac_bank,
        tau_min=config.frac_tau_min,
        tau_max=config.frac_tau_max,
        learned_timescales=config.frac_learned_timescales,
        settings=config.control_settings(),
        rw_norm=config.frac_rw_norm,
        conv_kernel=config.frac_conv_kernel,
        conv_bias=config.frac_conv_bias,
        use_D=config.frac_use_D,
        read_init=config.frac_residual_read_init,
        write_init=config.frac_write_scale_init,
        dt_init=config.frac_dt_init,
        gate_bias=config.frac_gate_bias_init,
        norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
    )


class FracBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(mlp_norm(x)) if it has an MLP; the cache holds its state."""

    def __init__(self, config: FracConfig, layer_idx: int, mixer_type: str = "frac") -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = mixer_from_config(config, mixer_type)
        width = config.mlp_width(layer_idx)
        self.mlp = None if width is None else GatedMLP(config.hidden_size, width)
        if self.mlp is not None:
            self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> Tensor:
        inputs = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "elapsed": elapsed}
        hidden_states = self._mix(hidden_states, past_key_values, inputs)
        if self.mlp is None:
            return hidden_states
        return add_mlp(hidden_states, self.mlp_norm, self.mlp)

    def _mix(self, hidden_states: Tensor, cache: Cache | None, inputs: dict[str, Any]) -> Tensor:
        state = None if cache is None else read_state(cache, self.layer_idx)
        mask, mixer = inputs["attention_mask"], self.mixer
        # An adapter may replace the mixer; then it must be called.
        plain = inputs["cu_seqlens"] is None and inputs["elapsed"] is None
        if (
            plain
            and state is not None
            and isinstance(mixer, STATE_MIXERS)
            and mixer.steps_in_place(hidden_states, self.norm)
        ):
            return mixer.step_in_place(hidden_states, self.norm, state, mask)
        if (
            plain
            and mask is None
            and isinstance(mixer, FracMixer)
            and reads_directly(mixer, hidden_states, self.norm, state)
        ):
            hidden_states, state = read_directly(mixer, hidden_states, self.norm, state)
        else:
            mixed, state = self.mixer(self.norm(hidden_states), state=state, **inputs)
            hidden_states = hidden_states + mixed
        if cache is not None:
            write_state(cache, self.layer_idx, state)
        return hidden_states
