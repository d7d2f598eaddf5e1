"""Accuracy against cost: what a router makes of a budget, beside those who route otherwise and the best there is."""
