"""The policy for OpenAI-compatible chat servers."""
