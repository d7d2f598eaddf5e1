"""Attaching advantages to rollouts, and calling an estimator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolwise.advantages import Gigpo, Grpo, credit
from toolwise.advantages.assign import (
    check_added_tokens,
    credit_steps,
    credit_tokens,
    learns_from_equal,
    with_advantage,
)
from toolwise.errors import ToolwiseError
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AddedRollout, AnnotatedRollout, CreditedBatch, CreditedRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]


class Mine(AdvantageEstimator):
    """A minimal user estimator: it only defines `__call__`."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        return self.result(rollouts)  # type: ignore[no-any-return]


def raises_ours(rollouts: Any) -> Any:
    raise ToolwiseError("give a finite one")


def with_added(added: Any, *advantages: Any) -> Any:
    """An estimator that adds these rows, or a copy of the first rollout with these advantages."""

    def estimate(rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        copies = [AddedRollout(rollouts[0].scored, arrays) for arrays in advantages]
        return CreditedBatch(Grpo()(rollouts).rollouts, added=copies or added)

    return estimate


def test_an_estimator_that_only_defines_its_call_has_all_the_rest() -> None:
    mine = Mine(None)
    assert (mine.needs, mine.rewards, mine.uses_step_rewards) == (frozenset(), None, False)
    assert (mine.min_group_size, mine.per, mine.learns_from_equal_scores(1.0)) == (2, "token", False)


def test_a_result_is_passed_on(step: Step, rollout: Make) -> None:
    made = [rollout(float(i), steps=[step(state="s")]) for i in range(2)]
    assert credit(Mine(Gigpo()), made).metrics["gigpo/n_anchor_groups"] == 1.0
    assert credit(Grpo(), made).metrics == {}


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_parts_of_another_estimator_that_no_longer_add_up_are_left_out(
    factor: float, step: Step, rollout: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        batch = Grpo()(rollouts)
        credited = [replace(r, advantages=tuple(a * np.float32(factor) for a in r.advantages)) for r in batch.rollouts]
        return replace(batch, rollouts=credited)

    made = [rollout(float(i), steps=[step(tokens=2), step(tokens=1)]) for i in range(3)]
    credited = credit(Mine(scaled), made).rollouts
    stale = factor != 1.0
    assert [r.parts is None for r in credited] == [stale, False, stale]  # the second advantage is 0
    assert ("parts that do not add up" in caplog.text) == stale


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda rollouts: 1 / 0, "Mine failed: ZeroDivisionError: division by zero (" + __file__),
        (lambda rollouts: sys.exit(3), "Mine failed: RuntimeError: it called sys.exit(3)"),
        (lambda rollouts: list(rollouts), "Mine returned a list; return a toolwise.CreditedBatch"),
        (lambda rollouts: CreditedBatch([]), "Mine returned 0 rollouts for 1; return each with its advantages"),
        (lambda rollouts: CreditedBatch(rollouts), "Mine failed: AttributeError: 'AnnotatedRollout' object has no"),
        (
            lambda rollouts: CreditedBatch([CreditedRollout(r, r.scored.steps, ()) for r in rollouts]),
            "Mine returned 0 arrays of advantages for the 1 steps of rollout r; return one for each",
        ),
        (
            lambda rollouts: CreditedBatch([CreditedRollout(r, r.scored.steps, ([0.5],)) for r in rollouts]),
            "Mine: the advantages of rollout r, step 0, must be an array of",
        ),
        (
            lambda rollouts: CreditedBatch(
                [
                    CreditedRollout(r, r.scored.steps, (np.full(len(r.scored.steps[0].tokens.token_ids), np.nan),))
                    for r in rollouts
                ]
            ),
            "Mine: the advantages of rollout r are not all finite numbers",
        ),
        (lambda rollouts: Grpo()([None]), "Mine failed: AttributeError"),
        (lambda rollouts: credit_steps(rollouts, None, None), "Mine failed: AttributeError"),
        (raises_ours, "Mine: give a finite one (" + __file__),
        (with_added(None), "Mine returned None as `added`; return a list of toolwise.types.AddedRollout"),
        (with_added([3]), "Mine returned 3 in `added`; use toolwise.types.AddedRollout(scored, advantages)"),
        (with_added([AddedRollout(None, ())]), "Mine returned AddedRollout(scored=None, advantages=()) in `added`"),  # type: ignore[arg-type]
        (with_added(None, ()), "Mine returned 0 arrays of advantages for the 1 steps of rollout r"),
        (with_added(None, 3), "Mine returned a int, not arrays of advantages for the 1 steps of rollout r"),
        (with_added(None, ([1.0],)), "Mine: the advantages of rollout r, step 0, must be an array of"),
        (with_added(None, (np.zeros((2, 2)),)), "Mine: the advantages of rollout r, step 0, must be an array of"),
        (
            lambda rollouts: CreditedBatch([replace(r, returns=(np.zeros(99),)) for r in Grpo()(rollouts).rollouts]),
            "Mine: the returns of rollout r, step 0, must be an array of",
        ),
        (
            lambda rollouts: CreditedBatch([replace(r, steps=(3,)) for r in Grpo()(rollouts).rollouts]),
            "Mine returned other steps for rollout r; return its 1 steps",
        ),
        (
            lambda rollouts: CreditedBatch(Grpo()(rollouts).rollouts, {"a": "b"}),
            "Mine failed: ValueError: could not convert string to float: 'b'",
        ),
    ],
)
def test_whatever_goes_wrong_in_it_is_an_error_in_one_line(result: Any, told: str, step: Step, rollout: Make) -> None:
    with pytest.raises(ToolwiseError) as caught:
        credit(Mine(result), [rollout(1.0, steps=[step()])])
    assert str(caught.value).startswith(f"algorithm.adv_estimator: {told}")
    assert "\n" not in str(caught.value)


def test_added_tokens_are_the_model_s(step: Step, rollout: Make) -> None:
    made = rollout(1.0, steps=[step(tokens=2)]).scored
    added = [AddedRollout(made, ())]
    largest = max(max(s.tokens.token_ids) for s in made.steps)
    check_added_tokens(added, largest + 1)
    with pytest.raises(ToolwiseError, match=f"`added` has the token id {largest}, but the model has only {largest}"):
        check_added_tokens(added, largest)


def test_an_error_in_what_it_learns_from_is_one_line_too() -> None:
    class Equal(Grpo):
        def learns_from_equal_scores(self, score: float) -> bool:
            raise ValueError("no\nscore")

    with pytest.raises(ToolwiseError) as caught:
        learns_from_equal(Equal(), 1.0)
    assert str(caught.value).startswith(
        f"algorithm.adv_estimator: Equal: learns_from_equal_scores failed: ValueError: no score ({__file__}:"
    )


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
