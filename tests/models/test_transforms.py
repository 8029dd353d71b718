"""torch transforms of whole models: second derivatives, torch.export, torch.func."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_frac.layers import MixerState
from flash_frac.ops.testing import relative_error
from tests.models.conftest import ANY_LENGTH, Logits, make_model, padded

close = torch.testing.assert_close


def hidden_loss(model, ids):
    # Not logits, nor the plain loss of transformers, which are float32.
    return model.model(ids).last_hidden_state.pow(3).mean()


def fused_loss(model, ids):
    return model(ids, labels=ids).loss


# One layer of each type of attention, with MLPs.
OTHERS = {
    "mixer_types": ["attention", "sliding_attention"],
    "sliding_window": 7,
    "mlp_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        (hidden_loss, {}),
        (fused_loss, {}),
        (hidden_loss, OTHERS),
        (hidden_loss, {"mixer_types": ["frac", "delta"]}),
    ],
)
def test_products_with_the_hessian(ids, loss, layers):
    """Of a loss of a small model, against differences of gradients."""
    model = make_model(num_hidden_layers=2, fuse_linear_cross_entropy=True, **layers).train()
    weights = list(model.parameters())
    # The kernels of torch for attention have no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        check_products(model, ids, loss, weights)


def check_products(model, ids, loss, weights):
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]

    def slopes(**options):
        return torch.autograd.grad(loss(model, ids), weights, **options)

    pairs = zip(slopes(create_graph=True), directions, strict=True)
    products = torch.autograd.grad(sum((slope * d).sum() for slope, d in pairs), weights)
    sides = []
    for step in (1e-7, -2e-7):
        with torch.no_grad():
            torch._foreach_add_(weights, directions, alpha=step)
        sides.append(slopes())
    for product, right, left in zip(products, *sides, strict=True):
        assert relative_error(product, (right - left) / 2e-7) < 1e-6


def test_export_of_any_length():
    """The forward pass with its mask."""
    model = Logits(make_model(torch.float32, num_hidden_layers=1))
    exported = torch.export.export(model, padded(40), dynamic_shapes=ANY_LENGTH).module()
    for time in (3, 100):
        assert relative_error(exported(*padded(time)), model(*padded(time))) < 1e-6


def test_export_of_attention_of_any_length():
    """Without a mask, where short and long rows of sliding layers take other ways."""
    model = make_model(torch.float32, num_hidden_layers=2, **OTHERS)
    model.config.use_cache, (ids, _) = False, padded(40)
    exported = torch.export.export(
        model, (ids,), dynamic_shapes={"input_ids": {1: torch.export.Dim.AUTO}}
    )
    for time in (3, 100):
        ids, _ = padded(time)
        assert relative_error(exported.module()(ids).logits, model(ids).logits) < 1e-6


def test_states_are_trees():
    """What torch.export, torch.func and DataParallel walk through."""
    mixer = make_model().model.layers[0].mixer
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    state = mixer(x[:, :4])[1]
    assert len(torch.utils._pytree.tree_leaves(state)) == 2
    rows = torch.func.vmap(
        lambda x, *s: mixer(x[None], state=MixerState(*(t[None] for t in s)))[0][0]
    )
    close(rows(x[:, 4:], *state), mixer(x)[0][:, 4:])
    exported = torch.export.export(mixer, (x[:, 4:],), {"state": state}).module()
    _, after = exported(x[:, 4:], state=state)
    assert isinstance(after, MixerState)
    close(after.recurrent, mixer(x)[1].recurrent)
