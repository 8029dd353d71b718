"""Fractional relaxation and its finite banks of exponential modes; needs numpy, and scipy for fits.

`docs/maths.md` explains the mathematics; each file here is one step of it.
"""

from flash_frac.theory.bank_search import OptimisedBank, optimise_bank
from flash_frac.theory.banks import (
    BankInfo,
    bank_info,
    bank_names,
    geometric_bank,
    head_banks,
    named_bank,
    resolve_bank,
)
from flash_frac.theory.dynamics import simulate_bank, simulate_fractional, solve_fractional_step
from flash_frac.theory.minimax import (
    PAPER_ALPHAS,
    PAPER_WINDOW,
    MinimaxFit,
    mean_minimax_error,
    minimax_fit,
)
from flash_frac.theory.mittag_leffler import (
    impulse_response,
    impulse_response_tail,
    relaxation,
    relaxation_tail,
)
from flash_frac.theory.soe import (
    SoeCoefficients,
    balanced_range,
    evaluate_bank,
    kernel_l1_error,
    midpoint_coefficients,
    sup_error,
)
from flash_frac.theory.spectrum import (
    bin_masses,
    impulse_density,
    log_density,
    relaxation_density,
    spectral_mass,
)

__all__ = [
    "PAPER_ALPHAS",
    "PAPER_WINDOW",
    "BankInfo",
    "MinimaxFit",
    "OptimisedBank",
    "SoeCoefficients",
    "balanced_range",
    "bank_info",
    "bank_names",
    "bin_masses",
    "evaluate_bank",
    "geometric_bank",
    "head_banks",
    "impulse_density",
    "impulse_response",
    "impulse_response_tail",
    "kernel_l1_error",
    "log_density",
    "mean_minimax_error",
    "midpoint_coefficients",
    "minimax_fit",
    "named_bank",
    "optimise_bank",
    "relaxation",
    "relaxation_density",
    "relaxation_tail",
    "resolve_bank",
    "simulate_bank",
    "simulate_fractional",
    "solve_fractional_step",
    "spectral_mass",
    "sup_error",
]
