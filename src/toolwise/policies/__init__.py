"""Policies: a model in this process, a server, or a script."""
