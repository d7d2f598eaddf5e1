"""A training run: its loop, its trainer, evaluation, SFT, records, metrics, checkpoints and trackers."""
