"""Values, patterns, schemas and exceptions that come from other people's code and data."""
