"""One Frac layer of a model: x + mixer(RMSNorm(x)), with its state in the cache."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from flash_frac.layers import FracMixer, RMSNorm
from flash_frac.models.cache import read_state, write_state
from flash_frac.models.configuration import FracConfig


def mixer_from_config(config: FracConfig) -> FracMixer:
    """The mixer of one layer of a model with this configuration."""
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
    """x + mixer(norm(x)), keeping its state in the cache, if there is one."""

    def __init__(self, config: FracConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = mixer_from_config(config)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> Tensor:
        state = None if past_key_values is None else read_state(past_key_values, self.layer_idx)
        if (
            state is not None
            and cu_seqlens is None
            and elapsed is None
            # An adapter may stand for the mixer; it is to be called.
            and isinstance(self.mixer, FracMixer)
            and self.mixer.steps_in_place(hidden_states, self.norm)
        ):
            return self.mixer.step_in_place(hidden_states, self.norm, state, attention_mask)
        mixed, state = self.mixer(
            self.norm(hidden_states),
            state=state,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            elapsed=elapsed,
        )
        if past_key_values is not None:
            write_state(past_key_values, self.layer_idx, state)
        return hidden_states + mixed
