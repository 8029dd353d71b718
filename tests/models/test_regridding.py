"""New banks for trained models: what stays, what changes, and by how much."""

import copy
import math

import pytest
import torch
from torch import nn

from flash_frac.models import FracCache, FracConfig, FracForCausalLM, FracModel
from flash_frac.models.regridding import _interpolation, regrid
from flash_frac.ops import ControlSettings, Dynamics
from flash_frac.theory.banks import geometric_bank, named_bank
from tests.models.conftest import make_model
from tests.tiny import tiny_config

TAU_MAX = 256.0
MARK = 15


def recall(batch, time=48):
    """A key, noise, and after every mark, six tokens apart, the key again."""
    ids = torch.randint(11, 15, (batch, time))
    key = torch.randint(3, 11, (batch, 1))
    ids[:, :1], ids[:, 6::6], ids[:, 7::6] = key, MARK, key
    return ids


@pytest.fixture(scope="module")
def trained():
    """Nine modes a factor of 2 apart, after enough steps for the memory to matter."""
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=16,
        hidden_size=24,
        frac_num_modes=9,
        frac_tau_max=TAU_MAX,
        initializer_range=0.2,
        frac_residual_read_init=0.0,
    )
    model = FracForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        ids = recall(16)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().eval()


@pytest.fixture
def tokens():
    return recall(8, time=96)


