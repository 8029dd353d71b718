"""The HTTP server: OpenAI's API on one engine. `serving.serve` starts it."""
