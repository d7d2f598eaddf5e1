"""Checkers for rewards, tools, environments and whole configurations."""
