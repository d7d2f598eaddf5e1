"""Score against cost: how a router performs over a range of budgets, next to baselines and an oracle."""
