"""Configuration: the schema of a run, the loader for TOML and YAML, and references to Python code."""
