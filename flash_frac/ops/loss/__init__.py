"""The head and its loss, without the logits of all tokens in memory."""
