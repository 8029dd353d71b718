"""Frac as a Hugging Face model: FracModel, FracForCausalLM, FracForSequenceClassification.

A block is x + mixer(RMSNorm(x)), then, if the configuration has an MLP, x + MLP(RMSNorm(x)); after
the last one comes a norm. `config.mixer_types` gives the mixer of each block.
Letters: B batch, T time, E width, V vocabulary, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from flash_frac.layers import DELTA_TIME_PARAMETERS, TIME_PARAMETERS, RMSNorm
from flash_frac.layers.plain import call_linear
from flash_frac.models.attention import AttentionBlock, FracRotaryEmbedding, recorded_attentions
from flash_frac.models.attention_dispatch import attention_inputs
from flash_frac.models.attention_inputs import AttentionInputs
from flash_frac.models.block import STATE_MIXERS, FracBlock
from flash_frac.models.boundaries import find_boundaries
from flash_frac.models.cache import FracCache, FracStaticCache
from flash_frac.models.configuration import FracConfig
from flash_frac.models.generation import KEPT, FracGenerationMixin
from flash_frac.models.inputs import (
    PACKING,
    check_inputs,
    check_labels,
    check_names,
    local_mask,
    loss_arguments,
    random_elapsed,
    wants_attentions,
    wants_cache,
)
from flash_frac.models.mixers import ATTENTION, final_types
from flash_frac.models.recomputing import Recomputing
from flash_frac.ops import check_cu_seqlens
from flash_frac.ops.loss.api import linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.get_logger(__name__)


class FracPreTrainedModel(Recomputing, PreTrainedModel):
    """Loading, saving and initialisation, common to all Frac models."""

    config_class = FracConfig
    config: FracConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = {"FracBlock"}  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = True
    # Attention implementations, for attention layers.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        # Only existing layer classes: FSDP must find every class named here.
        types = set(config.mixer_types or ())
        self._no_split_modules = {
            "AttentionBlock" if x in ATTENTION else "FracBlock" for x in types
        }
        carry_time = {"frac": TIME_PARAMETERS, "delta": DELTA_TIME_PARAMETERS}
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for x in types for name in carry_time.get(x, ())
        }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, STATE_MIXERS):
            for name, value in module.initial_time_values().items():
                if getattr(module, name) is not None:
                    init.copy_(getattr(module, name), value)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy our source files into every checkpoint."""

    def set_context_group(self, group: ProcessGroup | None) -> None:
        """Split each row across the ranks of a group; None gives every rank its own rows again.

        Rank r then passes slice r of each row, and of labels that were shifted before slicing, as
        both `labels` and `shift_labels`. If `num_items_in_batch` counts the labels of all ranks,
        the ranks' losses and gradients sum to the loss and its gradient.

        Example:
            >>> model.set_context_group(torch.distributed.group.WORLD)
            >>> loss = model(ids, labels=shifted, shift_labels=shifted, num_items_in_batch=n).loss
        """
        if group is not None and self.config.frac_time_dilation > 1:
            raise ValueError(
                "group must be None for a model with frac_time_dilation "
                f"({self.config.frac_time_dilation}): each rank would draw its own time for "
                "a row; set it to 1, or give every rank its own rows"
            )
        for module in self.modules():
            if isinstance(module, (*STATE_MIXERS, FracModel)):
                module.context_group = group


