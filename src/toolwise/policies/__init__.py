"""Whoever decides: a model in this process, or a script."""
