"""Measures of a language model: the paper's suites, loss by context length, n-gram models.

With lm-eval installed, importing this registers its model "frac".
"""

from importlib.util import find_spec

import flash_frac.models  # noqa: F401  (registers Frac with the Auto classes)
from flash_frac.evals.ngram import ByteNgram
from flash_frac.evals.perplexity import bits_per_byte, loss_by_length, scored_tokens

if find_spec("lm_eval") is not None:
    # lm-eval lists its own models only where none is listed yet.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    # By name: lm-eval itself, and what it needs, is loaded when the model is asked for.
    model_registry.register("frac", target="flash_frac.evals.language_model:FracLM")

__all__ = ["ByteNgram", "bits_per_byte", "loss_by_length", "scored_tokens"]
