"""silu(gate) up, the middle of a gated MLP."""
