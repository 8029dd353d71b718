"""Depthwise causal convolution over time and SiLU, with an explicit window of past inputs."""
