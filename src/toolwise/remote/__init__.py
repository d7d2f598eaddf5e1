"""Requests to OpenAI-compatible servers: the policies behind them, and judges."""
