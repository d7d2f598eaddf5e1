"""Several machines: rollout workers and learners as processes of a Ray cluster, for the loops of `training/`."""
