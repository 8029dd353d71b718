"""Prefix states: what the model has read before, it need not read again. Use `PrefixStates`."""

from flash_frac.inference.prefixes.states import PrefixStates, PrefixStats

__all__ = ["PrefixStates", "PrefixStats"]
