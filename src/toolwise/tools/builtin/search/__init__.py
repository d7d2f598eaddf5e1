"""Search: SQLite's full-text index over documents of the task, folders, files and WordNet."""
