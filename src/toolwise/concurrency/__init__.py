"""Deadlines, limits on concurrent work, thread counts, and asyncio tasks that user code cannot find."""
