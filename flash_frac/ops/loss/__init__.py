"""LM head and cross-entropy, without the logits of all tokens in memory."""
