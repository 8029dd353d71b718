import pytest
import torch
from torch import nn

from flash_frac.inspect import inspect_model
from flash_frac.layers import FracMixer
from flash_frac.models import FracConfig, FracForCausalLM


def tiny(**changes):
    settings = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "frac_num_modes": 5, "frac_tau_max": 500.0}
    torch.manual_seed(0)
    model = FracForCausalLM(FracConfig(**settings | changes))
    for block in model.model.layers:
        if not isinstance(getattr(block, "mixer", None), FracMixer):
            continue
        # Away from the start, where all tokens have nearly the same controls.
        nn.init.normal_(block.mixer.dyn_proj.weight, std=0.5)
        nn.init.normal_(block.mixer.rw_proj.weight, std=0.5)
        nn.init.normal_(block.mixer.dt_bias)
    return model


@pytest.fixture(scope="session")
def report():
    model = tiny()
    return inspect_model(model, torch.randint(0, 32, (2, 96)), text="</script><b>text @@ &")


MIXED = {
    "mixer_types": ["frac", "delta", "sliding_attention", "attention"],
    "num_hidden_layers": 4,
    "sliding_window": 9,
    # Another number of heads than the others have.
    "delta_num_heads": 3,
    "attention_key_value_heads": 1,
    "attention_temperature_length": 16,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="session")
def mixed_report():
    return inspect_model(tiny(**MIXED), torch.randint(0, 32, (2, 96)), text="</script><b>text @@ &")
