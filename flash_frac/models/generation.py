"""Support for `generate` and `generate_batch`: caches, masks and decoding.

On a GPU, `inference.routing` decodes plain calls, and an engine decodes many requests. Both are
layers above the models, so they are imported only when they are used.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import logging

from flash_frac.models.attention_inputs import check_static_padding
from flash_frac.models.cache import CANNOT_CROP, FracCache, FracStaticCache
from flash_frac.models.configuration import FracConfig

logger = logging.get_logger(__name__)

NO_LIMIT = (
    "max_new_tokens must be given, here or in the generation_config (or its max_length): the state "
    "of a Frac model never fills up, so nothing else would end an answer"
)

# What `inference.routing` keeps between calls, by model. It is not stored in the model, so that
# copies and files of the model do not include it.
KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class FracGenerationMixin(GenerationMixin):
    """`GenerationMixin`, with caches that count their tokens."""

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Create a cache that counts its tokens, unless the caller passes one or wants none."""
        if generation_config.is_assistant:
            raise ValueError(f"a Frac model cannot be an assistant_model: {CANNOT_CROP}")
        cache, wanted = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if cache is not None and not isinstance(cache, FracCache | FracStaticCache):
            raise ValueError(
                f"past_key_values must be a FracCache, got {type(cache).__name__}; use the "
                "past_key_values that the model returned, or FracCache(model.config)"
            )
        if cache is not None and wanted is not None:
            raise ValueError(
                f"cache_implementation ({wanted!r}) and past_key_values cannot be combined; "
                "pass one"
            )
        if cache is not None or generation_config.use_cache is False:
            return
        cache = self._new_cache(
            wanted, max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        )
        if isinstance(cache, FracCache):
            cache.is_never_seen = not generation_config.return_dict_in_generate
        model_kwargs["past_key_values"] = cache

    def init_continuous_batching(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """A manager for continuous batching, with the methods of transformers' own.

        Args:
            generation_config: sampling settings; by default the model's.
            continuous_batching_config: transformers' own; its paging options must not be set.
            workload_hints: expected number and length of requests.

        Example: `manager = model.init_continuous_batching(); manager.start()`
        """
        from flash_frac.inference.batching import make_manager

        return make_manager(self, generation_config, continuous_batching_config, workload_hints)

    def generate_batch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: list[list[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        *,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """As transformers', but with an error where that one logs it and returns no answers.

        Example: `model.generate_batch([[5, 6, 7], [9]], max_new_tokens=20)`
        """
        config = self.generation_config if generation_config is None else generation_config
        known = set(signature(super().generate_batch).parameters) - {"kwargs"}
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"generate_batch has no argument {', '.join(unknown)}; pass sampling settings in a "
                "GenerationConfig, as generation_config"
            )
        limits = (max_new_tokens, config.max_new_tokens, config.max_length)
        if inputs and all(limit is None for limit in limits):
            raise ValueError(NO_LIMIT)
        results = super().generate_batch(
            inputs,
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            max_new_tokens=max_new_tokens,
            **options,
        )
        expected = len(inputs) * (config.num_return_sequences or 1)
        if len(results) < expected:
            raise RuntimeError(
                f"{expected - len(results)} of {expected} answers are missing; the error logged "
                "before says why"
            )
        return results

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Stop the manager that was kept for the next session, if there is one."""
        kept = self.__dict__.pop("_cached_continuous_batching_manager", None)
        if kept is not None:
            kept.destroy()

    def _new_cache(self, implementation: str | None, max_length: int) -> Cache:
        for word, done in (("offload", "stays on its device"), ("quantized", "is not quantised")):
            if word in (implementation or ""):
                logger.warning_once(
                    f"cache_implementation={implementation!r}: the cache {done}, because the state "
                    "of a Frac layer is small, has a fixed size and needs its precision."
                )
        config: FracConfig = self.config  # pyright: ignore[reportAttributeAccessIssue]
        if implementation not in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            return FracCache(config)
        # At least as long as the last one, so that its compiled code is reused.
        self._static_length = max(max_length, getattr(self, "_static_length", 0))
        return FracStaticCache(config, self._static_length)

    def _sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop of greedy and sampling calls, after `generate` has prepared the inputs.

        It runs on a `Generator` where the result is the same, see `inference.routing`.
        """
        from flash_frac.inference.routing import Call, generate

        model: Any = self
        call = Call(
            input_ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            inputs=model_kwargs,
        )
        made = generate(model, call)
        if made is not None:
            return made
        return super()._sample(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    @staticmethod
    def create_masks_for_generate(
        config: FracConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **unused: Any,
    ) -> dict[str, Tensor | None]:
        """Masks by type of layer for a static cache; the mask of one token has a fixed shape."""
        num_tokens = inputs_embeds.shape[1]
        masks: dict[str, Tensor | None] = {"linear_attention": None}
        # A token that was just generated is not padding.
        if attention_mask is not None and num_tokens > 1:
            check_static_padding(config, attention_mask)
            masks["linear_attention"] = attention_mask[:, -num_tokens:]
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        for name, make in makers.items():
            if name in config.layer_types:
                masks[name] = make(
                    config=config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    position_ids=position_ids,
                )
        return masks
