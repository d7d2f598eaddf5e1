"""The router's head: a small network on the actor's model, and how it learns."""
