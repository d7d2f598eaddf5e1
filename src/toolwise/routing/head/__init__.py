"""The router's head: a small network on top of the actor's model, and its training."""
