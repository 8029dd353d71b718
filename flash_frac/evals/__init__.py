"""Evaluate a language model: the paper's suites, and loss by context length.

If lm-eval is installed, importing this package registers the model "frac" with it.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import flash_frac.models  # noqa: F401  (registers Frac with the Auto classes)
from flash_frac.evals.perplexity import bits_per_byte, loss_by_length, scored_tokens

if find_spec("lm_eval") is not None:
    # lm-eval registers its own models only if the registry is empty.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    # By name, so that lm-eval and its dependencies load only when the model is used.
    model_registry.register("frac", target="flash_frac.evals.language_model:FracLM")

__all__ = ["bits_per_byte", "loss_by_length", "scored_tokens"]


def __getattr__(name: str) -> Any:
    # ByteNgram used to be defined here; its old name keeps working.
    if name == "ByteNgram":
        return importlib.import_module("flash_frac.quickstart.ngram").ByteNgram
    raise AttributeError(f"module 'flash_frac.evals' has no attribute {name!r}")
