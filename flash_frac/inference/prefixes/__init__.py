"""Prefix cache: states of prompts read before, so they are not read again. Use `PrefixStates`."""

from flash_frac.inference.prefixes.levels import PrefixStats
from flash_frac.inference.prefixes.states import PrefixStates

__all__ = ["PrefixStates", "PrefixStats"]
