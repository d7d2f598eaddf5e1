"""Thinking levels: what they are, what was written, what the other levels would have thought, what each was worth."""
