"""transformers' ModelTesterMixin and GenerationTesterMixin on pure and mixed Frac models."""

import unittest
from unittest import mock

import pytest
import torch
from transformers import PreTrainedConfig

from flash_frac.models import (
    FracConfig,
    FracForCausalLM,
    FracForSequenceClassification,
    FracModel,
)
from tests.hf.source import SOURCE, load, path_of

pytestmark = pytest.mark.hf
if not path_of("test_modeling_common").is_file():
    pytest.skip(f"no tests of transformers in {SOURCE}; run make test-hf", allow_module_level=True)

common = load("test_modeling_common")
# The mixins ask these tables which outputs a class has; the Auto classes of a library outside
# transformers are in others.
for table, model_class in (
    (common.MODEL_MAPPING_NAMES, FracModel),
    (common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, FracForCausalLM),
    (common.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, FracForSequenceClassification),
):
    table["frac"] = model_class.__name__
ModelTesterMixin, GenerationTesterMixin = common.ModelTesterMixin, common.GenerationTesterMixin


def set_what_fits(config, name, value):
    """The mixins set `sliding_window` of any configuration that has the field."""
    slides = "sliding_attention" in (getattr(config, "mixer_types", None) or [])
    PreTrainedConfig.__setattr__(
        config, name, None if name == "sliding_window" and not slides else value
    )


class FracModelTester:
    """Sizes, a configuration and inputs: what the mixins ask of a model's tester."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4
    num_labels = 3
    # Fields of the configuration that differ.
    fields = {}  # noqa: RUF012

    def __init__(self, parent):
        self.parent = parent

    def get_config(self):
        return FracConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            frac_num_modes=4,
            num_labels=self.num_labels,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = (self.batch_size, self.seq_length)
        # No special tokens: one inside a prompt would count as padding.
        ids = torch.randint(3, self.vocab_size, shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tester(**fields):
    """A tester of models with these fields."""
    return type("MixedModelTester", (FracModelTester,), {"fields": fields})


class FracTests:
    """What pure and mixed models have in common."""

    all_model_classes = (FracModel, FracForCausalLM, FracForSequenceClassification)

    def setUp(self):
        self.enterContext(mock.patch.object(FracConfig, "__setattr__", set_what_fits))
        self.model_tester = self.model_tester_class(self)

    def _get_conv_state_shape(self, batch_size, config):
        return (batch_size, config.intermediate_size, config.frac_conv_kernel - 1)

    def _get_recurrent_state_shape(self, batch_size, config):
        heads, modes = config.num_attention_heads, config.frac_num_modes
        return (batch_size, heads, modes, config.frac_head_dim)


class PureModelTest(FracTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester_class = FracModelTester
    has_attentions = False


class MixedModelTests(FracTests):
    """Two tests are overridden: not all layers have attentions, or could obey a mask of pairs."""

    def test_attention_outputs(self):
        length = self.model_tester.seq_length
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class._from_config(config, attn_implementation="eager").eval()
            plain, asked = model(**inputs), model(**inputs, output_attentions=True)
            assert plain.attentions is None and len(asked) == len(plain) + 1
            weights = asked.attentions[0]
            assert len(asked.attentions) == len(config.attention_layers)
            assert weights.shape[1:] == (config.num_attention_heads, length, length)
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            model.config.output_attentions = True
            assert torch.equal(model(**inputs).attentions[0], weights)

    def test_custom_4d_attention_mask(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        mask = inputs["attention_mask"][:, None, None].expand(
            -1, 1, self.model_tester.seq_length, -1
        )
        with pytest.raises(ValueError, match="attention_mask must have shape"):
            FracForCausalLM(config)(inputs["input_ids"], attention_mask=mask)


class AttentionTest(MixedModelTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester_class = tester(attention_layers=[1])


class NoPositionsTest(MixedModelTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester_class = tester(
        mixer_types=["frac", "attention"], attention_positions="none", mlp_intermediate_size=40
    )


class SlidingTest(MixedModelTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """The mixins expect caches that are not full yet; where they test windows they set one of 2."""

    model_tester_class = tester(mixer_types=["frac", "sliding_attention"], sliding_window=64)


class TransformerTest(MixedModelTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester_class = tester(mixer_types=["attention"], mlp_intermediate_size=40)


class DeltaTest(MixedModelTests, ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    model_tester_class = tester(mixer_types=["delta", "attention"], attention_positions="none")

    def _get_conv_state_shape(self, batch_size, config):
        keys = config.delta_num_heads * config.delta_head_dim
        channels = (2 + int(config.delta_expand_v)) * keys
        return (batch_size, channels, config.delta_conv_kernel - 1)

    def _get_recurrent_state_shape(self, batch_size, config):
        heads, keys = config.delta_num_heads, config.delta_head_dim
        return (batch_size, heads, keys, int(config.delta_expand_v * keys))
