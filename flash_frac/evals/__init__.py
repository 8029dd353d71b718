"""Measures of a language model: loss by context length, and n-gram models to hold it against."""

from flash_frac.evals.ngram import ByteNgram
from flash_frac.evals.perplexity import bits_per_byte, loss_by_length, scored_tokens

__all__ = ["ByteNgram", "bits_per_byte", "loss_by_length", "scored_tokens"]
