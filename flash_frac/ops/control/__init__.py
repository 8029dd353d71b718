"""From raw logits to the inputs of the scan. Not `controls`, which is a function of `ops`."""
