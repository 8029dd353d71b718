"""The HTTP server: OpenAI's API over one engine. `serving.serve` starts it."""
