"""The small configuration for models in tests."""

from flash_frac.models import FracConfig


def tiny_config(**changes):
    """Two layers of width 16 with two heads of four modes over 259 bytes; `changes` are fields."""
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2}
    return FracConfig(**sizes | {"num_attention_heads": 2, "frac_num_modes": 4} | changes)
