import pytest
import torch
from torch import nn

from flash_frac.inspect import inspect_model
from flash_frac.models import FracConfig, FracForCausalLM


def tiny(**changes):
    settings = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "frac_num_modes": 5, "frac_tau_max": 500.0}
    torch.manual_seed(0)
    model = FracForCausalLM(FracConfig(**settings | changes))
    for block in model.model.layers:
        # Away from the start, where all tokens have nearly the same controls.
        nn.init.normal_(block.mixer.dyn_proj.weight, std=0.5)
        nn.init.normal_(block.mixer.rw_proj.weight, std=0.5)
        nn.init.normal_(block.mixer.dt_bias)
    return model


@pytest.fixture(scope="session")
def report():
    model = tiny()
    return inspect_model(model, torch.randint(0, 32, (2, 96)), text="</script><b>text @@ &")
