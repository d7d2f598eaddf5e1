"""Names of what a frontier compares, in tables, plots and frontier.json."""

from __future__ import annotations

ALL_TOOLS = "ALL-TOOLS"
"""Not a route: the unchanged prompt with all its tools."""
OTC = "OTC"
"""Another actor, trained with the OTC reward (fewest calls among correct answers); not routed either."""
CLASSIFIER, ORACLE_LABELS = "classifier", "oracle labels"
"""Baseline routers over the same routes; see `frontier/baselines.py`."""
