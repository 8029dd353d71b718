"""Measures of a language model: the paper's suites, loss by context length.

With lm-eval installed, importing this registers its model "frac".
"""

import importlib
from importlib.util import find_spec
from typing import Any

import flash_frac.models  # noqa: F401  (registers Frac with the Auto classes)
from flash_frac.evals.perplexity import bits_per_byte, loss_by_length, scored_tokens

if find_spec("lm_eval") is not None:
    # lm-eval lists its own models only where none is listed yet.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    # By name: lm-eval itself, and what it needs, is loaded when the model is asked for.
    model_registry.register("frac", target="flash_frac.evals.language_model:FracLM")

__all__ = ["bits_per_byte", "loss_by_length", "scored_tokens"]


def __getattr__(name: str) -> Any:
    # The model of the quickstart had its home here; its old name keeps working.
    if name == "ByteNgram":
        return importlib.import_module("flash_frac.quickstart.ngram").ByteNgram
    raise AttributeError(f"module 'flash_frac.evals' has no attribute {name!r}")
