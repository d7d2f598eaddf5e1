"""The trained agent: load it, ask it questions, keep it within a budget, export it."""
