"""Kernels as operators of torch.library, with fake kernels and gradients."""
