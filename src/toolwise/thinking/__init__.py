"""Thinking levels: parse the level of each step, generate thoughts at the others, score the action under each."""
