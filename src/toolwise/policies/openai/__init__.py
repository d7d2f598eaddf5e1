"""The policy behind any OpenAI-compatible chat server."""
