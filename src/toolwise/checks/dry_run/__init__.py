"""`toolwise train CONFIG --dry-run`: run two tasks, report problems, estimate memory and time."""
