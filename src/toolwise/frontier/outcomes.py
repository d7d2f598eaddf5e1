"""The outcome of every draw of every row under every route: the data that a frontier is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import DataError
from toolwise.routing.threshold import Floats


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """Scores and costs, [rows, routes, draws]; NaN where a draw could not be scored."""

    row_ids: tuple[str, ...]
    routes: tuple[str, ...]
    """The routes, followed by what they are compared with: ALL_TOOLS, OTC."""
    scores: Floats
    costs: Floats

    def mean_over_draws(self, what: str) -> Floats:
        """The mean of "scores" or "costs" over the scored draws, [rows, routes]."""
        values = np.where(np.isnan(self.scores), np.nan, getattr(self, what))
        counts = (~np.isnan(values)).sum(axis=2)
        sums = np.nan_to_num(values, nan=0.0).sum(axis=2)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def complete_rows(self) -> NDArray[np.int64]:
        """Indices of the rows scored under every route."""
        complete = np.flatnonzero(~np.isnan(self.mean_over_draws("scores")).any(axis=1))
        if not len(complete):
            raise DataError(
                "no row was scored under every route: look for the reason in the pool's rollouts, then run again"
            )
        return complete

    def select_rows(self, chosen: Sequence[int] | NDArray[np.int64]) -> OutcomeTable:
        return replace(
            self,
            row_ids=tuple(self.row_ids[i] for i in chosen),
            scores=self.scores[chosen],
            costs=self.costs[chosen],
        )

    def select_routes(self, routes: Sequence[str]) -> OutcomeTable:
        """Only these routes, in the given order."""
        columns = [self.routes.index(name) for name in routes]
        return replace(
            self,
            routes=tuple(routes),
            scores=self.scores[:, columns],
            costs=self.costs[:, columns],
        )

    def select_draws(self, chosen: slice) -> OutcomeTable:
        return replace(self, scores=self.scores[:, :, chosen], costs=self.costs[:, :, chosen])

    def concat_routes(self, other: OutcomeTable) -> OutcomeTable:
        """Adds the routes of `other`, which must have the same rows and number of draws."""
        return OutcomeTable(
            self.row_ids,
            (*self.routes, *other.routes),
            np.concatenate([self.scores, other.scores], axis=1),
            np.concatenate([self.costs, other.costs], axis=1),
        )
