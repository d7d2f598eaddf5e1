"""A text environment for thinking levels: rooms, doors and keys; easy steps need no thinking, hard ones do."""
