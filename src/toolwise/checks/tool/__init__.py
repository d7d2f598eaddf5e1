"""`toolwise check tool`: tests a tool before a run uses it."""
