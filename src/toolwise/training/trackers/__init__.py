"""Where a run's figures go: `jsonl` keeps them, `console` shows them while they happen."""
