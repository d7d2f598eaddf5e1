"""`toolwise train CONFIG --dry-run`: run two tasks, report problems, estimate memory and time."""

from toolwise.checks.dry_run.command import dry_run

__all__ = ["dry_run"]
