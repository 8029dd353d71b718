"""The scan of a bank of exponential modes: `api.py` has `frac_scan` and `frac_step`."""
