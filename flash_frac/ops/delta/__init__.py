"""The gated delta rule: `api.py` has `delta_scan` and `delta_step`."""
