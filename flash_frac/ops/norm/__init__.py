"""Root-mean-square norms, plain and after a gate."""
