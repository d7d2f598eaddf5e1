"""Trackers of a run's metrics: `jsonl` stores them, `console` shows them live."""
