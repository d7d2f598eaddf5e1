"""Conditions on stored rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.errors import ConfigError
from toolwise.training.record_filter import parse_condition
from toolwise.training.records import RolloutRecord

RECORD = RolloutRecord(
    task_id="t/7", kind="3", route="SEARCH", score=0.5, metrics={"correct": 1.0, "a-b": 2.0}, calls={"x": 2, "y": 1}
)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("score>=0.5", True),
        ("score > 0.5", False),
        ("score=0.5", True),
        ("score!=1", True),
        ("step<=4", True),
        ("step<4", False),
        ("correct=true", True),
        ("trained_on=none", True),
        ("cost=none", True),
        ("cost>0", False),
        ("cost<0", False),
        ("calls=3", True),
        ("route=SEARCH", True),
        ("route!=SEARCH", False),
        ("kind=3", True),
        ("task_id=t/7", True),
        ("metrics.correct>=1", True),
        ("metrics.a-b=2", True),
        ("metrics.missing=none", True),
    ],
)
def test_a_condition_holds_or_not(condition: str, expected: bool) -> None:
    assert parse_condition(condition).holds(4, RECORD) is expected


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("score", "write a condition such as"),
        ("score>=", "write a condition such as"),
        ("scroe>1", "there is no field 'scroe'; did you mean 'score'"),
        ("zzz=1", "there is no field 'zzz'; use one of step, score"),
        ("route>SEARCH", "> compares numbers, 'SEARCH' is none"),
        ("score>none", "> compares numbers"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(condition: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_condition(condition)
    assert str(caught.value).startswith(f"--where {condition!r}")


def test_a_record_without_values_satisfies_no_order() -> None:
    empty: Any = RolloutRecord()
    assert not any(parse_condition(f"score{sign}0").holds(0, empty) for sign in (">", ">=", "<", "<="))
