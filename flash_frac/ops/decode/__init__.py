"""One token at a time, its states updated in place: Triton kernels without gradients."""
