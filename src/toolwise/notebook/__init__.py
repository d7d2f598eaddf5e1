"""Functions and classes without a file of their own: notebook cells, the REPL, `exec`.

Worker processes and later commands load code from files. `collect_source` gives the text of such a file: a definition,
and whatever it refers to by name, transitively: functions and classes of other cells, imports, constants.
"""

from toolwise.notebook.source import collect_source, lacks_file, unwrap_target

__all__ = ["collect_source", "lacks_file", "unwrap_target"]
