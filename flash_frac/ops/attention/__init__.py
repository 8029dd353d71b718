"""Attention of one token to keys and values in buffers, for decoding."""
