"""`toolwise train CONFIG --dry-run`: two tasks for real, what is wrong, and what the run would need."""

from toolwise.checks.dry_run.command import dry_run

__all__ = ["dry_run"]
