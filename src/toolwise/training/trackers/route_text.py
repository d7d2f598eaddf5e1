"""Formats the shares of a router's routes for the display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise

from rich.text import Text

ROUTE_LABELS = {"ANSWER": "answer", "SEARCH-FAMILY": "search", "CALCULATE-FAMILY": "calculate"}
_STYLES = ("green", "cyan", "yellow", "magenta")
_SHARE_PREFIX = "router/share/"


def route_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """route -> the share the policy gives it; empty without a router."""
    shares = {
        name.removeprefix(_SHARE_PREFIX): value for name, value in metrics.items() if name.startswith(_SHARE_PREFIX)
    }
    return {ROUTE_LABELS.get(name, name.lower()): share for name, share in shares.items() if math.isfinite(share)}


def share_bar(shares: Mapping[str, float], width: int = 40) -> Text:
    """The shares as one bar, followed by their names in the same colors."""
    bar, names = Text(), Text()
    lengths = _lengths(list(shares.values()), width)
    for length, (name, share), style in zip(lengths, shares.items(), cycle(_STYLES), strict=False):
        bar.append("█" * length, style=style)
        names.append(f"  {name} {share:.0%}", style=style)
    return bar + names


def _lengths(shares: Sequence[float], width: int) -> list[int]:
    """Bar lengths in characters, which add up to `width`."""
    total = math.fsum(shares) or 1.0
    edges = [round(width * math.fsum(shares[:i]) / total) for i in range(len(shares) + 1)]
    return [after - before for before, after in pairwise(edges)]
