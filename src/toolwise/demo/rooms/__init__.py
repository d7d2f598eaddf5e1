"""A text world for thinking levels: rooms, doors and keys, easy steps that need no thought and hard ones that do."""
