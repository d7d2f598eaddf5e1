"""Route labels for rows and families for tools, from a language model or from rules; optional for training a router."""
