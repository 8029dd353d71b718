"""Experiments that test the paper's claims: python -m experiments.NAME.run, from a clone."""
