"""lm-eval's own command with our models: python -m flash_frac.evals run --model frac ..."""

from __future__ import annotations

from flash_frac.extras import require

# Importing this package has registered "frac", and Frac checkpoints with the Auto classes.
require("lm_eval.__main__", "eval", "python -m flash_frac.evals").cli_evaluate()
