"""Training runs: the loop, the trainer, evaluation, SFT, records, metrics, checkpoints and trackers."""
