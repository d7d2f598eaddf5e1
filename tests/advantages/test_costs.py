"""The cost of thinking: which steps pay it, by hand, and that only advantages include it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rlvcr_cases import thinking_step, thoughtful

from toolwise.advantages import Gigpo, Grpo, ReinforcePlusPlus, total_rewards
from toolwise.types import AnnotatedRollout, RewardSettings


def rollout(name: str, spent: list[int], rewards: list[float | None]) -> AnnotatedRollout:
    """A score of 1 at a cost of 0.1 per thinking token; the state of each step is its index."""
    made = thoughtful(
        1.0, [thinking_step(4, tokens={4: tokens}) for tokens in spent], name=name, price=0.1, charged=True
    )
    steps = tuple(
        step.model_copy(update={"base_reward": reward, "step_info": {"state_key": str(index)}})
        for index, (step, reward) in enumerate(zip(made.scored.steps, rewards, strict=True))
    )
    return replace(made, scored=replace(made.scored, steps=steps))


def returns(found: list) -> list[list[float]]:
    return [[round(step.return_to_go, 6) for step in credited.steps] for credited in found]


def test_it_is_not_in_the_scores() -> None:
    batch = [rollout("long", [6, 0], [None, None]), rollout("short", [0], [None])]
    long, short = Grpo(norm_by_std=False)(batch).rollouts
    assert (long.steps[0].advantage, short.steps[0].advantage) == pytest.approx((-0.15, 0.15))  # 3 a step, against none
    assert long.annotated is batch[0]
    assert long.annotated.scored.score == 1.0


def test_steps_with_rewards_of_their_own_pay_for_their_own_thoughts() -> None:
    """6 tokens in the first of two steps: 0.3 off its return, nothing off the second's; stored rewards stay."""
    batch = [rollout("long", [6, 0], [0.0, 1.0]), rollout("short", [0, 0], [0.0, 1.0])]
    gigpo = Gigpo(gamma=1.0, omega=0.5, normalization="mean_norm")
    found = gigpo(batch).rollouts
    assert returns(found) == [[0.7, 1.0], [1.0, 1.0]]
    # Scores of 0.7 and 1, and the same for the first steps: ∓0.15 by either; second steps are equal.
    assert [step.advantage for c in found for step in c.steps] == pytest.approx([-0.15, -0.075, 0.15, 0.075])
    assert [step.base_reward for c in found for step in c.steps] == [0.0, 1.0, 0.0, 1.0]


def test_steps_without_a_reward_pay_for_their_own_thoughts_too() -> None:
    """The last step gets the score of 1 either way; 6 tokens in the first of two steps cost 0.3 there."""
    batch = [rollout("long", [6, 0], [0.0, None]), rollout("short", [0, 0], [None, None])]
    found = Gigpo(gamma=1.0)(batch).rollouts
    assert returns(found) == [[0.7, 1.0], [1.0, 1.0]]
    assert [step.base_reward for c in found for step in c.steps] == [0.0, None, None, None]


def test_the_price_comes_after_the_remainder() -> None:
    """Steps that paid 0.2 of a score of 1 leave 1.2 for the end, however much was thought; defaults are added."""
    batch = [rollout("long", [6, 0, 0], [-0.2, 0.0, None]), rollout("short", [0, 0, 0], [-0.2, None, 0.0])]
    gigpo = Gigpo(gamma=1.0, omega=1.0, normalization="mean_norm", default_step_reward=0.5)
    found = gigpo(batch).rollouts
    assert returns(found) == [[1.3, 1.7, 1.7], [1.5, 1.7, 1.2]]
    assert [c.steps[0].advantage for c in found] == pytest.approx([-0.1, 0.1])  # totals 1.3 and 1.5


def test_whole_rollouts_pay_once_where_step_rewards_are_added() -> None:
    batch = [rollout("long", [6, 0], [0.5, 0.0]), rollout("short", [0, 0], [0.5, 0.0])]
    grpo = Grpo(norm_by_std=False, terminal_score="add")
    long, short = grpo(batch).rollouts
    assert (long.steps[0].advantage, short.steps[0].advantage) == pytest.approx((-0.15, 0.15))


def test_the_last_token_of_a_step_pays_for_its_thoughts() -> None:
    [found] = ReinforcePlusPlus()([rollout("long", [6, 0], [0.0, 1.0])]).rollouts
    assert found.returns is not None
    assert [part.round(6).tolist() for part in found.returns] == [[np.float32(0.7)] * 6, [1.0] * 6]


def test_a_price_that_is_not_charged_costs_nothing() -> None:
    made = rollout("long", [6, 0], [0.0, 1.0])
    assert made.thinking is not None
    free = replace(made, thinking=replace(made.thinking, charged=False))
    assert total_rewards([made, free], RewardSettings()).tolist() == pytest.approx([0.7, 1.0])


def test_rollouts_that_were_not_thought_over_cost_nothing() -> None:
    batch = [replace(rollout(name, [6], [1.0]), thinking=None) for name in "ab"]
    for found in Gigpo()(batch).rollouts:
        assert found.steps[0].return_to_go == 1.0
        np.testing.assert_array_equal(found.advantages[0], 0.0)


@pytest.mark.parametrize("kl_too", [False, True])
def test_nobody_pays_twice_where_the_score_is_added(kl_too: bool) -> None:
    batch = [rollout("long", [6, 0], [0.0, 0.0]), rollout("short", [0, 0], [0.0, 0.0])]
    batch = [replace(r, ref_logprobs=tuple(np.full(6, -1.0, np.float32) for _ in range(2))) for r in batch]
    batch = [replace(r, kl_coef=0.1 if kl_too else None) for r in batch]  # the policy still equals its reference
    assert returns(Gigpo(gamma=1.0, terminal_score="add")(batch).rollouts) == [[0.7, 1.0], [1.0, 1.0]]


def test_where_no_score_is_told_steps_without_a_reward_pay_as_well() -> None:
    batch = [rollout("long", [6, 0], [None, 1.0]), rollout("short", [0, 0], [0.0, 1.0])]
    gigpo = Gigpo(gamma=1.0, terminal_score="never", default_step_reward=0.5)
    found = gigpo(batch).rollouts
    assert returns(found) == [[1.2, 1.0], [1.0, 1.0]]
    assert found[0].steps[0].base_reward is None
