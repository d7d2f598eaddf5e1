"""Rollouts of agents that are not ours, which call the model over HTTP: every call is recorded (docs/own-agents.md)."""