def change_of_logits(old, new, ids):
    with torch.no_grad():
        before, after = old(ids).logits, new(ids).logits
    return ((after - before).norm() / before.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bank", ["geometric", "W1_M8_simplex", [1.0, 2, 3, 5, 8, 13, 21, 34]])
def test_the_same_bank_is_the_identity(dtype, bank, ids):
    model = make_model(dtype, frac_bank=bank)
    for given in ({}, {"bank": bank}, {"num_modes": 8, "bank": bank}):
        same = regrid(model, **given)
        assert same.model is not model and same.model.config.frac_bank == bank
        state, copied = model.state_dict(), same.model.state_dict()
        assert all(torch.equal(x, copied[name]) for name, x in state.items())
        assert same.sup_error == same.l2_error == same.shape_error == 0
    assert change_of_logits(model, same.model, ids) == 0


def test_the_bank_of_a_checkpoint_counts_not_its_rounding(ids):
    """Logs of timescales that were rounded otherwise, as in published checkpoints, are kept."""
    model = make_model(torch.float32)
    for block in model.model.layers:
        block.mixer.base_log_tau.mul_(1 + 2**-23)
    same = regrid(model, num_modes=8).model
    assert torch.equal(
        same.model.layers[0].mixer.base_log_tau, model.model.layers[0].mixer.base_log_tau
    )
    assert change_of_logits(model, same, ids) == 0


def test_the_old_model_is_untouched(model, ids):
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    random = torch.get_rng_state()
    new = regrid(model, tau_max=1e6, num_modes=12).model
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config.to_dict() == config
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_rows_are_interpolated():
    old = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    new = torch.tensor([-2.0, 0.0, 0.25, 1 + 1e-9, 2.0, 3 - 1e-9, 5.0], dtype=torch.float64)
    low, high, share = _interpolation(old, new)
    assert (old[low] * (1 - share) + old[high] * share).tolist() == [0, 0, 0.25, 1, 2, 3, 3]
    # Exactly one row, and not a mixture that rounds to it.
    assert share[[0, 1, 3, 5, 6]].eq(0).all()


def test_an_extended_bank_holds_the_old_rows(trained):
    new = regrid(trained, tau_max=TAU_MAX**2, num_modes=17).model
    for before, after in zip(trained.model.layers, new.model.layers, strict=True):
        old = before.mixer.rw_proj.weight.unflatten(0, (2, 2, 9))
        rows = after.mixer.rw_proj.weight.unflatten(0, (2, 2, 17))
        assert torch.equal(rows[:, :, :9], old)
        assert torch.equal(rows[:, :, 9:], old[:, :, -1:].expand(-1, -1, 8, -1))
        log_tau = after.mixer.base_log_tau
        assert torch.equal(log_tau[:9], before.mixer.base_log_tau)
        assert log_tau[-1].item() == pytest.approx(2 * math.log(TAU_MAX))


def test_the_weights_of_the_norm_follow_the_modes():
    model = make_model(frac_rw_norm=True, frac_num_modes=9, frac_tau_max=TAU_MAX)
    weight = model.model.layers[0].mixer.rw_norm.weight
    torch.nn.init.normal_(weight)
    norm = regrid(model, num_modes=17).model.model.layers[0].mixer.rw_norm
    old, new = weight.view(2, 9), norm.weight.view(2, 17)
    assert torch.equal(new[:, ::2], old)
    torch.testing.assert_close(new[:, 1::2], (old[:, 1:] + old[:, :-1]) / 2)


@pytest.mark.parametrize("num_more", [1, 2, 8])
def test_extension_changes_little(trained, tokens, num_more):
    """Old weights shrink by Z / Z', Z = Σ tau^-α, for reading and for writing: K changes by less
    than 1 - (Z / Z')² of K(0). Logits change less, as the norm takes out what is common to heads:
    measured 0.2 to 0.32 of that bound.
    """
    result = regrid(trained, tau_max=TAU_MAX * 2**num_more, num_modes=9 + num_more)
    tau = torch.tensor(result.new_tau, dtype=torch.float64)
    for block, change in zip(trained.model.layers, result.layers, strict=True):
        bias = block.mixer.dyn_proj.bias[2:4].detach()
        settings = ControlSettings()
        alpha = settings.alpha_min + (settings.alpha_max - settings.alpha_min) * bias.sigmoid()
        powers = tau ** -alpha[:, None]
        bound = (1 - (powers[:, :9].sum(1) / powers.sum(1)).square()).max().item()
        assert 0.9 * bound < change.sup_error <= bound
        assert change.shape_error < 0.01 * bound
    assert 0 < change_of_logits(trained, result.model, tokens) < result.sup_error


def test_fewer_modes_err_more(trained, tokens):
    model = regrid(trained, num_modes=16).model
    results = [regrid(model, num_modes=n) for n in (15, 12, 8)]
    for name in ("sup_error", "l2_error", "shape_error"):
        errors = [getattr(x, name) for x in results]
        assert errors == sorted(errors) and errors[0] < errors[-1] / 5, name
    changes = [change_of_logits(model, x.model, tokens) for x in results]
    assert changes == sorted(changes)


@pytest.mark.parametrize(("num_modes", "share"), [(8, 0.9), (17, 0.3)])
def test_rescaling_keeps_the_balance(trained, tokens, num_modes, share):
    """K scales with the spacing of modes; D and the norm follow it.

    Measured on three batches: 0.57 to 0.79 and 0.16 of the change of logits without it.
    """
    plain = regrid(trained, num_modes=num_modes, rescale=False)
    scaled = regrid(trained, num_modes=num_modes)
    assert scaled.layers == plain.layers
    assert scaled.shape_error < scaled.l2_error / 5
    without = change_of_logits(trained, plain.model, tokens)
    assert change_of_logits(trained, scaled.model, tokens) < share * without


def test_a_common_factor_is_taken_out(ids):
    """One head: D and the norm undo the factor, and only the shape of the kernel has changed."""
    model = make_model(num_attention_heads=1, frac_num_modes=9, frac_tau_max=TAU_MAX)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.rw_proj.weight.zero_()
            block.mixer.dyn_proj.weight.zero_()
    result = regrid(model, tau_max=TAU_MAX**2, num_modes=17)
    assert result.l2_error > 0.01 and result.shape_error < 1e-4
    assert change_of_logits(model, result.model, ids) < 10 * result.shape_error


@pytest.mark.parametrize(
    "changes",
    [
        {"frac_prior": "exact"},
        {"frac_alpha_fixed": 1.0},
        {"frac_use_D": False, "frac_beta": "exact_zoh"},
        {"frac_beta": "equal_variance", "frac_rw_norm": True},
        {"frac_rw_normalization": "sigmoid"},
        {"frac_rw_normalization": "none", "frac_read_prior": False, "frac_write_prior": False},
    ],
    ids=str,
)
def test_every_kind_of_layer(changes, ids):
    model = make_model(**changes)
    result = regrid(model, num_modes=11, tau_max=1e5)
    assert all(math.isfinite(x) for x in (result.sup_error, result.l2_error, result.shape_error))
    assert result.model(ids).logits.isfinite().all()


@pytest.mark.parametrize("bank", ["geometric", "W1_M12_simplex", [1.0, 4, 20, 300]])
def test_saved_and_loaded(model, ids, bank, tmp_path):
    sizes = {"num_modes": 5, "tau_max": 900.0} if bank == "geometric" else {}
    new = regrid(model.float(), bank=bank, **sizes).model
    new.save_pretrained(tmp_path)
    loaded = FracForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.frac_bank == bank
    assert loaded.config.frac_num_modes == new.model.layers[0].mixer.num_modes
    assert torch.equal(loaded(ids).logits, new(ids).logits)


def test_state_and_generation(model, ids):
    new = regrid(model.float(), num_modes=3).model
    with torch.no_grad():
        cache = new(ids, use_cache=True).past_key_values
    assert isinstance(cache, FracCache)
    assert cache.tensors()[0].shape == (3, 2, 3, 16)
    tokens = new.generate(ids, max_new_tokens=5, do_sample=False)
    assert tokens.shape == (3, 45)
    with torch.no_grad():
        assert torch.equal(new(tokens[:, :-1]).logits[:, -1].argmax(-1), tokens[:, -1])


def test_it_can_be_trained_and_other_heads_work(ids):
    model = make_model(torch.float32, FracForCausalLM).train()
    model.model.layers[0].mixer.rw_proj.weight.requires_grad_(False)
    new = regrid(model, num_modes=4).model
    new(ids, labels=ids).loss.backward()
    weights = [block.mixer.rw_proj.weight for block in new.model.layers]
    assert new.training and weights[0].grad is None and weights[1].grad.shape == (16, 32)
    base = FracModel(FracConfig(vocab_size=61, hidden_size=16, num_attention_heads=2)).eval()
    assert regrid(base, num_modes=4).model(ids).last_hidden_state.shape == (3, 40, 16)


def test_controls_can_be_given(model):
    dyn = Dynamics(*(torch.tensor(x) for x in (0.1, 0.5, 1.0)))
    one = regrid(model, num_modes=4, controls=dyn)
    assert len({layer.sup_error for layer in one.layers}) == 1
    each = regrid(model, num_modes=4, controls=[dyn, dyn, dyn._replace(alpha=torch.tensor(0.9))])
    assert each.layers[:2] == one.layers[:2] and each.layers[2] != one.layers[2]
    with pytest.raises(ValueError, match="one for each of 3 layers, got 2"):
        regrid(model, num_modes=4, controls=[dyn, dyn])
    with pytest.raises(ValueError, match=r"shape \(2,\), one for each head, got \(5,\)"):
        regrid(model, num_modes=4, controls=dyn._replace(lam=torch.ones(5)))


def test_the_report_is_readable(model):
    text = str(regrid(model, num_modes=4, tau_max=1000.0))
    assert text.startswith("timescales: 8 from 1 to 65536 -> 4 from 1 to 1000\n")
    assert len(text.splitlines()) == 5


def test_named_banks(model):
    new = regrid(model, bank="W2_M16_simplex")
    assert new.model.config.frac_num_modes == 16
    assert new.new_tau == tuple(named_bank("W2_M16_simplex"))
    back = regrid(new.model, bank="geometric", num_modes=8)
    assert back.new_tau == tuple(geometric_bank(8, 1.0, 65536.0))


def test_refusals(model):
    with pytest.raises(ValueError, match="model must be a Frac model, got Linear"):
        regrid(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="fixed timescales, got frac_learned_timescales=True"):
        regrid(make_model(frac_learned_timescales=True), num_modes=4)
    with pytest.raises(ValueError, match=r"num_modes of a geometric bank.*pass bank='geometric'"):
        regrid(make_model(frac_bank="W1_M8_simplex"), num_modes=4)
    for model, bank in (
        (make_model(frac_bank="per_head"), "geometric"),
        (make_model(), "per_head"),
    ):
        with pytest.raises(ValueError, match="bank must be one that all heads share"):
            regrid(model, bank=bank)
    with pytest.raises(ValueError, match="tau_max and tau_min belong to a geometric bank"):
        regrid(model, bank=[1.0, 2.0], tau_max=5.0)
    with pytest.raises(ValueError, match="must have num_modes = 3 timescales, got 2"):
        regrid(model, bank=[1.0, 2.0], num_modes=3)
    with pytest.raises(ValueError, match="tau_max must be > tau_min"):
        regrid(model, tau_max=0.5)
    with pytest.raises(ValueError, match="num_modes must be an integer >= 1, got 0"):
        regrid(model, num_modes=0)
    model.model.layers[1].mixer.rw_proj = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"rw_proj must be an nn\.Linear, got Sequential"):
        regrid(model, num_modes=4)
