"""Runs programs written by a model: each in a fresh process, never in a reward's worker."""
