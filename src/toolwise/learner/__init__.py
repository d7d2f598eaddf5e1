"""Learning: rows from rollouts, losses, and the actor that owns the weights."""
