"""Safe handling of values, patterns, schemas and exceptions from user code and data."""
