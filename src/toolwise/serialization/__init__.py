"""JSON text, lossless encoding of checkpoint state, and durable files."""
