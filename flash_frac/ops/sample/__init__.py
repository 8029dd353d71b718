"""Sample the next token of each sequence; every sequence has its own settings."""