class FracModel(FracPreTrainedModel):
    """Token embeddings, a block for each of config.mixer_types, and a final norm."""

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.attention_config = config.attention_config() if config.attention_layers else None
        if self.attention_config is not None:
            self.attention_config._attn_implementation = config._attn_implementation
        self.rotary_emb = None
        if self.attention_config is not None and config.attention_positions == "rope":
            self.rotary_emb = FracRotaryEmbedding(self.attention_config)
        self.mixer_types = config.mixer_types = final_types(config)
        self.layers = nn.ModuleList(self._block(n, x) for n, x in enumerate(self.mixer_types))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        # The ranks that share each row, see `set_context_group`.
        self.context_group: ProcessGroup | None = None
        self.post_init()

    def _block(self, layer_idx: int, mixer_type: str) -> FracBlock | AttentionBlock:
        if mixer_type in ATTENTION:
            assert self.attention_config is not None
            return AttentionBlock(self.config, self.attention_config, layer_idx)
        return FracBlock(self.config, layer_idx, mixer_type)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states of a batch, or of its next tokens.

        Args:
            input_ids: (B, T), or inputs_embeds (B, T, E).
            attention_mask: (B, T), 0 at padding, which may be anywhere; with a cache it may also
                cover earlier tokens, (B, past + T).
            position_ids: (B or 1, T); in one row without padding, a position that does not follow
                the one before starts a packed sequence. Otherwise ignored: attention uses the
                number of real tokens before each.
            past_key_values: the states to continue from, with any number of new tokens.
            use_cache: return the states; by default, config.use_cache outside training.
            output_attentions: return the weights of attention layers, computed with transformers'
                "eager" implementation.
            output_hidden_states: return the input of every block and the normed output.
            cu_seqlens: (N + 1,) boundaries of sequences packed in one row (B = 1). The cache then
                holds N states, and decoding continues with a batch of N.
            elapsed: (B, T), positive: the time before each token, by which Frac and delta layers
                fade; attention ignores it. If None it is 1 or, in training, drawn by
                config.frac_time_dilation.
            kwargs: arguments that transformers and TRL pass to every model: cu_seq_lens_q,
                cu_seq_lens_k or seq_idx instead of cu_seqlens, and unused ones (`inputs.UNUSED`).
        """
        check_names(kwargs, ARGUMENTS)
        check_inputs(input_ids, inputs_embeds, position_ids, past_key_values, self.config)
        with_attentions = wants_attentions(output_attentions, self.config, attention_mask)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        use_cache = wants_cache(self, use_cache, past_key_values)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        # For a static cache, `generate` prepares masks by type of layer.
        masks = attention_mask if isinstance(attention_mask, dict) else {}
        mask = masks.get("linear_attention") if masks else attention_mask
        mask = local_mask(mask, hidden_states, past_key_values)
        cu_seqlens = find_boundaries(
            cu_seqlens,
            position_ids,
            mask=mask,
            continues=past_key_values is not None,
            **{name: kwargs[name] for name in PACKING if name in kwargs},
        )
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, hidden_states)
        if use_cache and past_key_values is None:
            past_key_values = FracCache(self.config)

        if elapsed is None and self.training and self.config.frac_time_dilation > 1:
            elapsed = random_elapsed(hidden_states, cu_seqlens, self.config.frac_time_dilation)
        inputs = {"attention_mask": mask, "cu_seqlens": cu_seqlens, "elapsed": elapsed}
        if isinstance(past_key_values, FracStaticCache):
            past_key_values.place(hidden_states.device)
        attention = None
        if self.attention_config is not None:
            attention = attention_inputs(
                self.config,
                hidden_states,
                masks or attention_mask,
                mask,
                past_key_values,
                cu_seqlens,
                position_ids,
                self.context_group,
            )
        implementation = "eager" if with_attentions else self.config._attn_implementation
        with recorded_attentions(self.layers) if with_attentions else nullcontext() as attentions:
            states = self._run_blocks(
                hidden_states, past_key_values, inputs, attention, implementation
            )

        output = BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=None if attentions is None else tuple(attentions),
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _run_blocks(
        self,
        hidden_states: Tensor,
        cache: Cache | None,
        state_inputs: dict[str, Any],
        attention: AttentionInputs | None,
        implementation: str | None,
    ) -> list[Any]:
        """The input of every block, and the normed output of the last one."""
        inputs = {"frac": state_inputs, "delta": state_inputs}
        if attention is not None:
            config: Any = self.attention_config
            # The caller may change it at any time. Assign it only if it differs, because a compiled
            # model would recompile.
            if config._attn_implementation != implementation:
                config._attn_implementation = implementation
            inputs |= attention.arguments(config, self.rotary_emb)
        states = []
        for block, name in zip(self.layers, self.mixer_types, strict=True):
            states.append(hidden_states)
            hidden_states = block(hidden_states, past_key_values=cache, **inputs[name])
        if isinstance(cache, FracCache | FracStaticCache):
            cache.count(hidden_states.shape[1])
        if attention is not None:
            attention.remember()
        return [*states, self.norm(hidden_states)]


class FracForCausalLM(FracPreTrainedModel, FracGenerationMixin):
    """A Frac language model: FracModel and a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FracConfig) -> None:
        super().__init__(config)
        self.model = FracModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def train(self, mode: bool = True) -> FracForCausalLM:
        """As in torch; training mode also frees the GPU memory that `generate` keeps."""
        if mode:
            KEPT.pop(self, None)
        return super().train(mode)

    def _fuses_loss(self) -> bool:
        """Whether the loss may read the head's weight directly, because the head is plain."""
        fuses = self.training and self.config.fuse_linear_cross_entropy
        head = self.lm_head
        # FSDP changes its class, and has gathered the weight once the norm has run.
        plain = type(head).forward is nn.Linear.forward and not hasattr(head, "_hf_hook")
        if fuses and not (plain and type(head.weight) in (Tensor, nn.Parameter)):
            logger.warning_once(
                "fuse_linear_cross_entropy is off: lm_head is adapted, offloaded or quantised, "
                "so it must be called."
            )
            return False
        return fuses

    def _fused_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The value of `loss_function`, computed from the hidden states."""
        items = num_items_in_batch
        if isinstance(items, int):
            items = torch.tensor(items, device=hidden_states.device)
        # Shift the labels and not the states, which are many times larger.
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
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token at every position, and the loss if there are labels.

        Args:
            labels: (B, T) token ids, -100 at ignored positions; they are shifted here.
            logits_to_keep: number of last positions that get logits (0 for all), or their indices.
            kwargs: num_items_in_batch, ignore_index and shift_labels go to the loss.
            The rest as in `FracModel`.

        Returns:
            logits (B, T, V) float32, loss, past_key_values, hidden_states. In training with labels
            and config.fuse_linear_cross_entropy, logits are None: they are never all in memory.
        """
        of_loss = loss_arguments(kwargs)
        check_labels(labels, input_ids, inputs_embeds, self.config.vocab_size, of_loss)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seqlens=cu_seqlens,
            elapsed=elapsed,
            **kwargs,
        )
        logits, loss = None, None
        if labels is not None and self._fuses_loss():
            loss = self._fused_loss(outputs.last_hidden_state, labels, **of_loss)
        else:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = call_linear(self.lm_head, outputs.last_hidden_state[:, kept]).float()
        if labels is not None and loss is None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **of_loss
            )
        output = CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()


# Known argument names, for errors about unknown ones.
ARGUMENTS = tuple(signature(FracForCausalLM.forward).parameters)


class FracForSequenceClassification(GenericForSequenceClassification, FracPreTrainedModel):
    """A Frac model that classifies a sequence by its last real token."""

    def set_context_group(self, group: ProcessGroup | None) -> None:
        if group is not None:
            raise ValueError("group must be None: a classifier reads the end of a whole row")
