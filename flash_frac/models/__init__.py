"""Frac as Hugging Face models, registered with the Auto classes when this module is imported."""

from flash_frac.extras import quiet_torchao

with quiet_torchao():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from flash_frac.models.cache import FracCache, read_state, write_state
    from flash_frac.models.configuration import FracConfig
    from flash_frac.models.modeling import (
        FracForCausalLM,
        FracForSequenceClassification,
        FracModel,
        FracPreTrainedModel,
    )
    from flash_frac.models.regridding import regrid

AutoConfig.register(FracConfig.model_type, FracConfig)
AutoModel.register(FracConfig, FracModel)
AutoModelForCausalLM.register(FracConfig, FracForCausalLM)
AutoModelForSequenceClassification.register(FracConfig, FracForSequenceClassification)
# Trainer's label smoothing, among others, looks up here which models shift their labels.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FracConfig.model_type] = FracForCausalLM.__name__

__all__ = [
    "FracCache",
    "FracConfig",
    "FracForCausalLM",
    "FracForSequenceClassification",
    "FracModel",
    "FracPreTrainedModel",
    "read_state",
    "regrid",
    "write_state",
]
