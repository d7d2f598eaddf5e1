"""Runs tools in worker processes, which can be killed when a call ignores its deadline."""

from toolwise.tools.isolation.shared_pool import close, run, shared_pool

__all__ = ["close", "run", "shared_pool"]
