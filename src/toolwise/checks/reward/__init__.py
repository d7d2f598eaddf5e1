"""Tools for reward authors: check a reward before a run uses it, and rescore stored rollouts after a fix."""
