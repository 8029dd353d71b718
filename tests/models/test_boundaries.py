"""Packed sequences under every name in transformers and TRL; no argument is ignored."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from flash_frac.models import FracForSequenceClassification
from flash_frac.models.boundaries import find_boundaries
from tests.models.conftest import make_model
from tests.models.hybrids import OPTIONS, close, make_hybrid

LENGTHS = (12, 1, 27)


@pytest.fixture(params=[make_model, make_hybrid])
def model(request):
    return request.param()


@pytest.fixture
def documents(ids):
    return [{"input_ids": part.tolist()} for part in ids[0].split(LENGTHS)]


def loss_one_by_one(model, documents):
    """Of all documents, each read alone; every token but the first of a document counts once."""
    total = 0
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        if ids.shape[1] > 1:
            total += model(ids, labels=ids, num_items_in_batch=1).loss
    return total / sum(len(document["input_ids"]) - 1 for document in documents)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ],
)
def test_flattened_documents_do_not_read_each_other(model, documents, options):
    """By the collator of transformers, with each of its ways to say where documents begin."""
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(documents)
    expected = loss_one_by_one(model, documents)
    close(model(**batch).loss, expected)
    if "position_ids" in batch:
        # Whatever number they begin with.
        batch["position_ids"] += 2
        close(model(**batch).loss, expected)


@torch.no_grad()
def test_positions_that_do_not_restart_change_nothing(model, ids):
    expected = model(ids).logits
    for positions in (torch.arange(40)[None], torch.arange(5, 45).expand(3, -1)):
        close(model(ids, position_ids=positions).logits, expected)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, 30:] = 0, 0
    padded = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    expected = model(ids, attention_mask=mask).logits
    close(model(ids, attention_mask=mask, position_ids=padded).logits, expected)


def restarting(*starts, rows=1):
    positions = torch.arange(40)
    for start in starts:
        positions[start:] = torch.arange(40 - start)
    return positions.expand(rows, -1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"position_ids": restarting(9, rows=3)}, "position_ids packs sequences in a batch of 3"),
        ({"seq_idx": restarting(9, rows=3) // 20}, "seq_idx packs sequences in a batch of 3"),
        ({"position_ids": restarting() * 2}, "position_ids must increase by one .* begins at 78"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 40]), "cu_seq_lens_k": torch.tensor([0, 40])},
            "cu_seq_lens_q and cu_seq_lens_k must be equal",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seqlens must rise from 0 to T = 40"),
        (
            {"position_ids": restarting(9), "attention_mask": restarting().gt(3)},
            "position_ids must increase by one per token with padding",
        ),
    ],
)
def test_packing_that_cannot_be_honoured_is_refused(model, ids, arguments, match):
    rows = 3 if "batch of 3" in match else 1
    with pytest.raises(ValueError, match=match):
        model(ids[:rows], **arguments)


def test_restarting_positions_beside_a_cache_are_refused(model, ids):
    cache = model(ids[:1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="with a cache"):
        model(ids[:1], past_key_values=cache, position_ids=restarting(9))


def test_positions_are_refused_while_compiling():
    """Their values cannot be read there; boundaries themselves are taken as they are."""
    compiled = torch.compile(find_boundaries, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="position_ids cannot be read while compiling"):
        compiled(None, restarting(9), mask=None, continues=False)
    ends = torch.tensor([0, 9, 40])
    found = compiled(None, restarting(9), mask=None, continues=False, cu_seq_lens_q=ends)
    assert torch.equal(found, ends)


@pytest.mark.parametrize("make", [make_model, make_hybrid])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cu_seqlen", "; did you mean cu_seqlens?"),
        ("atention_mask", "; did you mean attention_mask?"),
        ("positions_ids", "; did you mean position_ids?"),
        ("num_items_in_batches", "; did you mean num_items_in_batch?"),
        ("zzz", "$"),
    ],
)
def test_misspelt_arguments_are_refused(make, ids, name, hint):
    model = make()
    classifier = make(model_class=FracForSequenceClassification)
    for called in (model, model.model, classifier):
        with pytest.raises(TypeError, match=rf"unexpected argument {name}{hint}"):
            called(ids, **{name: ids})


def test_arguments_of_every_model_are_taken(model, ids):
    """What generic code passes whatever the model is, and what changes nothing here."""
    expected = model(ids, labels=ids).loss
    zeros, count = torch.zeros_like(ids), torch.tensor(3 * 39)
    got = model(ids, labels=ids, token_type_ids=zeros, num_items_in_batch=count).loss
    close(got, expected)
    # `generate` hands its tokenizer on to the model, as its server does.
    got = model.generate(ids, tokenizer=object(), **OPTIONS)
    assert torch.equal(got, model.generate(ids, **OPTIONS))
