"""Episodes: a policy and a world, turn by turn."""
