"""Outcome tables: means over scored draws, selection and concatenation."""

from __future__ import annotations

import numpy as np

from toolwise.frontier.outcomes import OutcomeTable


def made(rows: int = 2, routes: tuple[str, ...] = ("A", "B")) -> OutcomeTable:
    scores = np.arange(rows * len(routes) * 4, dtype=float).reshape(rows, len(routes), 4)
    return OutcomeTable(tuple(f"r{i}" for i in range(rows)), routes, scores, scores / 10)


def test_draws_without_a_score_count_for_neither_score_nor_cost() -> None:
    outcomes = made()
    outcomes.scores[0, 0, 3] = np.nan
    assert outcomes.mean_over_draws("scores")[0].tolist() == [1.0, 5.5]
    assert np.allclose(outcomes.mean_over_draws("costs")[0], [0.1, 0.55])


def test_routes_rows_and_draws_can_be_selected() -> None:
    outcomes = made(3)
    assert outcomes.select_routes(["B"]).scores.tolist() == outcomes.scores[:, 1:].tolist()
    assert outcomes.select_rows([2]).row_ids == ("r2",)
    assert outcomes.select_draws(slice(0, 2)).scores.shape == (3, 2, 2)


def test_routes_of_the_same_rows_can_be_concatenated() -> None:
    both = made().concat_routes(made(routes=("C",)))
    assert both.routes == ("A", "B", "C")
    assert both.scores.shape == (2, 3, 4)
