"""RMS norms, plain and after a gate."""
