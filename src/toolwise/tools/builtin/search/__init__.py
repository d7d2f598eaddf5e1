"""Search with SQLite's full-text index over a task's documents, folders, files and WordNet."""
