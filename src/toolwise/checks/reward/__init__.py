"""For people who write rewards: look at one before a run trusts it, and score a run's rollouts again after a fix."""
