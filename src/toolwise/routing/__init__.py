"""Routing: which tools a prompt may use, under a cost budget, and how the router is trained."""
