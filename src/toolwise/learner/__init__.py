"""Turns rollouts into training rows and updates the policy: batching, losses, actor, critic, optimiser."""
