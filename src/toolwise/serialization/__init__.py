"""JSON text, the state of checkpoints, and durable files."""
