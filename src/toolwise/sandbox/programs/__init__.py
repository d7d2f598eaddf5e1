"""Programs that a model wrote: each in a fresh process, never in a reward's worker."""
