"""Attention of one token over a KV cache, for decoding."""
