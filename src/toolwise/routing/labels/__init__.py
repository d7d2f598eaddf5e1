"""Labels for tools and rows, from a language model or from rules: optional shaping for the router, never needed."""
