"""Frac as a Hugging Face model: FracModel, FracForCausalLM, FracForSequenceClassification.

A block is x + mixer(RMSNorm(x)), without an MLP; after the last one comes a norm. In hybrid models,
`config.attention_layers` are blocks of a transformer, see `flash_frac.models.attention`.
Letters: B batch, T time, E width, V vocabulary, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from flash_frac.layers import TIME_PARAMETERS, FracMixer, RMSNorm
from flash_frac.models.attention import AttentionBlock, AttentionInputs, FracRotaryEmbedding
from flash_frac.models.cache import FracCache, read_state, write_state
from flash_frac.models.configuration import FracConfig
from flash_frac.models.inputs import check_inputs, local_mask, random_elapsed
from flash_frac.ops import check_cu_seqlens
from flash_frac.ops.loss import linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.get_logger(__name__)


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


class FracPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, common to all Frac models."""

    config_class = FracConfig
    config: FracConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = {"FracBlock"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = {f"mixer.{name}" for name in TIME_PARAMETERS}  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = True
    # Of the attention layers of hybrid models.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        if config.attention_layers:
            # Not in all models: FSDP wants to find what is named here.
            self._no_split_modules = {"FracBlock", "Qwen3DecoderLayer"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FracMixer):
            for name, value in module.initial_time_values().items():
                if getattr(module, name) is not None:
                    init.copy_(getattr(module, name), value)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: transformers would copy our source files into every checkpoint."""

    def set_context_group(self, group: ProcessGroup | None) -> None:
        """Share each row among the ranks of a group; None gives every rank rows of its own again.

        Rank r then passes slice r of each row, and of labels that were shifted before the cut, as
        both `labels` and `shift_labels`. With `num_items_in_batch`, the labels of all ranks that
        count, the sum of the ranks' losses is the loss and the sum of their gradients its gradient.

        Example:
            >>> model.set_context_group(torch.distributed.group.WORLD)
            >>> loss = model(ids, labels=shifted, shift_labels=shifted, num_items_in_batch=n).loss
        """
        if group is not None and self.config.attention_layers:
            raise ValueError(
                "group must be None for a model with attention_layers "
                f"({self.config.attention_layers}), whose attention would see the tokens of its "
                "own rank alone; give every rank rows of its own"
            )
        if group is not None and self.config.frac_time_dilation > 1:
            raise ValueError(
                "group must be None for a model with frac_time_dilation "
                f"({self.config.frac_time_dilation}): each rank would draw a time of its own for "
                "a row; set it to 1, or give every rank rows of its own"
            )
        for module in self.modules():
            if isinstance(module, FracMixer):
                module.context_group = group


class FracModel(FracPreTrainedModel):
    """Token embeddings, Frac blocks, or some of attention between them, and a final norm."""

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.attention_config = config.attention_config() if config.attention_layers else None
        if self.attention_config is not None:
            self.rotary_emb = FracRotaryEmbedding(self.attention_config)
        self.layers = nn.ModuleList(self._block(n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _block(self, layer_idx: int) -> FracBlock | AttentionBlock:
        if self.attention_config is None or layer_idx not in (self.config.attention_layers or []):
            return FracBlock(self.config, layer_idx)
        return AttentionBlock(self.attention_config, layer_idx)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states of a batch, or of the next tokens of one.

        Args:
            input_ids: (B, T), or inputs_embeds (B, T, E).
            attention_mask: (B, T), 0 at padding, on either side or inside; with a cache it may also
                cover the tokens before, (B, past + T).
            past_key_values: the states to continue from; any number of tokens is taken at once.
            use_cache: return the states; by default, config.use_cache outside training.
            output_hidden_states: return the input of every block and the normed output.
            cu_seqlens: (N + 1,) boundaries of sequences packed in one row (B = 1). The cache then
                holds N states, and decoding goes on with a batch of N.
            elapsed: (B, T), positive: the time before each token, which multiplies its delta; the
                usual time, 1, if None, or in training what config.frac_time_dilation draws.
            kwargs: what generic code passes to every model, such as position_ids; not used. In
                hybrid models the position of a token is the number of real ones before it.
        """
        check_inputs(input_ids, inputs_embeds, self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and self.gradient_checkpointing and self.training:
            logger.warning_once("use_cache=True is switched off by gradient checkpointing.")
            use_cache = False
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, hidden_states)
        mask = local_mask(attention_mask, hidden_states, past_key_values)
        if use_cache and past_key_values is None:
            past_key_values = FracCache(self.config)

        if elapsed is None and self.training and self.config.frac_time_dilation > 1:
            elapsed = random_elapsed(hidden_states, cu_seqlens, self.config.frac_time_dilation)
        frac_inputs = {"attention_mask": mask, "cu_seqlens": cu_seqlens, "elapsed": elapsed}
        attention, attention_inputs = None, {}
        if self.attention_config is not None:
            attention = AttentionInputs(hidden_states, mask, past_key_values, cu_seqlens)
            attention_inputs = self._attention_arguments(attention, hidden_states)
        all_hidden_states: list[Any] = [hidden_states]
        for block in self.layers:
            inputs = frac_inputs if isinstance(block, FracBlock) else attention_inputs
            hidden_states = block(hidden_states, past_key_values=past_key_values, **inputs)
            all_hidden_states.append(hidden_states)
        hidden_states = self.norm(hidden_states)
        all_hidden_states[-1] = hidden_states
        if isinstance(past_key_values, FracCache):
            past_key_values.num_tokens += hidden_states.shape[1]
        if attention is not None:
            attention.remember()

        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _attention_arguments(
        self, attention: AttentionInputs, hidden_states: Tensor
    ) -> dict[str, Any]:
        config: Any = self.attention_config
        # The caller may choose another one at any time.
        config._attn_implementation = self.config._attn_implementation
        return attention.arguments(config, self.rotary_emb, hidden_states)


class FracForCausalLM(FracPreTrainedModel, GenerationMixin):
    """A Frac language model: FracModel and a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        self.model = FracModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """A cache that counts its tokens, unless the caller brings one or wants none."""
        cache = model_kwargs.get("past_key_values")
        if cache is not None and not isinstance(cache, FracCache):
            raise ValueError(
                f"past_key_values must be a FracCache, got {type(cache).__name__}; use the "
                " past_key_values that the model returned, or FracCache(model.config)"
            )
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FracCache(self.config)

    def _fused_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """What `loss_function` gives, from the hidden states."""
        items = num_items_in_batch
        if isinstance(items, int):
            items = torch.tensor(items, device=hidden_states.device)
        # Labels are shifted, not the states, which are many times larger.
        if shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
        return linear_cross_entropy(
            hidden_states,
            self.lm_head.weight,
            shift_labels,
            ignore_index=ignore_index,
            num_items=None if items is None else items.to(hidden_states.device),
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token at every position, and the loss if there are labels.

        Args:
            labels: (B, T) token ids, -100 where nothing is to be predicted; shifted here.
            logits_to_keep: compute logits for the last positions only (0 for all), or at these.
            kwargs: passed to the loss, such as num_items_in_batch.
            The rest as in `FracModel`.

        Returns:
            logits (B, T, V) float32, loss, past_key_values, hidden_states. In training with labels
            and config.fuse_linear_cross_entropy, logits are None: they are never all in memory.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seqlens=cu_seqlens,
            elapsed=elapsed,
        )
        logits, loss = None, None
        if labels is not None and self.training and self.config.fuse_linear_cross_entropy:
            loss = self._fused_loss(outputs.last_hidden_state, labels, **kwargs)
        else:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(outputs.last_hidden_state[:, kept]).float()
        if labels is not None and loss is None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()


class FracForSequenceClassification(GenericForSequenceClassification, FracPreTrainedModel):
    """A Frac model that classifies a sequence from its last token that is not padding."""
