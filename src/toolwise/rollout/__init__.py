"""Rollouts: episodes of a policy in an environment, one or many at a time."""
