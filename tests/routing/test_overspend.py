"""How far a validation exceeds its budgets, worked by hand."""

from __future__ import annotations

import pytest

from toolwise.routing.overspend import overspend


@pytest.mark.parametrize(
    ("spent", "limits", "expected"),
    [
        ({"cost": [1.0, 0.0]}, {"cost": 0.5}, 0.0),
        ({"cost": [0.525, 0.525]}, {"cost": 0.5}, 0.0),  # 5 % over is within
        ({"cost": [1.0, 0.46]}, {"cost": 0.5}, 0.46),  # 0.73 of 0.5
        ({"cost": [0.0, 0.2]}, {"cost": 0.0}, 0.1),  # for a budget of 0: the mean cost
        ({"cost": [0.0, 0.0]}, {"cost": 0.0}, 0.0),
        ({"usd": [3.0], "seconds": [30.0]}, {"usd": 2.0, "seconds": 10.0}, 2.0),  # the worst of several
        ({"usd": [1.0], "seconds": [15.0]}, {"usd": 2.0, "seconds": 10.0}, 0.5),
        ({"usd": [9.0]}, {}, 0.0),
    ],
)
def test_the_largest_overspending_as_a_share_of_its_budget(
    spent: dict[str, list[float]], limits: dict[str, float], expected: float
) -> None:
    assert overspend(spent, limits) == pytest.approx(expected)
