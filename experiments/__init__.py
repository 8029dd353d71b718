"""Claims of the paper, put to the test: python -m experiments.NAME.run, from a clone."""
