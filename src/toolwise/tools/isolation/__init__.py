"""Tools in worker processes that can be killed: what a deadline needs to end work that does not heed it."""

from toolwise.tools.isolation.shared_pool import close, run, shared_pool

__all__ = ["close", "run", "shared_pool"]
