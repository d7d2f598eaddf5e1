"""Attaching advantages to rollouts, and calling an estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from toolwise.advantages import Gigpo, Grpo, credit
from toolwise.advantages.assign import credit_steps, credit_tokens, with_advantage
from toolwise.protocols import Annotation, MeasuredEstimator
from toolwise.types import AnnotatedRollout, CreditedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]


class Plain:
    """A minimal user estimator: `__call__` and `needs`."""

    needs: ClassVar[frozenset[Annotation]] = frozenset()

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return []


def test_an_estimator_with_nothing_to_report_reports_nothing(step: Step, rollout: Make) -> None:
    made = [rollout(float(i), steps=[step()]) for i in range(2)]
    credited, metrics = credit(Grpo(), made)
    assert metrics == {}
    assert [c.steps for c in credited] == [c.steps for c in Grpo()(made)]
    assert credit(Plain(), made) == ([], {})


def test_an_estimator_that_measures_is_asked(step: Step, rollout: Make) -> None:
    made = [rollout(float(i), steps=[step(state="s")]) for i in range(2)]
    assert isinstance(Gigpo(), MeasuredEstimator)
    assert not isinstance(Grpo(), MeasuredEstimator)
    assert credit(Gigpo(), made)[1]["gigpo/n_anchor_groups"] == 1.0


def test_a_copy_has_the_credit_and_all_the_rest(step: Step) -> None:
    given = step(3, state="s", base_reward=2.0)
    made = with_advantage(given, 0.5, 1.5)
    assert (made.advantage, made.return_to_go) == (0.5, 1.5)
    assert made.model_dump() == given.model_copy(update={"advantage": 0.5, "return_to_go": 1.5}).model_dump()
    assert given.advantage is None
    assert type(made) is type(given)


def test_credit_by_step(step: Step, rollout: Make) -> None:
    made = [rollout(0.0, steps=[step(0, tokens=2), step(1, tokens=None)]), rollout(0.0, steps=[step(0, tokens=1)])]
    found = credit_steps(made, np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]))
    assert [[a.tolist() for a in r.advantages] for r in found] == [[[1, 1], []], [[3]]]
    assert [[s.return_to_go for s in r.steps] for r in found] == [[4, 5], [6]]


def test_credit_by_token(step: Step, rollout: Make) -> None:
    made = [rollout(0.0, steps=[step(0, tokens=2), step(1, tokens=None)]), rollout(0.0, steps=[step(0, tokens=1)])]
    flat: Any = np.array([1.0, 2.0, 3.0])
    found = credit_tokens(made, np.array([2, 0, 1]), flat, 10 * flat)
    assert [[a.tolist() for a in r.advantages] for r in found] == [[[1, 2], []], [[3]]]
    assert [[a.tolist() for a in r.returns or ()] for r in found] == [[[10, 20], []], [[30]]]
    assert [[s.advantage for s in r.steps] for r in found] == [[1.5, 0], [3]]
    assert [[s.return_to_go for s in r.steps] for r in found] == [[10, 0], [30]]
    assert credit_tokens([], np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0)) == []
