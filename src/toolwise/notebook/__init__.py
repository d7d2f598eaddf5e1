"""Source files for functions and classes that have none: notebook cells, the REPL, `exec`.

Worker processes and later commands load code from files. `collect_source` returns the text of such a file: a definition
and everything it refers to by name, transitively: functions and classes of other cells, imports, constants.
"""

from toolwise.notebook.source import collect_source, lacks_file, unwrap_target

__all__ = ["collect_source", "lacks_file", "unwrap_target"]
