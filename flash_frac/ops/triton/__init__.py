"""Triton kernels and their launchers. Importing a module of this package imports triton.

Dialect: i_ program index, o_ offsets, p_ pointer, b_ block value, m_ mask, CAPS constexpr.
"""
