"""What agents act in."""
