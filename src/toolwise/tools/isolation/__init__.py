"""Runs tools in worker processes, which can be killed when a call ignores its deadline."""

from toolwise.tools.isolation.default_pool import close, shared_pool

__all__ = ["close", "shared_pool"]
