"""`toolwise check env`: tests an environment before a run uses it."""
