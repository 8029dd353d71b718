"""The next token of each sequence, chosen by settings of its own."""
