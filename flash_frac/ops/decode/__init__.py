"""Decode one token at a time, updating states in place: Triton kernels without gradients."""
