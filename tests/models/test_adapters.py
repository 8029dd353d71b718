"""PEFT: adapters on projections, on the head, on tensors of the mixer."""

import pytest
import torch
from torch import nn

from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, make_kind

peft = pytest.importorskip("peft")
close = torch.testing.assert_close
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def adapt(model, **options):
    """A LoRA adapter with weights that matter."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval().to(model.dtype)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["in_proj", "out_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": [], "target_parameters": ["mixer.D"]},
    ],
    ids=["projections", "all", "D"],
)
def test_an_adapter_trains_decodes_and_merges(ids, options):
    check_adapter(make_model(torch.float32), ids, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_every_projection_of_a_mixed_model(ids, kind):
    """Of attention, delta rule and MLP alike; in float64, because adapters this large amplify."""
    model = make_kind(kind)
    linears = {name for name, x in model.model.named_modules() if type(x) is nn.Linear}
    names = check_adapter(model, ids, target_modules="all-linear")
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.model.") for name in names}
    assert adapted == linears


def check_adapter(model, ids, **options):
    """Its gradients, decoding and merging; returns the names of what is trained."""
    before = model(ids).logits
    adapted = adapt(model, **options)
    after = adapted(ids).logits
    assert (after - before).abs().max() > 0.1
    adapted(ids, labels=ids).loss.backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all(p.grad.abs().max() > 0 for p in trained.values())
    decoded = adapted.generate(input_ids=ids, **OPTIONS)
    assert torch.equal(decoded, adapted.generate(input_ids=ids, use_cache=False, **OPTIONS))
    close(adapted.merge_and_unload()(ids).logits, after, rtol=1e-4, atol=1e-4)
    return list(trained)


@pytest.mark.filterwarnings("ignore:Model")
def test_the_fused_loss_calls_an_adapted_head(ids):
    """It reads the head's weight, of which an adapter is no part."""
    losses = {}
    for fused in (False, True):
        model = make_model(
            torch.float32, fuse_linear_cross_entropy=fused, tie_word_embeddings=False
        )
        adapted = adapt(model, target_modules=["lm_head"]).train()
        losses[fused] = adapted(ids, labels=ids).loss
        losses[fused].backward()
        assert all(p.grad.abs().max() > 0 for p in adapted.parameters() if p.requires_grad)
    close(losses[True], losses[False])


def test_an_adapter_on_tied_embeddings_needs_them_untied(ids):
    """PEFT merges into the tensor that both share, as docs/ecosystem.md says; a copy helps."""
    model = make_model(torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    adapted = adapt(model, target_modules=["lm_head"])
    after = adapted(ids).logits
    close(adapted.merge_and_unload()(ids).logits, after, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_the_convolution_is_refused(ids):
    adapted = adapt(make_model(torch.float32), target_modules=["in_proj"])
    for block in adapted.base_model.model.model.layers:
        block.mixer.conv1d = nn.Sequential(block.mixer.conv1d)
    with pytest.raises(ValueError, match="leave conv1d out of target_modules"):
        adapted(ids)
