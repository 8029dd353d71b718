import pytest
import torch

from flash_frac.layers import FracMixer, GatedMLP, RMSNorm
from flash_frac.models import FracConfig, FracForCausalLM
from tests.backends import backends_here

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "frac_num_modes": 8,
    "frac_tau_max": 65536.0,
    "initializer_range": 0.3,
}


def make_model(dtype=torch.float64, model_class=FracForCausalLM, **changes):
    torch.manual_seed(3)
    model = model_class(FracConfig(**{**SIZES, **changes})).to(dtype).eval()
    with torch.no_grad():
        for block in model.get_submodule("model").layers:
            mixer = getattr(block, "mixer", None)
            if mixer is not None:
                mixer.dt_bias.normal_()
            if getattr(mixer, "D", None) is not None:
                mixer.D.normal_()
    return model


def on_backend(model, backend):
    for module in model.modules():
        if isinstance(module, FracMixer | GatedMLP | RMSNorm):
            module.backend = backend
    return model


@pytest.fixture
def model(request):
    """On any backend; a test marked `each_backend` gets it on all that take float64."""
    return on_backend(make_model(), getattr(request, "param", "auto"))


# tests/kernels has the contracts of models on the other backends.
each_backend = pytest.mark.parametrize("model", backends_here(torch.float64), indirect=True)


@pytest.fixture
def ids():
    return torch.randint(3, 61, (3, 40), generator=torch.Generator().manual_seed(5))


class Logits(torch.nn.Module):
    """A model as a function of ids and mask, for exporters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


# Of `Logits`, for torch.export.
ANY_LENGTH = {name: {1: torch.export.Dim.AUTO} for name in ("ids", "mask")}


def padded(time):
    """Ids and mask (2, T), the first row padded on the left."""
    ids = torch.randint(3, 61, (2, time), generator=torch.Generator().manual_seed(time))
    mask = torch.ones_like(ids)
    mask[0, : time // 3] = 0
    return ids, mask
